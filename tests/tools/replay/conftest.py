"""Real text for replays: questions about the standard library, with the passages that BM25 finds."""

from __future__ import annotations

import pytest

from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.demo.session import DemoTurn
from warmprefix_tools.retriever import Bm25Retriever

QUESTIONS = 100
K = 8


@pytest.fixture(scope="session")
def turns(entries: tuple[LibraryEntry, ...]) -> list[DemoTurn]:
    """As many as a replay has points over time, so that each point is one request."""
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [DemoTurn(question, retriever.retrieve(question.query, K)) for question in ask(entries, QUESTIONS, seed=5)]
