"""Download public data sets and make traces of them, for benchmarks.

    python benchmarks/fetch_traces.py [NAME ...] [--folder FOLDER] [--list]
    WARMPREFIX_TRACES=FOLDER python benchmarks/online_hit_ratio.py

Each trace is made of files at one commit of a public repository, whose SHA-256 sums are checked; a file that is in the
folder already is not fetched again. The script prints where a trace comes from and under which licence, and the trace's
header has both. Nothing is written into the clone: by default the folder is `~/.cache/warmprefix/traces`.

- `ragpulse_rag`: the retrievals of a real question-answering service, as it published them (identifiers and lengths, no
  text). The same trace as the row of that name in README.md.
- `xquad_en`, `nq_open_records`: public texts and questions; the retrieval is the demo's BM25, and lengths are estimated
  from the bytes. README.md's rows of the same data sets were made with another retriever and tokenizer. The texts and
  questions of `xquad_en` are written too: `xquad_squad.text.jsonl.gz`, which `plugin_hit_ratio.py` reads.

The sums were computed from the repositories' files. The download over the network has only been tested with a local
server.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from warmprefix import ContextBlock
from warmprefix_tools.demo.retriever import Bm25Retriever

HOST = "https://raw.githubusercontent.com"
K = 20
TIMEOUT_SECONDS = 60

Line = Mapping[str, Any]
Data = Sequence[bytes]
"""The files of a source, in its order."""


class File(NamedTuple):
    """One file of a source."""

    path: str
    """The path after `HOST`, with the commit."""
    sha256: str


class Source(NamedTuple):
    """A public data set, and the way to make a trace of it."""

    name: str
    origin: str
    licence: str
    retriever: str
    k: int
    files: tuple[File, ...]
    lines: Callable[[Data], Iterator[Line]]
    """The blocks, then the requests."""
    bundle: str = ""
    """The name of a file of its texts; empty without one."""
    texts: Callable[[Data], Iterator[Line]] = lambda _: iter(())
    """The lines of that file."""


class FetchError(Exception):
    """A file could not be downloaded, or has another checksum."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}; all by default")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="by default %(default)s")
    parser.add_argument("--list", action="store_true", help="only list the traces and their licences")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - SOURCES.keys()):
        parser.error(f"NAME must be of {', '.join(SOURCES)}; got {', '.join(unknown)}")
    try:
        for name in options.names or SOURCES:
            source = SOURCES[name]
            print(f"{name}: {source.origin}\n  licence: {source.licence}")
            if not options.list:
                print(f"  {make(source, options.folder)}")
    except FetchError as error:
        sys.exit(str(error))
    if not options.list:
        print(f"\nexport WARMPREFIX_TRACES={options.folder}")


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmprefix" / "traces"


def make(source: Source, folder: Path, host: str = HOST) -> Path:
    """Make the trace in the folder; download its files if they are missing.

    Raises:
        FetchError: A file could not be had, or has another SHA-256 sum.
    """
    data = [fetch(file, folder / "sources", host) for file in source.files]
    lines = list(source.lines(data))
    used = {block for line in lines for block in line.get("blocks", ())}
    header = {
        "name": source.name,
        "source": source.origin,
        "licence": source.licence,
        "k": source.k,
        "retriever": source.retriever,
    }
    path = folder / f"{source.name}.jsonl.gz"
    put_lines(path, [header, *[line for line in lines if "request" in line or line["block"] in used]])
    if source.bundle:
        about = {"name": source.bundle, "source": source.origin, "licence": source.licence}
        put_lines(folder / f"{source.bundle}.text.jsonl.gz", [about, *source.texts(data)])
    return path


def fetch(file: File, folder: Path, host: str) -> bytes:
    """Return the file's bytes, from the folder or else from the host."""
    path = folder / file.sha256
    data = path.read_bytes() if path.exists() else download(f"{host}/{file.path}")
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        where = path if path.exists() else f"{host}/{file.path}"
        raise FetchError(f"{where} has the SHA-256 sum {found}, not {file.sha256}")
    put(path, data)
    return data


