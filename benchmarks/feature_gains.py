"""What single features earn: each run with and without, in points of hit ratio and in % of the prefill.

    python benchmarks/feature_gains.py [TRACE_OR_FOLDER ...] [--features reports,kv_events] [--limit 300]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, generated ones. The engine is a prefix cache with a preamble of 200 tokens in front of every context. It
reports the cached tokens of each prompt in whole KV blocks. Prompts of others, which the planner never sees, go through
it too: evenly, or together, once in 50 requests; and it may restart. *gain*: points of hit ratio with the feature less
without. *cost*: computed tokens, notes included, less those without it, in %; below 0 is a saving.

- *reports*: the planner receives the engine's cached tokens, or not. It is given the
  capacity, or learns it from them, or starts from the capacity in the engine's metrics.
- *capacity*: a given capacity is the engine's, a third of it, or 500,000 tokens, and reports may replace it, or not. On
  1,000 requests of each trace, also of an engine without others.
- *ttft*: of an engine that reports nothing, the planner receives the time to the first token, or not.
- *kv_events*: the planner follows the engine's KV events, or not; it receives reports in any case. Here the cache is
  the token-exact one of warmprefix_tools.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import msgspec

from common import print_table, size
from result_files import write_rows
from router_processes import PublishingCache
from traces import generated, given_files, reported_k
from warmprefix import ContextPlan, ContextPlanner
from warmprefix.prefix import PrefixTree
from warmprefix.residency import EngineReport, FeedStats, FixedCapacity, ResidencyTarget, ServedPrompt
from warmprefix.tokens import estimated_tokens
from warmprefix.traces import NoRecorder
from warmprefix_kv_events.kv_events import read_batch
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import MappedPrompt, pack_tokens
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.traces.reader import read_trace

LIMITS = {"capacity": 1_000}
"""Requests per trace, where they are not 300."""
CAPACITIES = (30_000, 100_000, 300_000, 1_000_000)
KV_BLOCK = 16
PREAMBLE_TOKENS = 200
LONGEST_PIECE = 8_192
SECONDS_PER_TOKEN = 1e-4
Piece: TypeAlias = tuple[int, int]
"""Part of a prompt: its number, and its length in tokens."""


class Others(NamedTuple):
    """What else the engine goes through."""

    name: str
    share: float
    """Of the computed tokens."""
    every: int = 1
    """Requests after which the prompts of others enter."""
    restarts: int = 0
    """Requests between restarts; 0 for none."""


OTHERS = (
    Others("30 % of others", 0.3),
    Others("70 % of others", 0.7),
    Others("70 % of others, together", 0.7, every=50),
    Others("30 % of others, restarts", 0.3, restarts=200),
)


class Use(NamedTuple):
    """Tokens of all requests."""

    context: int = 0
    found: int = 0
    computed: int = 0
    """Of whole prompts, notes included."""


class Engine:
    """A prefix cache of whole blocks."""

    def __init__(self, capacity: int, others: Others) -> None:
        self._capacity = capacity
        self._others = others
        self._unseen = count(-1, -1)
        self._due = self._served = 0
        self.restart()

    def serve(self, prompt: Sequence[Piece]) -> int:
        """Serve a prompt, then what is due of others; return the reported cached tokens."""
        cached = self._fill(prompt)
        self._served += 1
        computed = sum(length for _, length in prompt) - cached
        self._due += round(computed * self._others.share / (1 - self._others.share))
        if self._served % self._others.every == 0:
            for _ in range(self._due // LONGEST_PIECE + 1):
                self._fill([(next(self._unseen), min(self._due, LONGEST_PIECE))])
                self._due -= min(self._due, LONGEST_PIECE)
        if self._others.restarts and self._served % self._others.restarts == 0:
            self.restart()
        return cached

    def restart(self) -> None:
        self._tree = PrefixTree[int](self._capacity, max_nodes=10**9)

    def _fill(self, prompt: Sequence[Piece]) -> int:
        numbers, lengths = zip(*prompt, strict=True)
        return self._tree.insert(numbers, lengths).tokens // KV_BLOCK * KV_BLOCK


class PublishingEngine(Engine):
    """A prefix cache of KV blocks, and the index that its events keep."""

    def __init__(self, capacity: int, others: Others) -> None:
        PublishingCache.publisher = self  # type: ignore[assignment]
        self._cache = PublishingCache(capacity // KV_BLOCK + 1, KV_BLOCK)
        self.index = KvIndex()
        self.index.wipe("engine", complete=True)
        super().__init__(capacity, others)

    def publish(self, *events: dict[str, object]) -> None:
        self.index.apply("engine", read_batch(msgspec.msgpack.encode([0.0, events, 0])))

    def restart(self) -> None:
        self._cache.reset()
        self.publish({"type": "AllBlocksCleared"})

    def _fill(self, prompt: Sequence[Piece]) -> int:
        tokens = tokens_of(prompt)
        sequence = self._cache.allocate(tokens) if tokens else None
        if sequence is None:
            return 0
        self._cache.store(sequence)
        self._cache.free(sequence)
        return sequence.cached_tokens


def tokens_of(prompt: Sequence[Piece]) -> list[int]:
    """Return token ids; those of a piece depend on its number alone."""
    starts = [(LONGEST_PIECE * number % 2**32, length) for number, length in prompt]
    return [token for start, length in starts for token in range(start, start + length)]


class Feed:
    """A `ResidencyFeed` of one engine's events, without sockets and threads."""

    def __init__(self, index: KvIndex, lengths: dict[bytes, int]) -> None:
        self._index = index
        self._lengths = lengths
        self._target: ResidencyTarget | None = None

    def follow(self, target: ResidencyTarget) -> None:
        self._target = target

    def remember(self, served: ServedPrompt) -> None:
        ends = tuple([PREAMBLE_TOKENS + end for end in accumulate([self._lengths[key] for key in served.keys])])
        tokens = served.token_ids() if callable(served.token_ids) else served.token_ids
        self._index.remember(MappedPrompt(served.scope, None, served.keys, pack_tokens(tokens), ends))

    def notify(self) -> None:
        """Notify the target of all changes so far."""
        assert self._target is not None
        for change in self._index.changes():
            self._target.residency_changed(change.scope, change.keys, change.resident_blocks, change.checkpoints)

    def is_complete(self, cache_salt: str | None) -> bool:
        return self._index.certain(salted=cache_salt is not None)

    def stats(self) -> FeedStats:
        return FeedStats()

    def close(self) -> None: ...


