"""A planted reader behind HTTP, and stores with planted answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from planted_reader import PlantedReader
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.emulator.tokenizer import ChatMessage
from warmprefix_tools.quality.answer_store import AnswerStore, CallKey, GivenAnswer
from warmprefix_tools.quality.arms import baseline_of
from warmprefix_tools.quality.made_up import made_up_questions

CONFIG = EmulatorConfig(kv_blocks=20_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@pytest.fixture
def asked() -> list[Sequence[ChatMessage]]:
    """The chats that the reader has answered."""
    return []


@pytest.fixture
def reader(asked: list[Sequence[ChatMessage]]) -> Iterator[EmulatorServer]:
    planted = PlantedReader(note_loss=0.3)

    def answer(messages: Sequence[ChatMessage]) -> str:
        asked.append(messages)
        return planted.answer(messages)

    with EmulatorServer(CONFIG, reader=answer) as server:
        yield server


def arguments(server: EmulatorServer | None, file: Path, *more: object) -> list[object]:
    base = "http://127.0.0.1:1/v1" if server is None else server.base_url
    return ["quality", "run", "--endpoint", base, "--model", CONFIG.model, "--answers", file, *more]


def filled(file: Path, scores: Mapping[str, Sequence[str | None]], repeats: int = 1) -> AnswerStore:
    """Return a store with these answers, in turn for each call."""
    questions = list(made_up_questions(len(scores["relevance"]) // repeats))
    store = AnswerStore(file)
    store.begin({"model": "m", "data": "made-up", "arms": {arm: baseline_of(arm) for arm in scores}}, questions)
    for arm, texts in scores.items():
        for number, text in enumerate(texts):
            question = questions[number // repeats]
            right = text and question.answers[0] if text == "right" else text
            store.add(GivenAnswer(CallKey(question.id, arm, number % repeats), arm != "relevance", right))
    return store
