"""Download public data sets and make traces of them, for benchmarks.

    python benchmarks/fetch_traces.py [NAME ...] [--folder FOLDER] [--list]
    WARMPREFIX_TRACES=FOLDER python benchmarks/online_hit_ratio.py

Each trace is made of files at one commit of a public repository, whose SHA-256 sums are checked; a file that is in the
folder already is not fetched again. The script prints where a trace comes from and under which licence, and the trace's
header has both. Nothing is written into the clone: by default the folder is `~/.cache/warmprefix/traces`.

- `ragpulse_rag`: the retrievals of a real question-answering service, as it published them (identifiers and lengths, no
  text). The same trace as the row of that name in README.md.
- `bfcl_lists`, `sgd_results`, `pubmedqa_abstracts`: lists of tools, records that services returned in dialogues, and
  abstracts, as published. The abstracts hardly overlap.
- `xquad_en`, `nq_open_records`: public texts and questions. README.md's rows of the same data sets were made with
  another retriever and tokenizer. The texts and questions of `xquad_en` are written too: `xquad_squad.text.jsonl.gz`,
  which `plugin_hit_ratio.py` reads.
- `xquad_hi`, `cmrc_zh`, `jaquad_ja`: the same in Hindi, Chinese and Japanese.
- `pubmedqa_sections`, `tatqa_reports`, `chroma_800`, `qmsum_meetings`: abstracts, tables and paragraphs of financial
  reports, blocks of 800 tokens, and meetings.
- `banking77_examples`, `gsm8k_examples`: examples for the prompt.
- `locomo_turns`, `locomo_facts`: messages of long chats, and facts from them. For non-commercial use only.
- `mtragun_turns`, `bfcl_turns`: conversations of several turns, about documents and with tools.
- `apibench_references`, `cosqa_functions`: API references and Python functions.

These were made to measure retention. Its rules were changed where it lost on some of them:

- `go_blog_news`, `hadoop_tickets`, `taubench_memories`: posts, tickets, and an agent's notes of earlier tasks. Texts
  arrive over time, and a question finds what came before it.
- `werkzeug_code`, `stabletoolbench_search`: functions for the tests that run them, and descriptions of interfaces.
- `policies_k3`, `covid_papers_k50`: 3 segments of privacy policies, and 50 short passages of papers.
- `drcd_bursts`, `dstc11_turns`: all questions about a Chinese article in a row, and chats about hotels.
- `scitldr_abstracts`, `seamonkey_tickets`: documents that are read once, so no two requests share a block.

These were made for `choice.py`:

- `flask_releases`: the documentation of five releases, pooled, with its texts. Most sections come in all five.
- `xquad_en_dense`, `pubmedqa_sections_dense`, `tatqa_reports_dense`, `cosqa_functions_dense`: the same texts and
  questions, found by dense vectors: latent semantic analysis. These need numpy.
- `scitldr_sentences`: a control in which each title searches its own abstract, so no two requests share a block.

Where nothing is published, the retrieval is the demo's BM25; for the three other languages, the words are split here.
Its requests have scores and twelve candidates beyond their `k`. `gold` is what the data set names as the answer's
source.
Lengths are estimated from the bytes (but for `ragpulse_rag`). Ten conversations take turns.

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
from collections.abc import Sequence
from pathlib import Path

from trace_sources import SOURCES, File, Source
from trace_texts import Line

HOST = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 60


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


if __name__ == "__main__":
    main()
