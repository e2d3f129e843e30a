"""Traces to plan, and a count of what an engine would find that shares nothing with the code under test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Line = dict[str, Any]


def written(path: Path, lines: Iterable[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def topics(requests: int = 200, k: int = 8, name: str = "topics", scopes: Sequence[str | None] = (None,)) -> list[Line]:
    """Return requests on 12 topics of 12 blocks each, some of them twice; all scopes share the block numbers."""
    rng = random.Random(7)
    lines: list[Line] = [{"name": name, "k": k}, *({"block": i, "tokens": rng.randrange(50, 200)} for i in range(144))]
    asked: list[list[int]] = []
    for number in range(requests):
        topic = rng.randrange(12)
        again = asked and rng.random() < 0.1
        asked.append(rng.choice(asked) if again else rng.sample(range(12 * topic, 12 * topic + 12), k))
        lines.append({"request": f"r{number}", "blocks": asked[-1], "scope": rng.choice(scopes)})
    return lines


@pytest.fixture(scope="session")
def write() -> Callable[[Path, Iterable[Line]], Path]:
    return written


@pytest.fixture(scope="session")
def topic_lines() -> Callable[..., list[Line]]:
    return topics


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("traces") / "topics.jsonl", topics())


@pytest.fixture(scope="session")
def recount() -> Callable[[Iterable[Line], Iterable[Line], int | None], int]:
    return found_by_an_engine


def found_by_an_engine(trace: Iterable[Line], orders: Iterable[Line], capacity_tokens: int | None) -> int:
    """Return the tokens of these orders that a least-recently-used cache holds, evicting tails first."""
    lines = list(trace)
    tokens = {line["block"]: line["tokens"] for line in lines if "block" in line}
    scopes = {line["request"]: line.get("scope") for line in lines if "request" in line}
    cache: dict[tuple[Any, ...], bool] = {}  # prefixes, least recently used first
    used = saved = 0
    for line in orders:
        path = [scopes[line["request"]], *line["order"]]
        prefixes = [tuple(path[:end]) for end in range(2, len(path) + 1)]
        hits = 0
        while hits < len(prefixes) and prefixes[hits] in cache:
            hits += 1
        saved += sum(tokens[prefix[-1]] for prefix in prefixes[:hits])
        for prefix in reversed(prefixes):
            used += 0 if cache.pop(prefix, False) else tokens[prefix[-1]]
            cache[prefix] = True
        while capacity_tokens is not None and used > capacity_tokens:
            oldest = next(iter(cache))
            used -= tokens[oldest[-1]]
            del cache[oldest]
    return saved