class Report(NamedTuple):
    """What a planner receives of each answer."""

    usage: bool = True
    ttft: bool = False
    feed: bool = False
    capacity: int | None = None
    """The capacity in the engine's metrics."""


def serve_all(workload: Workload, engine: Engine, report: Report, **options: Any) -> Use:
    """Plan, serve and report all requests of a trace."""
    feed: Feed | None = None
    if report.feed and isinstance(engine, PublishingEngine):
        lengths = {block.fingerprint: block.tokens for each in workload.requests for block in each.blocks}
        options["feed"] = feed = Feed(engine.index, lengths)
    options.setdefault("capacity_tokens", "auto")
    planner = ContextPlanner(recorder=NoRecorder(), **options)
    chance, context, hits, computed = random.Random(0), 0, 0, 0
    for request in workload.requests:
        plan = planner.plan(request.blocks, preamble=request.source.scope)
        prompt = prompt_of(request, plan)
        cached = engine.serve(prompt)
        length = PREAMBLE_TOKENS + plan.total_tokens
        seconds = SECONDS_PER_TOKEN * (length - cached) * chance.uniform(0.8, 1.25)
        planner.commit(
            plan,
            report=EngineReport(
                cached_tokens=cached if report.usage else None,
                prompt_tokens=length if report.usage else None,
                ttft=seconds if report.ttft else None,
                prompt_token_ids=None if feed is None else tokens_of(prompt),
                capacity_tokens=report.capacity,
            ),
        )
        if feed is not None:
            feed.notify()
        context += plan.total_tokens
        hits += max(cached - PREAMBLE_TOKENS, 0)
        computed += length - cached + estimated_tokens(plan.order_annotation or "")
    return Use(context, hits, computed)


