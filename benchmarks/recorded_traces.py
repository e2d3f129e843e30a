"""Long conversations to serve: questions, each with the passages that a retriever returned, best first."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from traces import FOLDER
from warmprefix import ContextBlock
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import tokenizer
from warmprefix_tools.retriever import Bm25Retriever

__all__ = ["TURNS", "AskedTurn", "read_talks"]

TURNS = 12
"""Turns of each conversation."""
LEAST_TURNS = 10
"""Turns of the shortest recorded conversation that is served."""
TALKS = 1
"""Conversations per trace."""
PASSAGES = 8
MTRAG = "mtrag_elser_questions.jsonl.gz"
MEMORIES, MEMORY_TEXTS = "lihua_bm25_k20.jsonl.gz", "lihua.text.jsonl.gz"


class AskedTurn(NamedTuple):
    """A question, and what the retriever returned for it."""

    question: str
    passages: tuple[ContextBlock, ...]


Talk = Sequence[AskedTurn]


def read_talks() -> Mapping[str, Sequence[Talk]]:
    """Return the conversations of each trace: two that any clone has, and those of the folder of traces."""
    talks: dict[str, Sequence[Talk]] = {"standard_library": standard_library(), "generated_conversations": generated()}
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    if folder is not None and (folder / MTRAG).is_file():
        talks["mtrag_elser_questions"] = recorded(folder / MTRAG)
    if folder is not None and (folder / MEMORIES).is_file() and (folder / MEMORY_TEXTS).is_file():
        talks["lihua_bm25_k20"] = memories(folder)
    return talks


def standard_library() -> list[Talk]:
    """Return all that one user of the demo asks about Python's standard library, as one conversation."""
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [
        [
            AskedTurn(asked.text, retriever.retrieve(asked.query, PASSAGES))
            for asked in ask(entries, TURNS, seed, users=1)
        ]
        for seed in range(TALKS)
    ]


def generated(seed: int = 3) -> list[Talk]:
    """Return conversations with eight blocks per turn: three from earlier turns, five from anywhere."""
    rng = random.Random(seed)
    talks: list[Talk] = []
    for _ in range(TALKS):
        seen: list[int] = []
        talk: list[AskedTurn] = []
        for turn in range(TURNS):
            old = rng.sample(seen, min(3, len(seen)))
            new = rng.sample(sorted(set(range(5_000)) - set(seen)), PASSAGES - len(old))
            seen += new
            found = rng.sample(old + new, PASSAGES)
            talk.append(AskedTurn(f"What follows, in step {turn}?", tuple(map(partial(made_up, tokens=150), found))))
        talks.append(talk)
    return talks


def recorded(path: Path) -> list[Talk]:
    """Return the longest recorded conversations. The trace has lengths of blocks and no text, which is made up."""
    lines = read_lines(path)
    tokens = {line["block"]: line["tokens"] for line in lines if "block" in line}
    talks: dict[int, list[Any]] = defaultdict(list)
    for line in lines:
        if "request" in line:
            talks[line["conversation"]].append(line)
    longest = [talk for talk in talks.values() if len(talk) >= LEAST_TURNS][:TALKS]
    return [
        [
            AskedTurn(
                f"Question {line['turn']} of a recorded conversation?",
                tuple(made_up(block, tokens[block]) for block in line["blocks"][:PASSAGES]),
            )
            for line in talk
        ]
        for talk in longest
    ]


def memories(folder: Path) -> list[Talk]:
    """Return questions about years of chats of one person, in the form of LoCoMo: a passage is one chat."""
    texts = {line["block"]: line["text"] for line in read_lines(folder / MEMORY_TEXTS) if "block" in line}
    asked = {line["query"]: line["text"] for line in read_lines(folder / MEMORY_TEXTS) if "query" in line}
    turns = (
        AskedTurn(
            asked[line["request"]],
            tuple(ContextBlock(texts[block], id=f"chat-{block}") for block in line["blocks"][:PASSAGES]),
        )
        for line in read_lines(folder / MEMORIES)
        if "request" in line
    )
    return [list(islice(turns, TURNS)) for _ in range(TALKS)]


def made_up(block: int, tokens: int) -> ContextBlock:
    """Return a text of this length for a block of a trace, always the same."""
    rng = random.Random(block)
    words: list[str] = [f"Passage {block}:"]
    while sum(len(tokenizer.encode(word)) for word in words) < tokens:
        words.append(" ".join(rng.choice(WORDS) for _ in range(8)) + ".")
    return ContextBlock(" ".join(words), id=f"p-{block}")


WORDS = [
    "prefix",
    "cache",
    "token",
    "block",
    "prompt",
    "model",
    "turn",
    "label",
    "store",
    "worker",
    "query",
    "answer",
    "index",
    "graph",
    "river",
    "stone",
    "copper",
    "winter",
    "harbour",
    "letter",
    "garden",
    "music",
    "engine",
    "paper",
    "valley",
    "bridge",
    "market",
    "silver",
    "morning",
    "island",
    "captain",
    "window",
    "forest",
]


def read_lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
