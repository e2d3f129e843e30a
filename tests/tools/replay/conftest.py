"""Real text for replays: questions about the standard library, with the passages that BM25 finds."""

from __future__ import annotations

import pytest

from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.demo.retriever import Bm25Retriever
from warmprefix_tools.demo.runner import Turn

QUESTIONS = 100
K = 8


@pytest.fixture(scope="session")
def turns() -> list[Turn]:
    """As many as a replay has points over time, so that each point is one request."""
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [Turn(question, retriever.retrieve(question.query, K)) for question in ask(entries, QUESTIONS, seed=5)]
