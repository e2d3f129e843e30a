"""A short session on emulators that compute in no time, and a library small enough to read again."""

from __future__ import annotations

import asyncio
import math
import shutil
import sysconfig
from pathlib import Path

import pytest

from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.session import DemoResult, prepare_session, run_session


@pytest.fixture(autouse=True)
def folder_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command write its page into a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few packages of the standard library."""
    root = tmp_path_factory.mktemp("library")
    for name in ("asyncio", "email", "json", "logging", "xml"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, root / name)
    return root


@pytest.fixture(scope="session")
def options() -> DemoOptions:
    """Return options with few questions, and a cache that is too small for them."""
    return DemoOptions(questions=40, prefill_rate=math.inf, kv_blocks=1_000)


@pytest.fixture(scope="session")
def result(options: DemoOptions, entries: tuple[LibraryEntry, ...]) -> DemoResult:
    return asyncio.run(run_session(options, lambda name, steps: lambda: None, prepare_session(options, entries)))
