"""The input cost of prompts on hosted APIs whose caches match only at marks.

    python benchmarks/mark_costs.py [TRACE_OR_FOLDER ...] [--profiles anthropic,openai]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, those that any clone can make. Each prompt has a system prompt of 1,000 tokens, the trace's blocks and
its question. The cache is the simulated one of the profile (`warmprefix_tools.caches`), with a minimum of 512 tokens.
Costs are in percent of the price without a cache; reads and writes have the profile's prices.

- *no marks*: nothing is cached.
- *default*: what the API does by itself: for OpenAI a mark at the end of the newest message.
- *usual*: the marks of LangChain and LiteLLM, at the end of the system prompt and of the prompt, in relevance order.
- *system*: one mark, at the end of the system prompt.
- *ours*: the planner's order, with the marks of `MarkPlanner`.

Requests come at a steady rate, from all at once to one in ten minutes, or at the trace's own times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table
from result_files import Row, write_rows
from traces import from_a_clone, given_files, reported_k
from warmprefix import ContextPlanner
from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix_requests.marks.mark_planner import CacheUsage, MarkedPart, MarkPlanner
from warmprefix_tools.caches import CacheUse, Mark, MarkedPrompt, UnitTokens, serve, simulated_cache
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace

SYSTEM_TOKENS = 1_000
MINIMUM_TOKENS = 512
PAUSES = {"all at once": 0.0, "1 s": 1.0, "10 s": 10.0, "1 min": 60.0, "5 min": 300.0, "10 min": 600.0}
ARMS = ("no marks", "default", "usual", "system", "ours")
KIND = ("trace", "profile", "pause", "arm")
BY_PAUSE = ("xquad", "lihua", "ragpulse")
"""Traces of the table with several pauses, by their first letters."""


class Prompt(NamedTuple):
    """One request: what its parts are, and their lengths in tokens."""

    units: tuple[tuple[Any, int], ...]
    scope: str | None
    recorded: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE_OR_FOLDER", type=Path)
    parser.add_argument("--profiles", default="anthropic,openai")
    options = parser.parse_args()
    paths = given_files(options.traces)
    traces = [read_trace(path, None) for path in paths] if paths else list(from_a_clone())
    rows: list[dict[str, Any]] = []
    for trace in traces:
        workload = Workload(trace, reported_k(trace))
        orders = {planned: list(prompts(workload, planned=planned)) for planned in (False, True)}
        for name in options.profiles.split(","):
            profile = replace(as_profile(name), minimum_tokens=MINIMUM_TOKENS)
            rows += measured(workload, profile, orders)
        print(f"{trace.name}: done", file=sys.stderr)
    for name in options.profiles.split(","):
        report([row for row in rows if row["profile"] == name])
    write_rows("mark_costs", [row for row in rows if is_shown(row)], KIND)


def prompts(workload: Workload, *, planned: bool) -> Iterator[Prompt]:
    planner = ContextPlanner(annotate="none") if planned else ContextPlanner(policy="relevance", annotate="none")
    for number, request in enumerate(workload.requests):
        plan = planner.plan(request.blocks, tenant=request.source.scope)
        planner.commit(plan)
        blocks = [(each.block.id, each.block.tokens) for each in plan.blocks]
        question = (("question", number), max(request.source.query_tokens, 1))
        units = (("system", SYSTEM_TOKENS), *blocks, question)
        yield Prompt(units, request.source.scope, request.source.seconds)


def measured(workload: Workload, profile: CacheProfile, orders: dict[bool, list[Prompt]]) -> Iterator[dict[str, Any]]:
    recorded = [prompt.recorded for prompt in orders[False]]
    times = {name: [number * pause for number in range(len(recorded))] for name, pause in PAUSES.items()}
    if None not in recorded:
        times["recorded"] = [moment for moment in recorded if moment is not None]
    for name, moments in times.items():
        for arm in ARMS:
            use = served(profile, arm, orders[arm == "ours"], moments)
            cost = round(100 * use.cost(profile) / use.tokens, 2)
            yield {"trace": workload.name, "profile": profile.name, "pause": name, "arm": arm, "cost_percent": cost}


def served(profile: CacheProfile, arm: str, asked: Sequence[Prompt], moments: Sequence[float]) -> CacheUse:
    """Serve all prompts; return the sum of what the cache had of them."""
    cache, units, now = simulated_cache(profile), UnitTokens(), 0.0
    planner = MarkPlanner(profile, count_tokens=len, clock=lambda: now)
    assert profile.marks is not None
    read, uncached, written = 0, 0, [0] * len(profile.marks.lifetimes)
    for prompt, moment in zip(asked, moments, strict=True):
        now = moment
        ends: list[int] = []
        for _, length in prompt.units:
            ends.append((ends[-1] if ends else 0) + length)
        last = len(ends) - 1
        decision = planner.decide(parts_of(prompt), prompt.scope) if arm == "ours" else None
        if decision is not None:
            marks = tuple([Mark(part, lifetime) for part, lifetime in decision.lifetimes.items()])
        else:
            marks = {"usual": (Mark(0), Mark(last)), "system": (Mark(0),)}.get(arm, ())
        tokens = units.encode(prompt.units)
        is_automatic = arm == "default"
        use = serve(cache, MarkedPrompt(tokens, prompt.scope, tuple(ends), marks, (last,), is_automatic), now)
        if decision is not None:
            planner.report(decision, CacheUsage(use.read, sum(use.written), use.uncached))
        read, uncached = read + use.read, uncached + use.uncached
        written = [total + more for total, more in zip(written, use.written, strict=True)]
    return CacheUse(read, tuple(written), uncached)


def parts_of(prompt: Prompt) -> list[MarkedPart]:
    last = len(prompt.units) - 1
    parts: list[MarkedPart] = []
    for number, (unit, tokens) in enumerate(prompt.units):
        content = repr(unit).encode()
        if number == 0:
            parts.append(MarkedPart(content, "system", tokens))
        else:
            parts.append(MarkedPart(content, "end" if number == last else "inner", tokens, number - 1))
    return parts


def is_shown(row: Row) -> bool:
    """Return True if a page shows this row; the others are only in the means."""
    is_by_pause = row["pause"] in ("1 min", "10 min", "recorded") and str(row["trace"]).startswith(BY_PAUSE)
    is_among_arms = row["profile"] == "anthropic" and row["arm"] != "default"
    return is_among_arms and (is_by_pause or row["pause"] == "all at once")


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the costs of one profile, and how far ours is above the better of no marks and the usual marks."""
    cells = {tuple(row[name] for name in KIND): row["cost_percent"] for row in rows}
    lines: list[list[object]] = []
    excess: list[float] = []
    for trace, profile, pause in dict.fromkeys((row["trace"], row["profile"], row["pause"]) for row in rows):
        costs = [cells[trace, profile, pause, arm] for arm in ARMS]
        excess.append(costs[4] - min(costs[:3]))
        lines.append([trace, pause, *[f"{cost:.1f}" for cost in costs], f"{excess[-1]:+.1f}"])
    print(f"\n{rows[0]['profile']}: cost in % of the uncached price\n")
    print_table(["trace", "pause", "no marks", "default", "usual", "system", "ours", "ours - best other"], lines)
    print(f"\nmean {statistics.fmean(excess):+.2f} points, worst {max(excess):+.2f}")


if __name__ == "__main__":
    main()
