"""Public data sets of questions: downloaded once, checked, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from warmprefix import ContextBlock
from warmprefix_tools.quality.questions import (
    EarlierTurn,
    EvidenceQuestion,
    QuestionsError,
    evidence_with,
    squad_questions,
)
from warmprefix_tools.retriever import Bm25Retriever

__all__ = ["DATA_SETS", "DataSet", "cache_folder", "data_set_questions"]

_HOST = "https://raw.githubusercontent.com"
_TIMEOUT_SECONDS = 60


class DataSet(NamedTuple):
    """One file of a public repository, and the way to read it."""

    path: str
    """The path after the host: owner, repository, commit, file."""
    blob: str
    """The file's object name in Git, which is a checksum."""
    licence: str
    read: Callable[[bytes], Iterator[EvidenceQuestion]]

    @property
    def origin(self) -> str:
        """Where the file comes from, for people."""
        owner, repository, commit, file = self.path.split("/", 3)
        return f"github.com/{owner}/{repository} at {commit[:7]}, {file}"


def cache_folder() -> Path:
    """Return the folder for downloaded files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmprefix" / "questions"


def data_set_questions(data_set: DataSet, folder: Path, host: str = _HOST) -> Iterator[EvidenceQuestion]:
    """Yield the questions of a data set; download its file if the folder lacks it.

    Raises:
        QuestionsError: The file could not be downloaded or written, or is another one.
    """
    path = folder / data_set.blob
    try:
        data = path.read_bytes() if path.exists() else _download(f"{host}/{data_set.path}")
        if _object_name(data) != data_set.blob:
            where = path if path.exists() else f"{host}/{data_set.path}"
            raise QuestionsError(f"{where} is not the file that is expected: it was changed, or is incomplete")
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_bytes(data)
            draft.replace(path)
    except (OSError, ValueError, HTTPException) as error:
        raise QuestionsError(f"{data_set.origin} could not be fetched: {error}") from error
    return data_set.read(data)


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - the host is https
        data: bytes = answer.read()
    return data


def _object_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# -- formats -----------------------------------------------------------------------------------------------------------


def _multi_hop(data: bytes) -> Iterator[EvidenceQuestion]:
    """Read the format of HotpotQA and 2WikiMultihopQA. Evidence is retrieved from the paragraphs of all questions."""
    rows = json.loads(data)
    retriever = _retriever(_titled(title, sentences) for row in rows for title, sentences in row["context"])
    for row in rows:
        named = {title for title, _ in row["supporting_facts"]}
        needed = [_titled(title, sentences) for title, sentences in row["context"] if title in named]
        yield evidence_with(retriever, row["question"], needed).asked(row["_id"], row["question"], (row["answer"],))


def _titled(title: str, sentences: Iterable[str]) -> str:
    return f"{title}\n{''.join(sentences).strip()}"


def _support_chats(data: bytes) -> Iterator[EvidenceQuestion]:
    """Read MT-RAG's tasks: the last turn of a conversation about documents, with the turns before it."""
    tasks = [json.loads(line) for line in data.decode().splitlines()]
    tasks = [task for task in tasks if task["contexts"]]
    retriever = _retriever(passage["text"].strip() for task in tasks for passage in task["contexts"])
    for task in tasks:
        turns = [turn["text"] for turn in task["input"]]
        asked, answered = turns[0::2], turns[1::2]
        earlier: list[EarlierTurn] = []
        for before, question, answer in zip(["", *asked], asked, answered, strict=False):
            earlier.append(EarlierTurn(question, answer, evidence_with(retriever, f"{before} {question}", []).passages))
        needed = list(dict.fromkeys([passage["text"].strip() for passage in task["contexts"]]))
        before = asked[-2] if len(asked) > 1 else ""
        found = evidence_with(retriever, f"{before} {asked[-1]}", needed)
        answers = tuple([target["text"] for target in task["targets"]])
        complete = tuple([turn for turn in earlier if turn.passages])
        yield found.asked(task["task_id"], asked[-1], answers, complete)


