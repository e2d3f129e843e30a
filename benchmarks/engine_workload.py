"""What is asked of a real engine: questions, and the blocks that a retriever found for them.

Three texts: `stdlib`, the documentation of Python's standard library, which everybody has; `lihua`, the chats that an
assistant remembers of a year; and `xquad`, Wikipedia. The last two are read from the folder that the environment
variable WARMPREFIX_TRACES names: a bundle of texts, `NAME.text.jsonl.gz`, and the passages that BM25 found in it,
`NAME_bm25_k20.jsonl.gz`. Blocks are known by their number in the text.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traces import FOLDER
from warmprefix.blocks import ContextBlock
from warmprefix.traces import BlockId, Trace, TraceRequest
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.demo.retriever import Bm25Retriever

__all__ = ["TEXTS", "Asked", "as_trace", "counted", "read", "taking_turns", "unshared"]

BUNDLES: Mapping[str, str] = {"lihua": "lihua", "xquad": "xquad_squad"}
TEXTS = ("stdlib", *BUNDLES)
TURNS = 8
"""Of a conversation, where the text does not tell."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    number: int
    conversation: int
    turn: int
    """From 1 on."""
    question: str
    blocks: tuple[ContextBlock, ...]
    """In relevance order."""

    @property
    def answer(self) -> str:
        """What stands for the model's answer in the turns after this one: the start of the best block."""
        return self.blocks[0].text[:200]


def read(text: str, requests: int, k: int) -> list[Asked]:
    """The first requests of a text, in order of arrival; as many as there are.

    Raises:
        FileNotFoundError: The text is not there.
    """
    asked = standard_library(requests, k) if text == "stdlib" else bundle(BUNDLES[text], requests, k)
    return [replace(request, number=number) for number, request in enumerate(asked)]


def standard_library(requests: int, k: int) -> Iterator[Asked]:
    """As the demo has it."""
    entries = read_standard_library()
    blocks = [block for entry in entries for block in entry.blocks]
    retriever = Bm25Retriever([ContextBlock(block.text, id=number) for number, block in enumerate(blocks)])
    for asked in ask(entries, requests, seed=0):
        yield Asked(0, asked.conversation, asked.turn, asked.text, retriever.retrieve(asked.query, k))


def bundle(name: str, requests: int, k: int) -> Iterator[Asked]:
    """Questions that follow each other are one conversation's turns."""
    folder = Path(os.environ.get(FOLDER, ""))
    texts, found = records(folder / f"{name}.text.jsonl.gz"), records(folder / f"{name}_bm25_k20.jsonl.gz")
    blocks = {line["block"]: ContextBlock(line["text"], id=line["block"]) for line in texts if "block" in line}
    questions = [line["text"] for line in texts if "query" in line]
    retrieved = [line["blocks"][:k] for line in found if "request" in line]
    for n, (question, ids) in enumerate(zip(questions[:requests], retrieved, strict=False)):
        yield Asked(n, n // TURNS, n % TURNS + 1, question, tuple([blocks[id] for id in ids]))


def taking_turns(asked: Sequence[Asked], at_a_time: int) -> list[Asked]:
    """So many conversations side by side, a turn of each after the other."""
    return sorted(asked, key=lambda request: (request.conversation // at_a_time, request.turn, request.conversation))


def records(path: Path) -> list[dict[str, Any]]:
    """Without the header."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][1:]


def unshared(asked: Sequence[Asked]) -> list[Asked]:
    """The control: as many blocks of the same lengths, but each a text that no other request has, from its start on."""
    rng = random.Random(0)
    serial = iter(rng.sample(range(10**8, 10**9), sum(len(request.blocks) for request in asked)))
    return [replace(request, blocks=tuple(map(distinct, request.blocks, serial))) for request in asked]


def distinct(block: ContextBlock, number: int) -> ContextBlock:
    return ContextBlock(f"{number}. {block.text}", id=number)


def counted(asked: Sequence[Asked], count: Callable[[str], int]) -> list[Asked]:
    """With the tokens of each block, as the prompt shows it."""
    known: dict[bytes, ContextBlock] = {}
    for request in asked:
        for block in request.blocks:
            if block.fingerprint not in known:
                shown = f"[{block.id}] {block.text}\n\n"
                known[block.fingerprint] = ContextBlock(block.text, id=block.id, tokens=count(shown))
    return [replace(request, blocks=tuple(known[block.fingerprint] for block in request.blocks)) for request in asked]


def as_trace(name: str, asked: Sequence[Asked], question_tokens: Callable[[str], int]) -> Trace:
    """The same requests, as replay takes them."""
    tokens: dict[BlockId, int] = {block.id or "": block.tokens for request in asked for block in request.blocks}
    return Trace(
        name,
        tuple(
            TraceRequest(
                request.number,
                tuple(block.id or "" for block in request.blocks),
                request.conversation,
                request.turn,
                question_tokens(request.question),
            )
            for request in asked
        ),
        tokens,
    )
