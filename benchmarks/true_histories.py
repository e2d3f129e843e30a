"""Does every reference point into its own prompt? Randomized turns against a model of the true prompts.

Several workers, each with a `ContextPlanner` of its own, share one store and the same conversations. The model is the
application: only it has the true text of each history. It cuts, forks, loses and overwrites histories, races, crashes,
and commits late, twice or never. `true_prompts` checks each plan.

There are three applications. The *obedient* one stores a turn only if no other turn was stored since it planned (or its
storage only appends). It abandons plans that it did not store, and cuts a history only after `forget` has returned, if
nothing was stored in between. The *careless* one commits all simultaneous plans and keeps any of them, as a storage
does in which the last writer wins. It can be right only as long as its workers lose and regain the store together. The
*branching* one names turns by their ids, and continues, retries and forks any of them (`true_branches`).

    python benchmarks/true_histories.py --turns 1000000 --store memory --faults all
    python benchmarks/true_histories.py --turns 1000000 --store redis --faults all
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import percentile, print_table
from result_files import write_rows
from store_faults import Laboratory, MemoryLaboratory, RedisLaboratory
from true_branches import BranchWorld
from true_prompts import Findings
from true_world import Application, World


@dataclass(frozen=True)
class Scenario:
    """A kind of application, with a store that may lose records or not."""

    application: Application
    lossy: bool

    def __str__(self) -> str:
        return f"{self.application}, {'the store may lose data' if self.lossy else 'the store loses nothing'}"


SCENARIOS = {
    Scenario("obedient", True): 0.5,
    Scenario("careless", True): 0.25,
    Scenario("careless", False): 0.25,
    Scenario("branching", True): 0.2,
}
"""Each with its turns, as a part of `--turns`; a single scenario has all of them."""


@dataclass
class Outcome:
    """The result of a run of one scenario."""

    scenario: Scenario
    findings: Findings
    operations: Mapping[str, int]
    turns: int
    seconds: float
    faults: Mapping[str, int]
    recovered: int
    """Number of faults after which a reference was made again before the next fault."""
    store_errors: int
    contested: int
    times: Mapping[str, float]


def run(
    laboratory: Laboratory, scenario: Scenario, turns: int, seed: int, period: int, progress: bool = False
) -> Outcome:
    """Run `turns` turns, with a fault every `period` turns."""
    began = time.perf_counter()
    world: World | BranchWorld
    if scenario.application == "branching":
        world = BranchWorld(laboratory, seed)
    else:
        world = World(laboratory, scenario.application, seed)
    recovered = 0
    next_fault, faulty_until, references = period, None, 0
    next_line = turns // 20
    try:
        while world.turns < turns:
            world.step()
            if faulty_until is not None and time.monotonic() >= faulty_until:
                laboratory.end_fault()
                faulty_until, references = None, world.findings.references
                next_fault = world.turns + period
            elif faulty_until is None and world.turns >= next_fault:
                recovered += world.findings.references > references
                faulty_until = time.monotonic() + laboratory.begin_fault()
            if progress and world.turns >= next_line:
                next_line += turns // 20
                rate = world.turns / (time.perf_counter() - began)
                print(f"  {world.turns:9,} turns, {rate:6,.0f}/s, {world.findings.wrong} wrong", flush=True)
        if faulty_until is not None:
            laboratory.end_fault()
    finally:
        laboratory.repair()
        world.close()
    seconds = time.perf_counter() - began
    faults = dict(sorted(laboratory.faults.items()))
    milliseconds = {
        name: 1000 * value
        for name, value in (
            ("p50", percentile(world.times, 50)),
            ("p99", percentile(world.times, 99)),
            ("p99.9", percentile(world.times, 99.9)),
            ("max", max(world.times)),
        )
    }
    return Outcome(
        scenario,
        world.findings,
        world.operations,
        world.turns,
        seconds,
        faults,
        recovered,
        world.errors,
        world.contested,
        milliseconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--store", choices=["memory", "redis"], default="memory")
    parser.add_argument("--faults", default="all", help="none, all, or a part of a name, such as 'killed'")
    parser.add_argument("--period", type=int, help="turns between two faults")
    parser.add_argument("--flavour", help="server flavour: a key of redis_servers.binaries()")
    parser.add_argument("--scenario", default="", help="a part of the names of the scenarios to run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("warmprefix").setLevel(logging.ERROR)  # stores fail on purpose here
    outcomes: list[Outcome] = []
    shares = {scenario: share for scenario, share in SCENARIOS.items() if options.scenario in str(scenario)}
    if options.scenario:
        shares = dict.fromkeys(shares, 1.0)
    for scenario, share in shares.items():
        print(f"{scenario}:", flush=True)
        period = options.period or (300 if options.store == "memory" else 3_000)
        named = {"lossy": scenario.lossy, "asymmetric": scenario.application != "careless"}
        with (
            MemoryLaboratory(options.seed, options.faults, **named)
            if options.store == "memory"
            else RedisLaboratory(options.seed, options.faults, **named, flavour=options.flavour)
        ) as laboratory:
            outcome = run(
                laboratory,
                scenario,
                int(options.turns * share),
                options.seed,
                period,
                progress=True,
            )
        outcomes.append(outcome)
        for example in outcome.findings.examples:
            print(f"  {example}")
    print()
    report(outcomes)
    if options.turns >= 100_000 and options.faults == "all":
        write_rows(f"true_histories_{options.store}", [as_json(outcome) for outcome in outcomes], ["scenario"])
    return 1 if any(outcome.findings.wrong for outcome in outcomes) else 0


def report(outcomes: Sequence[Outcome]) -> None:
    print_table(
        ["scenario", "turns", "plans", "references", "dangling", "lost", "ambiguous", "crossed", "faults", "recovered"],
        [
            [
                o.scenario,
                o.turns,
                o.findings.plans,
                o.findings.references,
                o.findings.dangling,
                o.findings.lost,
                o.findings.ambiguous,
                o.findings.crossed,
                sum(o.faults.values()),
                o.recovered,
            ]
            for o in outcomes
        ],
    )
    print()
    print_table(
        ["a planner's call, ms", *outcomes[0].times],
        [[o.scenario, *[f"{value:.2f}" for value in o.times.values()]] for o in outcomes],
    )
    print()
    names = sorted({name for o in outcomes for name in o.faults})
    print_table(
        ["fault", *[str(o.scenario) for o in outcomes]],
        [[name, *[o.faults.get(name, 0) for o in outcomes]] for name in names],
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    findings = outcome.findings
    return {
        "scenario": str(outcome.scenario),
        "turns": outcome.turns,
        "seconds": round(outcome.seconds, 1),
        "plans": findings.plans,
        "blocks": findings.blocks,
        "references": findings.references,
        "dangling": findings.dangling,
        "lost": findings.lost,
        "ambiguous": findings.ambiguous,
        "crossed": findings.crossed,
        "operations": dict(sorted(outcome.operations.items())),
        "faults": dict(outcome.faults),
        "faults_recovered_from": outcome.recovered,
        "store_errors": outcome.store_errors,
        "contested_blocks": outcome.contested,
        "call_milliseconds": {name: round(value, 3) for name, value in outcome.times.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
