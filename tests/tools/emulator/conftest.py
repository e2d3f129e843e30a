"""Servers that answer at once, and a way to read their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

INSTANT = EmulatorConfig(kv_blocks=2000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmulatorServer]:
    """Yield one server for all tests that do not depend on the contents of its cache."""
    with EmulatorServer(INSTANT) as server:
        yield server


@pytest.fixture(scope="session")
def shared_client(shared_server: EmulatorServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared_server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def server() -> Iterator[EmulatorServer]:
    """Yield a server with an empty cache and all counters at zero."""
    with EmulatorServer(INSTANT) as server:
        yield server


@pytest.fixture
def client(server: EmulatorServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def scrape(http: httpx.Client) -> Callable[[EmulatorServer], dict[str, float]]:
    """Return a function that reads /metrics: by name, the sum over all label sets."""

    def scrape(server: EmulatorServer) -> dict[str, float]:
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(http.get(f"{server.url}/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    return scrape
