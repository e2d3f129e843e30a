"""A real document, indexed by PageIndex itself, and the scripted engine of the benchmark."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pageindex_questions

LINES = [
    [f"Page {number} tells of the sea, and of ship {number * line}." for line in range(1, 31)] for number in range(6)
]
PAGES = [pageindex_questions.Page(f"Chapter {number}" if number % 2 else "", LINES[number]) for number in range(6)]


class Library(NamedTuple):
    """A client, its document, and the engine that it asks."""

    client: Any
    document: str
    engine: pageindex_questions.ScriptedEngine
    base_url: str


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("library")
    return folder, pageindex_questions.index_document(folder, PAGES)


@pytest.fixture
def library(indexed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    engine = pageindex_questions.ScriptedEngine()
    loop = asyncio.new_event_loop()  # the Agents SDK takes the thread's loop, or makes one that it leaves open
    asyncio.set_event_loop(loop)
    with engine.serving() as base_url:
        yield Library(pageindex_questions.client_of(base_url, indexed[0]), indexed[1], engine, base_url)
    asyncio.set_event_loop(None)
    with warnings.catch_warnings():
        # Connections that PageIndex and the Agents SDK leave open end here, and not in a later test.
        warnings.simplefilter("ignore", ResourceWarning)
        loop.close()
        del loop
        gc.collect()
