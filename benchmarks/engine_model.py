"""What a planner finds out about its engine from reports alone, and the prefill that this saves.

    python benchmarks/engine_model.py [--texts stdlib,xquad] [--requests 200] [--engines off,"4 replicas, random"]

The engines are the simulated caches of warmprefix_tools: full attention, sliding windows, recurrent layers, several
replicas behind one planner, llama.cpp, small caches, and none. Each reports the cached tokens of every prompt, and some
state a capacity in their metrics; it is not that of the small ones. Prompts have a preamble, eight passages and a
question.

Planners: one in relevance order; `auto`, with the default options, which knows nothing but the reports; and `told`,
which was given the profile and the capacity. "Saved" is prefill against relevance order on the same engine, notes
included. *model* and *capacity* are those of `auto` at the end, *after* the number of reports after which the model was
named for good, and *agreement* the tokens predicted and reported, the smaller by the larger.

The text xquad needs the folder that the environment variable WARMPREFIX_TRACES names. If `auto` computes over 0.3 %
more than relevance order, and did not find that the engine caches nothing, the script fails. Only runs with the default
numbers are written to `results/`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from common import print_table
from engine_workload import EngineQuestion, read
from result_files import write_rows
from warmprefix import ContextPlanner, EngineReport
from warmprefix.cache_profiles import as_profile
from warmprefix.telemetry import PlannerStats
from warmprefix.tokens import estimated_tokens
from warmprefix.traces import NoRecorder
from warmprefix_tools.caches import MarkedPrompt, SimulatedCache, UnitTokens, serve, simulated_cache

K = 8
KV_BLOCK = 16
LARGE = 1_152_083
"""Tokens of a cache with room for all prompts."""
PREAMBLE_TOKENS = 200
QUESTION_TOKENS = 40
LABEL_TOKENS = 6
"""What a prompt adds to each passage."""
MOST_LOST = 0.3
"""Percent of the prefill of relevance order."""


class EngineSetup(NamedTuple):
    """A simulated engine, and what it states of itself."""

    profile: str | None = "full-attention"
    """None for an engine that caches nothing."""
    stated: int | None = LARGE
    """The capacity in its metrics; None without metrics."""
    tokens: int = LARGE
    """The capacity that it has, of full attention."""
    window: int | None = None
    replicas: int = 1
    at_random: bool = False
    """Whether a random replica serves each request; otherwise they take turns."""

    def caches(self) -> Sequence[SimulatedCache]:
        if self.profile is None:
            return ()
        profile = as_profile(self.profile)
        blocks = self.tokens // KV_BLOCK + 1
        return [simulated_cache(profile, kv_blocks=blocks, window=self.window) for _ in range(self.replicas)]


ENGINES: Mapping[str, EngineSetup] = {
    "full attention": EngineSetup(),
    "full attention, no metrics": EngineSetup(stated=None),
    "sliding windows, block 128": EngineSetup("vllm-checkpoints(128)", window=512),
    "recurrent, block 256": EngineSetup("vllm-checkpoints(256)"),
    "recurrent, block 528, unit 16": EngineSetup("vllm-checkpoints(528,16)"),
    "2 replicas, in turn": EngineSetup(replicas=2),
    "2 replicas, random": EngineSetup(replicas=2, at_random=True),
    "4 replicas, in turn": EngineSetup(replicas=4),
    "4 replicas, random": EngineSetup(replicas=4, at_random=True),
    "llama.cpp, host memory": EngineSetup("llama.cpp(4)", stated=None),
    "llama.cpp, slots only": EngineSetup("llama.cpp(4,0)", stated=None),
    "20,000 tokens, large stated": EngineSetup(tokens=20_000),
    "20,000 tokens, no metrics": EngineSetup(stated=None, tokens=20_000),
    "60,000 tokens, large stated": EngineSetup(tokens=60_000),
    "60,000 tokens, no metrics": EngineSetup(stated=None, tokens=60_000),
    "off": EngineSetup(profile=None),
}


def served(
    asked: Sequence[EngineQuestion], engine: EngineSetup, seed: int, **options: Any
) -> Iterator[tuple[int, PlannerStats]]:
    """Plan, serve and report requests; yield the computed tokens of each, and what the planner knows after it."""
    caches, chance, units = engine.caches(), random.Random(seed), UnitTokens()
    planner = ContextPlanner(recorder=NoRecorder(), **options)
    for number, request in enumerate(asked):
        plan = planner.plan(request.blocks, preamble="preamble")
        lengths = [each.block.tokens + LABEL_TOKENS for each in plan.blocks]
        tail = QUESTION_TOKENS + estimated_tokens(plan.order_annotation or "")
        passages = zip([each.block.fingerprint for each in plan.blocks], lengths, strict=True)
        tokens = units.encode([("preamble", PREAMBLE_TOKENS), *passages, (number, tail)])
        cached = 0
        if caches:
            cache = chance.choice(caches) if engine.at_random else caches[number % len(caches)]
            cached = serve(cache, MarkedPrompt(tokens)).read
        ends = [(PREAMBLE_TOKENS + end) / len(tokens) for end in accumulate(lengths)]
        report = EngineReport(cached, len(tokens), block_ends=ends, capacity_tokens=engine.stated)
        planner.commit(plan, report=report)
        yield len(tokens) - cached, planner.stats()


def measure(name: str, asked: Sequence[EngineQuestion], seed: int = 0) -> dict[str, Any]:
    """Return the row of an engine."""
    engine = ENGINES[name]
    relevance = sum(computed for computed, _ in served(asked, engine, seed, policy="relevance", annotate="none"))

    def saved(computed: int) -> float:
        return round(100 * (1 - computed / relevance), 1)

    steps = [*served(asked, engine, seed)]
    stats = steps[-1][1]
    others = [number for number, (_, each) in enumerate(steps, 1) if each.engine_model != stats.engine_model]
    row: dict[str, Any] = {
        "engine": name,
        "requests": len(asked),
        "stated_tokens": engine.stated,
        "model": stats.engine_model,
        "profile": stats.profile,
        "after": others[-1] + 1 if others else 0,
        "capacity_tokens": stats.capacity_tokens,
        "agreement": None if stats.residency_confidence is None else round(stats.residency_confidence, 3),
        "relevance_tokens": relevance,
        "auto_tokens": sum(computed for computed, _ in steps),
    }
    row["auto_percent"] = saved(row["auto_tokens"])
    if engine.profile is not None:
        told = served(asked, engine, seed, profile=engine.profile, capacity_tokens=engine.tokens)
        row["told_tokens"] = sum(computed for computed, _ in told)
        row["told_percent"] = saved(row["told_tokens"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="stdlib,xquad")
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=ENGINES, metavar="ENGINE")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="draws the questions of stdlib, and replicas")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in options.texts.split(","):
        try:
            asked = read(text, options.requests, K, options.seed)
        except FileNotFoundError as error:
            print(f"{text} is not there: {error}", file=sys.stderr)
            continue
        rows += [{"text": text, **measure(name, asked, options.seed)} for name in options.engines]
    shown = ["text", "engine", "model", "after", "capacity_tokens", "agreement", "auto_percent", "told_percent"]
    print_table(shown, [[row.get(name, "") for name in shown] for row in rows])
    if [options.requests, options.seed] == [parser.get_default(name) for name in ("requests", "seed")]:
        write_rows("engine_model", rows, ("text", "engine"))
    most = 1 + MOST_LOST / 100
    caching = [row for row in rows if row["model"] != "off"]
    losing = [
        f"{row['text']}, {row['engine']}" for row in caching if row["auto_tokens"] > most * row["relevance_tokens"]
    ]
    if losing:
        sys.exit(f"more prefill than in relevance order: {'; '.join(losing)}")


if __name__ == "__main__":
    main()