def download(url: str) -> bytes:
    """Download a URL; nothing else here uses the network."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            data: bytes = answer.read()
    except (OSError, ValueError) as error:
        raise FetchError(f"{url} could not be fetched: {error}") from error
    return data


def put_lines(path: Path, lines: Sequence[Line]) -> None:
    """Write gzipped JSON lines; the same bytes for the same lines."""
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    put(path, gzip.compress(text.encode(), mtime=0))


def put(path: Path, data: bytes) -> None:
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)


# -- the sources -------------------------------------------------------------------------------------------------------


def ragpulse_lines(data: Data) -> Iterator[Line]:
    """Yield the first 2,800 requests with three passages or more, by arrival; a repeated passage counts once."""
    passages, trace = map(json_lines, data)
    for passage in passages:
        yield {"block": passage["passage_id"], "tokens": passage["token_length"]}
    conversations: dict[str, int] = {}
    number = 0
    for request in sorted(trace, key=lambda request: float(request["timestamp"])):
        blocks = list(dict.fromkeys(request["hash_ids"]["passages_ids"]))
        if len(blocks) >= 3 and number < 2_800:
            conversation = conversations.setdefault(request["session_id"], len(conversations))
            yield {"request": number, "conversation": conversation, "blocks": blocks}
            number += 1


def xquad_lines(data: Data) -> Iterator[Line]:
    """Yield all questions in their order, over all paragraphs."""
    paragraphs = xquad_paragraphs(data)
    questions = [asked["question"] for paragraph in paragraphs for asked in paragraph["qas"]]
    return searched([paragraph["context"] for paragraph in paragraphs], questions)


def xquad_texts(data: Data) -> Iterator[Line]:
    """Yield the paragraphs, then the questions, each with its answers and the paragraph that has them."""
    paragraphs = xquad_paragraphs(data)
    for number, paragraph in enumerate(paragraphs):
        yield {"block": number, "text": paragraph["context"]}
    asked = [(number, asked) for number, paragraph in enumerate(paragraphs) for asked in paragraph["qas"]]
    for query, (number, question) in enumerate(asked):
        answers = [answer["text"] for answer in question["answers"]]
        yield {"query": query, "text": question["question"], "answers": answers, "gold": [number]}


def xquad_paragraphs(data: Data) -> list[Any]:
    (file,) = data
    return [paragraph for article in json.loads(file)["data"] for paragraph in article["paragraphs"]]


def nq_open_lines(data: Data) -> Iterator[Line]:
    """Yield all questions in their order; a block is a question with its answers."""
    (file,) = data
    records = list(json_lines(file))
    texts = [f"{record['question']}? {'; '.join(record['answer'])}" for record in records]
    return searched(texts, [record["question"] for record in records])


def searched(texts: Sequence[str], questions: Sequence[str]) -> Iterator[Line]:
    blocks = [ContextBlock(text, id=number) for number, text in enumerate(texts)]
    for number, block in enumerate(blocks):
        yield {"block": number, "tokens": block.tokens}
    retriever = Bm25Retriever(blocks)
    for number, question in enumerate(questions):
        found = retriever.retrieve(question, K)
        yield {"request": number, "blocks": [int(block.id or 0) for block in found]}


def json_lines(file: bytes) -> Iterator[Any]:
    return (json.loads(line) for line in file.decode().splitlines() if line.strip())


_BM25 = "BM25 of warmprefix's demo"
_RAGPULSE = "flashserve/RAGPulse/3672232d45d749fdcf45dbc38cc77e5264af4a32/data"
SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source(
            "ragpulse_rag",
            "github.com/flashserve/RAGPulse at 3672232 (arXiv:2511.12979)",
            "MIT",
            "that of the service",
            7,
            (
                File(
                    f"{_RAGPULSE}/2_passages.jsonl", "8575941cab2eb1cae25e589b7fab3ccb6affc3809e4156b1dc6db40d9e65b891"
                ),
                File(f"{_RAGPULSE}/0_trace.jsonl", "cd371571bef3320907147f8901729e37f412aafb067ec8eb153e2828e1801e65"),
            ),
            ragpulse_lines,
        ),
        Source(
            "xquad_en",
            "github.com/google-deepmind/xquad at 7d30520, xquad.en.json (of SQuAD 1.1)",
            "CC BY-SA 4.0",
            _BM25,
            K,
            (
                File(
                    "google-deepmind/xquad/7d30520c717524000f0d9d2f9c10a069acd9d285/xquad.en.json",
                    "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29",
                ),
            ),
            xquad_lines,
            "xquad_squad",
            xquad_texts,
        ),
        Source(
            "nq_open_records",
            "github.com/google-research-datasets/natural-questions at fb26a30, nq_open/NQ-open.dev.jsonl",
            "CC BY-SA 3.0",
            _BM25,
            K,
            (
                File(
                    "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/"
                    "nq_open/NQ-open.dev.jsonl",
                    "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616",
                ),
            ),
            nq_open_lines,
        ),
    )
}


if __name__ == "__main__":
    main()
