"""A short session on emulators that compute in no time, and a library small enough to read again."""

from __future__ import annotations

import asyncio
import math
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from warmprefix_tools.demo import servers, session
from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.session import DemoResult, prepare_session, run_session


@pytest.fixture(autouse=True)
def folder_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command write its page into a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def prepared(entries: tuple[LibraryEntry, ...]) -> Iterator[None]:
    """Let the demo use the text that was read for other tests, and a small emulator that computes in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "read_standard_library", lambda: entries)
        patch.setattr(servers, "EMULATOR", replace(servers.EMULATOR, prefill_rate=math.inf, kv_blocks=1_000))
        yield


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few packages of the standard library."""
    root = tmp_path_factory.mktemp("library")
    for name in ("asyncio", "email", "json", "logging", "xml"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, root / name)
    return root


@pytest.fixture(scope="session")
def result(prepared: None) -> DemoResult:
    options = DemoOptions(questions=40)
    return asyncio.run(run_session(options, prepare_session(options), lambda name, steps: lambda: None))
