"""The traces that benchmarks replay: those that were given, or generated ones, and what can be varied about them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common import zipf_requests
from warmprefix.replay.workload import DEFAULT_K, Workload
from warmprefix.traces.format import BlockId, Trace, TraceRequest

FOLDER = "WARMPREFIX_TRACES"
"""The environment variable that names where traces are, if none are given."""
REPORTED_K: Mapping[str, int] = {"nqopen_records_bm25_k20": 5}
"""Blocks a request, for traces that are not reported at their own number."""
TEXT_BUNDLE = ".text.jsonl"


def given_files(arguments: Sequence[Path]) -> list[Path]:
    """The trace files that were asked for, as arguments or by `FOLDER`; none if neither was."""
    return files(arguments or [Path(os.environ[FOLDER])] if arguments or FOLDER in os.environ else [])


def files(given: Sequence[Path]) -> list[Path]:
    """The trace files among them and in the folders among them; a bundle of texts is no trace."""
    found: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
        found += [file for file in inside if TEXT_BUNDLE not in file.name]
    if given and not found:
        sys.exit(f"no traces in {', '.join(map(str, given))}")
    return found


def reported_k(trace: Trace) -> int:
    return REPORTED_K.get(trace.name, min(trace.k or DEFAULT_K, DEFAULT_K))


def is_variant(name: str) -> bool:
    """Whether `vary` knows it: `as-recorded`, `shuffled`, `half`, `last=PERCENT` or `k=N`."""
    return name in ("as-recorded", "shuffled", "half") or (
        name.startswith(("last=", "k=")) and name.partition("=")[2].isdecimal()
    )


def vary(trace: Trace, variant: str, k: int, seed: int) -> Workload | None:
    """The trace with its requests in another order, some of them missing, or some of their blocks."""
    rng = random.Random(seed)
    requests = list(trace.requests)
    if variant == "shuffled":
        rng.shuffle(requests)
    elif variant == "half":
        requests = [request for request in requests if rng.random() < 0.5]
    elif variant.startswith("last="):
        requests = requests[len(requests) * (100 - int(variant.removeprefix("last="))) // 100 :]
    elif variant.startswith("k="):
        fewer = int(variant.removeprefix("k="))
        if fewer >= k:
            return None
        k = fewer
    return Workload(replace(trace, requests=tuple(requests)), k)


# -- for those who have none -------------------------------------------------------------------------------------------


def generated() -> Iterator[Trace]:
    yield trace_of("generated_topics", zipf_requests(2_000, k=10, topics=50, per_topic=40))
    yield trace_of("generated_bursts", bursts(600))
    yield trace_of("generated_control", ([5 * i + j for j in range(5)] for i in range(500)))


def bursts(count: int, seed: int = 1) -> Iterator[list[int]]:
    """Ten requests after each other about one region of ten blocks, five blocks each; regions come back."""
    rng = random.Random(seed)
    for _ in range(count // 10):
        region = rng.randrange(40)
        for _ in range(10):
            yield rng.sample(range(10 * region, 10 * region + 10), 5)


def trace_of(name: str, contexts: Iterator[list[int]], seed: int = 2) -> Trace:
    requests = tuple(TraceRequest(i, tuple(blocks)) for i, blocks in enumerate(contexts))
    rng = random.Random(seed)
    tokens: dict[BlockId, int] = {}
    for request in requests:
        for block in request.blocks:
            tokens.setdefault(block, rng.randrange(50, 400))
    return Trace(name, requests, tokens)
