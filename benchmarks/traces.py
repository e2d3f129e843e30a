"""Traces that benchmarks replay, given or made in any clone, and their variants."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common import zipf_requests
from warmprefix_tools.replay.workload import DEFAULT_K, Workload
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

FOLDER = "WARMPREFIX_TRACES"
"""The environment variable that names the folder of traces, if none are given."""
REPORTED_K: Mapping[str, int] = {
    "nq_open_records": 5,
    "nqopen_records_bm25_k20": 5,
    "covid_papers_k50": 50,
    "taubench_memories": 20,
}
"""Blocks per request, for traces that are not reported with their own number."""
TEXT_BUNDLE = ".text.jsonl"


def given_files(arguments: Sequence[Path]) -> list[Path]:
    """Return the trace files given as arguments or by `FOLDER`; none if there are none."""
    return files(arguments or [Path(os.environ[FOLDER])] if arguments or FOLDER in os.environ else [])


def files(given: Sequence[Path]) -> list[Path]:
    """Return the trace files among them and in their folders; a bundle of texts is no trace."""
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
    """Return True if `vary` supports it: `as-recorded`, `shuffled`, `half`, `last=PERCENT` or `k=N`."""
    return name in ("as-recorded", "shuffled", "half") or (
        name.startswith(("last=", "k=")) and name.partition("=")[2].isdecimal()
    )


def vary(trace: Trace, variant: str, k: int, seed: int) -> Workload | None:
    """Return the trace with its requests in another order, some of them missing, or some of their blocks."""
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


# -- traces that any clone can make ------------------------------------------------------------------------------------


def from_a_clone() -> Iterator[Trace]:
    """Yield generated requests and questions about real text; nothing is downloaded."""
    yield from generated()
    yield conversations(100)
    yield standard_library(1_000)


def standard_library(questions: int, k: int = DEFAULT_K) -> Trace:
    """Return the demo's questions about Python's own standard library, and what BM25 finds for them.

    The texts, and so the numbers, are those of the Python that runs this.
    """
    from warmprefix_tools.demo.corpus import read_standard_library
    from warmprefix_tools.demo.questions import ask
    from warmprefix_tools.retriever import Bm25Retriever

    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    requests: list[TraceRequest] = []
    tokens: dict[BlockId, int] = {}
    for number, asked in enumerate(ask(entries, questions, seed=0)):
        found = retriever.retrieve(asked.query, k)
        tokens.update({str(block.id): block.tokens for block in found})
        requests.append(TraceRequest(number, tuple(str(block.id) for block in found), asked.conversation))
    return Trace("standard_library", tuple(requests), tokens, k)


def conversations(count: int, seed: int = 3) -> Trace:
    """Return conversations of eight turns, ten at a time.

    A turn has ten blocks: four from earlier turns of the conversation, six from anywhere.
    """
    rng = random.Random(seed)
    contexts: list[list[int]] = []
    for start in range(0, count, 10):
        had: dict[int, list[int]] = {conversation: [] for conversation in range(start, min(start + 10, count))}
        for _ in range(8):
            for seen in had.values():
                old = rng.sample(seen, min(4, len(seen)))
                new = rng.sample(sorted(set(range(5_000)) - set(seen)), 10 - len(old))
                seen += new
                contexts.append(rng.sample(old + new, 10))
    return trace_of("generated_conversations", iter(contexts))


def generated() -> Iterator[Trace]:
    yield trace_of("generated_topics", zipf_requests(2_000, k=10, topics=50, per_topic=40))
    yield trace_of("generated_bursts", bursts(600))
    yield trace_of("generated_control", ([5 * i + j for j in range(5)] for i in range(500)))


def bursts(count: int, seed: int = 1) -> Iterator[list[int]]:
    """Return bursts of ten requests of five blocks each, from regions that recur."""
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