def prompt_of(request: ReplayRequest, plan: ContextPlan) -> list[Piece]:
    return [(0, PREAMBLE_TOKENS), *((1 + request.keys[place], request.tokens[place]) for place in plan.order)]


# -- features ----------------------------------------------------------------------------------------------------------

Cases: TypeAlias = Iterator[tuple[str, Use, Use]]
"""Name of a case, and the use without and with the feature."""


def reports(workload: Workload, capacity: int) -> Cases:
    for others in OTHERS:
        for name, given, stated in (("given", capacity, None), ("learned", "auto", None), ("stated", "auto", capacity)):
            without, with_it = (
                serve_all(workload, Engine(capacity, others), Report(usage, capacity=stated), capacity_tokens=given)
                for usage in (False, True)
            )
            yield f"{others.name}, capacity {name}", without, with_it


def capacity(workload: Workload, capacity: int) -> Cases:
    for others in (Others("no others", 0), *OTHERS[:1], *OTHERS[2:3]):
        for name, given in (("right", capacity), ("a third", capacity // 3), ("500,000", 500_000)):
            without, with_it = (
                serve_all(workload, Engine(capacity, others), Report(), capacity_tokens=tokens)
                for tokens in (FixedCapacity(given), given)
            )
            yield f"{others.name}, given {name}", without, with_it


def ttft(workload: Workload, capacity: int) -> Cases:
    for others in OTHERS:
        without, with_it = (
            serve_all(workload, Engine(capacity, others), Report(False, is_timed)) for is_timed in (False, True)
        )
        yield others.name, without, with_it


def kv_events(workload: Workload, capacity: int) -> Cases:
    for others in OTHERS:
        without, with_it = (
            serve_all(workload, PublishingEngine(capacity, others), Report(feed=is_fed)) for is_fed in (False, True)
        )
        yield others.name, without, with_it


FEATURES: dict[str, Callable[[Workload, int], Cases]] = {
    "reports": reports,
    "capacity": capacity,
    "ttft": ttft,
    "kv_events": kv_events,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files or folders")
    parser.add_argument("--features", default=",".join(FEATURES), help="with commas between them")
    parser.add_argument("--limit", type=int, help="requests per trace; 300 by default, or 1,000 for capacity")
    options = parser.parse_args()
    paths = given_files(options.traces)
    traces = [read_trace(path, None) for path in paths] if paths else list(generated())
    rows: list[dict[str, Any]] = []
    for feature in options.features.split(","):
        limit = options.limit or LIMITS.get(feature, 300)
        cut = [replace(trace, requests=trace.requests[:limit]) for trace in traces]
        workloads = [Workload(trace, reported_k(trace)) for trace in cut]
        for capacity in CAPACITIES:
            found: dict[str, list[tuple[Use, Use]]] = {}
            for workload in workloads:
                for case, without, with_it in FEATURES[feature](workload, capacity):
                    found.setdefault(case, []).append((without, with_it))
            rows += [row(feature, case, capacity, uses) for case, uses in found.items()]
            print(f"{feature}, {capacity}: done", file=sys.stderr)
    print_table([*rows[0]], [[*each.values()] for each in rows])
    if paths and options.limit is None:
        write_rows("feature_gains", rows, ("feature", "case", "cache"))


def row(feature: str, case: str, capacity: int, uses: Sequence[tuple[Use, Use]]) -> dict[str, Any]:
    """Return the means over traces, and the worst and best of them."""
    before = [100 * without.found / max(without.context, 1) for without, _ in uses]
    after = [100 * with_it.found / max(with_it.context, 1) for _, with_it in uses]
    gains = [later - earlier for earlier, later in zip(before, after, strict=True)]
    costs = [100 * (with_it.computed / max(without.computed, 1) - 1) for without, with_it in uses]
    return {
        "feature": feature,
        "case": case,
        "cache": size(capacity),
        "traces": len(uses),
        "without_percent": round(fmean(before), 2),
        "with_percent": round(fmean(after), 2),
        "gain": round(fmean(gains), 2),
        "worst_gain": round(min(gains), 2),
        "best_gain": round(max(gains), 2),
        "cost_percent": round(fmean(costs), 2),
    }


if __name__ == "__main__":
    main()
