"""The standard library's entries, read once, and a short session on emulators that compute in no time."""

from __future__ import annotations

import asyncio
import math

import pytest

from warmprefix_tools.demo.corpus import Entry, read_standard_library
from warmprefix_tools.demo.options import DemoOptions
from warmprefix_tools.demo.session import DemoResult, run_session

OPTIONS = DemoOptions(questions=40, prefill_rate=math.inf, kv_blocks=1_000)


@pytest.fixture(scope="session")
def entries() -> tuple[Entry, ...]:
    return read_standard_library()


@pytest.fixture(scope="session")
def options() -> DemoOptions:
    """Few questions, and a cache that is too small for them."""
    return OPTIONS


@pytest.fixture(scope="session")
def result(options: DemoOptions, entries: tuple[Entry, ...]) -> DemoResult:
    return asyncio.run(run_session(options, lambda name, steps: lambda: None, entries))
