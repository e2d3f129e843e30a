"""Servers that answer at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from warmprefix.emulator import EmulatorConfig, EmulatorServer

INSTANT = EmulatorConfig(kv_blocks=2000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmulatorServer]:
    """One server for all tests that do not care what others have put into its cache."""
    with EmulatorServer(INSTANT) as server:
        yield server


@pytest.fixture
def server() -> Iterator[EmulatorServer]:
    """A server with an empty cache and all counters at zero."""
    with EmulatorServer(INSTANT) as server:
        yield server