def _chat_memories(data: bytes) -> Iterator[EvidenceQuestion]:
    """Read LoCoMo's questions; the evidence is single messages of many sessions, as a memory would return them."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        chats = {name: json.loads(archive.read(name)) for name in sorted(archive.namelist()) if name.endswith(".json")}
    for name, chat in chats.items():
        messages = dict(_dated_messages(chat))
        retriever = _retriever(messages.values())
        for number, asked in enumerate(chat["qa"]):
            needed = [messages[place] for place in asked["evidence"] if place in messages]
            found = evidence_with(retriever, asked["question"], needed, 16)
            answers = () if asked.get("answer") is None else (str(asked["answer"]),)
            if found.passages:
                yield found.asked(f"{Path(name).stem}-{number}", asked["question"], answers)


def _dated_messages(chat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    number = 1
    while (session := f"session_{number}") in chat:
        date = chat[f"{session}_date_time"]
        for message in chat[session]:
            if message["text"]:
                yield message["dia_id"], f"{message['speaker']} ({date}): {message['text']}"
        number += 1


def _retriever(texts: Iterable[str]) -> Bm25Retriever:
    return Bm25Retriever([ContextBlock(text) for text in dict.fromkeys(texts) if text.strip()])


_XQUAD = "google-deepmind/xquad/7d30520c717524000f0d9d2f9c10a069acd9d285"
_XQUAD_BLOBS = {
    "ar": "068917b57858131f2fea1bb3e49bee6251f19f8d",
    "de": "ad18712bf213f26e1ac086d98b23a0d866665bfc",
    "el": "d011a99269164448c9d12db7933c4f52a6449404",
    "en": "cc0e3e8b94910097d29d2e9df5f266e1b30b2810",
    "es": "7eb7791d26ca030581fe57079f6df864a012ead1",
    "hi": "9b29b724ce7eb07aad18bffb81deccf04960c7cf",
    "ro": "67d772041313acbc97fbf7a8995ecdcaeee0e758",
    "ru": "ab022ed756292787320b684a3713e737b8f79f39",
    "tr": "a5f3ea9b4816619499b8b06f26dc58f9e42be5cc",
    "vi": "2c0b4bfe0f5808424fd353dcaecd388ecab8b87f",
    "zh": "40aa6cb87e4369235e763d3554b7a25ea832e924",
}
_HIPPORAG = "OSU-NLP-Group/HippoRAG/3d95d255a8db0c1699b853cfb4fbe5056708162d/data"
DATA_SETS: Mapping[str, DataSet] = {
    "squad": DataSet(
        "rajpurkar/SQuAD-explorer/eee5fdbf62f8613a7812b03419e6b29617b74fd1/dataset/dev-v1.1.json",
        "e9a3f913ad1468ebe105b891334ca7b0bc0e2510",
        "CC BY-SA 4.0",
        squad_questions,
    ),
    "xquad:sentences": DataSet(
        f"{_XQUAD}/xquad.en.json", _XQUAD_BLOBS["en"], "CC BY-SA 4.0", partial(squad_questions, sentences=True)
    ),
    **{
        "xquad" if language == "en" else f"xquad:{language}": DataSet(
            f"{_XQUAD}/xquad.{language}.json", blob, "CC BY-SA 4.0", squad_questions
        )
        for language, blob in _XQUAD_BLOBS.items()
    },
    "hotpotqa": DataSet(
        f"{_HIPPORAG}/hotpotqa.json", "885594857a412c98260802cb81df550a0b63db85", "CC BY-SA 4.0", _multi_hop
    ),
    "2wiki": DataSet(
        f"{_HIPPORAG}/2wikimultihopqa.json", "c87b01db53166b2b85b82d8773c6ed685bab2c16", "Apache-2.0", _multi_hop
    ),
    "mt-rag": DataSet(
        "IBM/mt-rag-benchmark/cc5b1d481b391181b89f7ced860308482e785463/mtragun-human/generation_tasks/reference.jsonl",
        "1a11c239db1662ed77de437add5bc83403fbced0",
        "Apache-2.0",
        _support_chats,
    ),
    "locomo": DataSet(
        "snap-research/locomo/e76cdff4a04fce19090596d49862fe87a5c15aaa/data/locomo10.zip",
        "2cb424b0d9d2619fb70169824a6a05d44330a211",
        "CC BY-NC 4.0: not for commercial use",
        _chat_memories,
    ),
}
"""By name. The multi-hop sets are the 1,000 questions each that HippoRAG's authors chose (Gutiérrez et al., 2024)."""
