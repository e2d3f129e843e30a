"""The workload of a real engine: questions, and the blocks that a retriever found for them.

Three texts: `stdlib`, the documentation of Python's standard library, part of Python; `lihua`, the chats that an
assistant remembers of a year; and `xquad`, Wikipedia. The last two are read from the folder that the environment
variable WARMPREFIX_TRACES names: a bundle of texts, `NAME.text.jsonl.gz`, and the passages that BM25 found in it,
`NAME_bm25_k20.jsonl.gz`. Blocks are identified by their number in the text.
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
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.retriever import Bm25Retriever
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

__all__ = ["TEXTS", "EngineQuestion", "as_trace", "counted", "read", "taking_turns", "unshared"]

BUNDLES: Mapping[str, str] = {"lihua": "lihua", "xquad": "xquad_squad"}
TEXTS = ("stdlib", *BUNDLES)
TURNS = 8
"""Turns of a conversation, if the text does not define it."""


@dataclass(frozen=True)
class EngineQuestion:
    """A question with its retrieved blocks."""

    number: int
    conversation: int
    turn: int
    """Counts from 1."""
    question: str
    blocks: tuple[ContextBlock, ...]
    """In relevance order."""

    @property
    def answer(self) -> str:
        """The start of the best block, used as the model's answer in later turns."""
        return self.blocks[0].text[:200]


def read(text: str, requests: int, k: int, seed: int = 0) -> list[EngineQuestion]:
    """Return the first requests of a text, in order of arrival; fewer if the text has fewer.

    `seed` draws the questions about the standard library; those of other texts are given.

    Raises:
        FileNotFoundError: The text is not there.
    """
    asked = standard_library(requests, k, seed) if text == "stdlib" else bundle(BUNDLES[text], requests, k)
    return [replace(request, number=number) for number, request in enumerate(asked)]


def standard_library(requests: int, k: int, seed: int) -> Iterator[EngineQuestion]:
    """Return the workload of the demo, which has the seed 0."""
    entries = read_standard_library()
    blocks = [block for entry in entries for block in entry.blocks]
    retriever = Bm25Retriever([ContextBlock(block.text, id=number) for number, block in enumerate(blocks)])
    for asked in ask(entries, requests, seed):
        yield EngineQuestion(0, asked.conversation, asked.turn, asked.text, retriever.retrieve(asked.query, k))


def bundle(name: str, requests: int, k: int) -> Iterator[EngineQuestion]:
    """Make consecutive questions the turns of one conversation."""
    folder = Path(os.environ.get(FOLDER, ""))
    texts, found = records(folder / f"{name}.text.jsonl.gz"), records(folder / f"{name}_bm25_k20.jsonl.gz")
    blocks = {line["block"]: ContextBlock(line["text"], id=line["block"]) for line in texts if "block" in line}
    questions = [line["text"] for line in texts if "query" in line]
    retrieved = [line["blocks"][:k] for line in found if "request" in line]
    for n, (question, ids) in enumerate(zip(questions[:requests], retrieved, strict=False)):
        yield EngineQuestion(n, n // TURNS, n % TURNS + 1, question, tuple([blocks[id] for id in ids]))


def taking_turns(asked: Sequence[EngineQuestion], at_a_time: int) -> list[EngineQuestion]:
    """Interleave this many conversations, turn by turn."""
    return sorted(asked, key=lambda request: (request.conversation // at_a_time, request.turn, request.conversation))


def records(path: Path) -> list[dict[str, Any]]:
    """Yield all lines without the header."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][1:]


def unshared(asked: Sequence[EngineQuestion]) -> list[EngineQuestion]:
    """Return the control: the same lengths of blocks, but each text differs from all others from its start."""
    rng = random.Random(0)
    serial = iter(rng.sample(range(10**8, 10**9), sum(len(request.blocks) for request in asked)))
    return [replace(request, blocks=tuple(map(distinct, request.blocks, serial))) for request in asked]


def distinct(block: ContextBlock, number: int) -> ContextBlock:
    return ContextBlock(f"{number}. {block.text}", id=number)


def counted(asked: Sequence[EngineQuestion], count: Callable[[str], int]) -> list[EngineQuestion]:
    """Return the requests with the tokens of each block as the prompt shows it."""
    counted_blocks: dict[bytes, ContextBlock] = {}
    for request in asked:
        for block in request.blocks:
            if block.fingerprint not in counted_blocks:
                shown = f"[{block.id}] {block.text}\n\n"
                counted_blocks[block.fingerprint] = ContextBlock(block.text, id=block.id, tokens=count(shown))
    return [
        replace(request, blocks=tuple(counted_blocks[block.fingerprint] for block in request.blocks))
        for request in asked
    ]


def as_trace(name: str, asked: Sequence[EngineQuestion], question_tokens: Callable[[str], int]) -> Trace:
    """Return the requests as a trace for replay."""
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
