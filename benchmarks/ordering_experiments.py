"""Gain of each step towards the default ordering policy, and of rejected ideas.

    python benchmarks/ordering_experiments.py [TRACE_OR_FOLDER ...] [--only NAME ...] [--limit N] [--markdown]

Where the traces come from: as for `online_hit_ratio.py`. Each experiment is one change to another. All of them, and the
policies to beat, replay every trace as recorded and in the variants `VARIED`, with two cache sizes, each with a
prefix cache of its own. All figures are token-weighted hit ratios in %:

*as recorded*, *varied*: means over traces and caches. *gain*: the mean effect of the change over all rows; a row is a
trace in one variant with one cache. *s.e.*: the standard error of that mean if traces are the sample: a gain of less
than two standard errors may be chance. *at best*: the number of rows, as recorded and varied, in which it is at or
above the best of `TO_BEAT`, within 0.05 points. *where it shows*: the two traces, as recorded, with the largest effects
over both caches.

Most experiments are settings of one policy (`experimental_ordering.py`). Set like the default policy it must find
exactly what that one finds, in every row, or the run fails. The last part measures the noise in the figures of
one small trace.

Only a run of all experiments on given traces, without `--limit`, is written to `results/`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import print_table, size
from experimental_ordering import Block, BlockCache, ExperimentalPolicy, FollowTheBest, Rule
from result_files import write_results
from traces import generated, given_files, reported_k, vary
from warmprefix.ordering import CoAccessPolicy, OrderingPolicy
from warmprefix_baselines import POLICIES
from warmprefix_baselines.policies import OraclePolicy
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

CAPACITIES = (None, 100_000)
AS_RECORDED = ("as-recorded", 0)
VARIED = (("half", 20), ("half", 21), ("shuffled", 2), ("last=60", 0))
"""Variants with their seeds, which differ from those used to develop the default policy."""
TOLERANCE = 0.05

PLAIN = "plain, prior 2"
DEFAULT = "the default"
SAME_AS_DEFAULT = "the pair at hand x 8"
BASELINES = ("relevance", "sorted", "frequency", "greedy", "oracle")
TO_BEAT = (*BASELINES, PLAIN)

THIRDS = (1 / 3, 2 / 3, 1.0)
SQUARES = tuple(((sixth - 0.5) / 6) ** 0.5 for sixth in range(1, 7))
"""The shares whose square, rounded to sixths, increases."""
RELEVANCE_TAIL = "relevance order behind the head"

NOISY_TRACE = "synth_bursty_500docs_k5_shuffle"
"""Its blocks are in random order, so any other order is an equally valid trace."""
NOISY_SEEDS = 60

Make = Callable[[int | None], OrderingPolicy]
"""Makes a policy for a cache of a number of tokens."""


@dataclass(frozen=True)
class Experiment:
    """A policy, and the experiment that it changes."""

    name: str
    idea: str
    after: str | None
    make: Make


# -- the series --------------------------------------------------------------------------------------------------------


def series() -> Series:
    """Return the steps in order, each followed by what else was tried in its place."""
    e = Series()
    plain = Rule(odds=False, prior=2.0, levels=(), learn="none")
    e.start(
        PLAIN, "Deepest path, then most requests in common with all before it; the last rank costs 2 requests.", plain
    )
    e.change(PLAIN, "plain, prior 1", "The last rank costs 1 request.", prior=1.0)
    e.change(PLAIN, "plain, prior 8", "It costs 8.", prior=8.0)
    e.change(PLAIN, "cold ones left alone", "A request with no resident path keeps relevance order.", leave_cold=True)
    e.change(PLAIN, "back off to frequency", "Where co-access ends, the rest by frequency.", then_by_frequency=True)
    e.change(PLAIN, "plain, window 200", "The last 200 requests count.", window=200)
    e.change(PLAIN, "plain, window 4,000", "The last 4,000 do.", window=4_000)

    e.change(PLAIN, "likeness", "A request counts 1 to 3 thirds, by its share of the highest overlap.", levels=THIRDS)
    e.change("likeness", "likeness, squared", "It counts 1 to 6 sixths, by the square of that share.", levels=SQUARES)
    e.change("likeness", "likeness, prior 1", "The last rank costs 1 request.", prior=1.0)
    e.change("likeness", "likeness, prior 8", "It costs 8.", prior=8.0)
    regression = "What the rank costs is learned: what came up again, by ridge regression on holders and rank."
    e.change("likeness", "rank cost by regression", regression, learn_prior=True, learn="tails")
    two, three = ["likeness", RELEVANCE_TAIL], ["likeness", RELEVANCE_TAIL, PLAIN]
    ghosts = "Follow the better, on ghost caches, of this rule and relevance order behind the head"
    e.ghosts("likeness", "ghosts, decay 0.995", f"{ghosts}; decay 0.995.", two, 0.995)
    e.ghosts("likeness", "ghosts, decay 0.999", f"{ghosts}; decay 0.999.", two, 0.999)
    e.ghosts("likeness", "ghosts, hysteresis", "The same; change only for 0.3 % of the tokens.", two, 0.999, 0.003)
    e.ghosts("likeness", "three ghosts", "The same, the plain rule as the third.", three, 0.999, 0.003)

    e.change("likeness", "odds", "By p / (1 - p); p from holders and a fixed guess by rank.", odds=True, exponent=0.0)
    e.change("odds", "square root of tokens", "By sqrt(tokens) x odds.", exponent=0.5)
    e.change("odds", "tokens", "By tokens x odds.", exponent=1.0)
    learned = "How often each third of the ranks comes up again is learned, from pairs of requests alike."
    e.change("tokens", "ranks learned", learned, learn="all", latest_weight=1)
    e.change("ranks learned", "from tails", "Learned only from blocks beyond the resident path.", learn="tails")
    e.change("from tails", SAME_AS_DEFAULT, "The pair at hand counts as much as 8 others.", latest_weight=8)

    e.start(DEFAULT, "The same as shipped: `CoAccessPolicy`.", Rule(), lambda _: CoAccessPolicy(), SAME_AS_DEFAULT)
    for trust in (5, 8, 16, 30):
        e.change(DEFAULT, f"trust {trust}", f"{trust} requests count as much as the rank, not 11.", trust=float(trust))
    e.change(DEFAULT, "trust learned", "The trust of least squared error so far, of 1 to 32.", learn_trust=True)
    e.change(DEFAULT, "window 2,000", "The last 2,000 requests count.", window=2_000)
    hierarchy = "Requests with the same path weigh against all requests alike (4), and those against the rank (16)."
    e.change(DEFAULT, "hierarchical back-off", hierarchy, trust=4.0, frequency_trust=16.0)
    least = "Ignore a path of less than {} % of the tokens, unless the first block is on it."
    e.change(DEFAULT, "no heads below 10 %", least.format(10), least_head=0.1)
    e.change(DEFAULT, "no heads below 20 %", least.format(20), least_head=0.2)
    e.change(DEFAULT, "recency", "Of the requests alike, the last 200 count once more.", recent=200)
    e.change(
        DEFAULT, "likeness by rank", "In the overlap the upper half of the ranks counts twice.", first_half_twice=True
    )
    e.change(DEFAULT, "likeness by rare blocks", "Only blocks of at most 50 requests count in the overlap.", rare=50)
    e.change(DEFAULT, "every place", "p is estimated again for every place, not for the first 4.", estimates=0)
    e.change(DEFAULT, "look-ahead", "Compare the best 3 by joint counts, not as if independent.", look_ahead=3)
    e.change(DEFAULT, "seen and unseen apart", "Learn the ranks apart for blocks new to the window.", by_novelty=True)
    discount = "For the first place, requests with a block that was ever served behind this head {}."
    e.change(DEFAULT, "half discount", discount.format("count half"), discount=0.5)
    e.change(DEFAULT, "full discount", discount.format("do not count"), discount=1.0)
    e.change(DEFAULT, "unmet demand", "Requests that found less than half their tokens count once more.", unmet=0.5)
    e.change(
        DEFAULT, "less trust when cold", "Without a head, 3 requests count as much as the rank.", trust_when_cold=3.0
    )
    two = [DEFAULT, RELEVANCE_TAIL]
    e.ghosts(DEFAULT, "ghosts on the default", f"{ghosts}; 0.999, hysteresis.", two, 0.999, 0.003)
    return e


class Series:
    """Experiments by name, in the order in which they were added."""

    def __init__(self) -> None:
        self.experiments: dict[str, Experiment] = {}
        self._rules: dict[str, Rule] = {}

    def start(self, name: str, idea: str, rule: Rule, make: Make | None = None, after: str | None = None) -> None:
        """Add an experiment that others change; `make` and `rule` are the same policy."""
        self._rules[name] = rule
        self.experiments[name] = Experiment(name, idea, after, make or (lambda _: ExperimentalPolicy(rule)))

    def change(self, after: str, name: str, idea: str, **settings: Any) -> None:
        self.start(name, idea, replace(self._rules[after], **settings), after=after)

    def ghosts(
        self, after: str, name: str, idea: str, followed: Sequence[str], decay: float, hysteresis: float = 0.0
    ) -> None:
        makes: list[Callable[[], OrderingPolicy]] = [
            partial(OraclePolicy, max_blocks=0)
            if rule == RELEVANCE_TAIL
            else partial(ExperimentalPolicy, self._rules[rule])
            for rule in followed
        ]

        def make(capacity: int | None) -> OrderingPolicy:
            return FollowTheBest([make() for make in makes], capacity, decay, hysteresis)

        self.experiments[name] = Experiment(name, idea, after, make)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The results of all policies on one trace, in one variant, with one cache."""

    trace: str
    variant: str
    seed: int
    requests: int
    k: int
    capacity: int | None
    hit_percent: Mapping[str, float]

    def at_best(self, name: str) -> bool:
        return self.hit_percent[name] >= max(self.hit_percent[other] for other in TO_BEAT) - TOLERANCE


def main() -> None:
    experiments = series().experiments
    options = arguments(experiments)
    chosen = with_what_they_need(options.only, experiments) if options.only else experiments
    policies = {name: shipped(name) for name in BASELINES}
    policies |= {name: experiment.make for name, experiment in chosen.items()}
    paths = given_files(options.traces)
    rows: list[Row] = []
    noise: list[dict[str, object]] = []
    started = time.process_time()
    for trace in [read_trace(path, options.limit) for path in paths] if paths else generated():
        for variant, seed in (AS_RECORDED, *VARIED):
            rows += measure(trace, variant, seed, policies)
        if trace.name == NOISY_TRACE:
            noise = measure_noise(trace, policies)
        print(f"{trace.name}: done after {time.process_time() - started:.0f} s", file=sys.stderr)
    findings = [finding_of(experiment, rows) for experiment in chosen.values()]
    show = print_markdown if options.markdown else print_table
    show(*as_table(findings, options.markdown))
    print()
    if noise:
        print(f"{NOISY_TRACE}, the blocks of each request in {NOISY_SEEDS} random orders:\n")
        show(("policy", "mean", "s.d.", "less oracle", "s.d."), [list(line.values()) for line in noise])
    else:
        print(f"Noise was not measured: {NOISY_TRACE} is not among the traces.")
    if paths and options.limit is None and chosen is experiments and noise:
        write_results("ordering_experiments", findings)


def arguments(experiments: Mapping[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument(
        "--only", action="append", choices=experiments, metavar="NAME", help="this experiment; repeatable"
    )
    parser.add_argument("--limit", type=int, help="requests of each given trace")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown, with the ideas")
    return parser.parse_args()


def with_what_they_need(names: Sequence[str], experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Return these experiments, the default, and all steps that led to them."""
    wanted: set[str] = set()
    for name in (DEFAULT, *names):
        step: str | None = name
        while step is not None:
            wanted.add(step)
            step = experiments[step].after
    return {name: experiment for name, experiment in experiments.items() if name in wanted}


def shipped(name: str) -> Make:
    return lambda _: POLICIES[name]()


def measure(trace: Trace, variant: str, seed: int, policies: Mapping[str, Make]) -> list[Row]:
    workload = vary(trace, variant, reported_k(trace), seed)
    assert workload is not None, "only a variant with fewer blocks may not exist"
    requests = blocks_of(workload)
    rows: list[Row] = []
    for capacity in CAPACITIES:
        ratios = {name: hit_percent(make(capacity), requests, capacity) for name, make in policies.items()}
        if ratios[DEFAULT] != ratios[SAME_AS_DEFAULT]:
            sys.exit(
                f"{trace.name}, {variant}, {size(capacity)}: the experimental policy, set like the default, found"
                f" {ratios[SAME_AS_DEFAULT]} %, not {ratios[DEFAULT]} %: the experiments are about something else"
            )
        rows.append(Row(trace.name, variant, seed, len(requests), workload.k, capacity, ratios))
    return rows


def blocks_of(workload: Workload) -> list[list[Block]]:
    if workload.scopes > 1:
        sys.exit(f"{workload.name} has {workload.scopes} scopes; the experiments take traces of one")
    requests = [[Block(block.fingerprint, block.tokens) for block in request.blocks] for request in workload.requests]
    return [blocks for blocks in requests if blocks]


def hit_percent(policy: OrderingPolicy, requests: Sequence[Sequence[Block]], capacity: int | None) -> float:
    cache = BlockCache(capacity)
    saved = sum(cache.serve(policy, blocks).tokens for blocks in requests)
    return 100 * saved / max(sum(block.tokens for blocks in requests for block in blocks), 1)


def measure_noise(trace: Trace, policies: Mapping[str, Make]) -> list[dict[str, object]]:
    requests = blocks_of(Workload(trace, reported_k(trace)))
    ratios: dict[str, list[float]] = {"oracle": [], PLAIN: [], DEFAULT: []}
    for seed in range(NOISY_SEEDS):
        rng = random.Random(seed)
        shuffled = [rng.sample(blocks, len(blocks)) for blocks in requests]
        for name, found in ratios.items():
            found.append(hit_percent(policies[name](None), shuffled, None))
    lines: list[dict[str, object]] = []
    for name, found in ratios.items():
        ahead = [ours - theirs for ours, theirs in zip(found, ratios["oracle"], strict=True)]
        line: dict[str, object] = {"policy": name, "mean": round(fmean(found), 2), "deviation": round(stdev(found), 2)}
        line |= {"less_oracle": round(fmean(ahead), 2), "less_oracle_deviation": round(stdev(ahead), 2)}
        lines.append(line)
    return lines


# -- what was found ----------------------------------------------------------------------------------------------------


def finding_of(experiment: Experiment, rows: Sequence[Row]) -> dict[str, Any]:
    name, after = experiment.name, experiment.after
    finding: dict[str, Any] = {"name": name, "idea": experiment.idea, "after": after}
    for heading, some in as_recorded_and_varied(rows).items():
        finding[heading] = {
            "mean": round(fmean(row.hit_percent[name] for row in some), 2),
            "at_best": sum(row.at_best(name) for row in some),
            "rows": len(some),
        }
    if after is not None:
        gains = list(gain_by_trace(name, after, rows).values())
        finding["gain"] = round(fmean(gains), 2)
        finding["standard_error"] = round(stdev(gains) / len(gains) ** 0.5, 2) if len(gains) > 1 else None
        as_recorded = gain_by_trace(name, after, as_recorded_and_varied(rows)["as_recorded"])
        finding["gain_as_recorded"] = {
            trace: round(gain, 2) for trace, gain in sorted(as_recorded.items(), key=lambda item: -abs(item[1]))
        }
    return finding


def as_recorded_and_varied(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        "as_recorded": [row for row in rows if (row.variant, row.seed) == AS_RECORDED],
        "varied": [row for row in rows if (row.variant, row.seed) != AS_RECORDED],
    }


def gain_by_trace(name: str, after: str, rows: Sequence[Row]) -> dict[str, float]:
    gains: dict[str, list[float]] = {}
    for row in rows:
        gains.setdefault(row.trace, []).append(row.hit_percent[name] - row.hit_percent[after])
    return {trace: fmean(values) for trace, values in gains.items()}


def as_table(findings: Sequence[Mapping[str, Any]], ideas: bool) -> tuple[list[str], list[list[object]]]:
    header = [
        "experiment",
        *(["idea"] if ideas else []),
        "after",
        "as recorded",
        "varied",
        "gain",
        "s.e.",
        "at best",
        "where it shows",
    ]
    lines: list[list[object]] = []
    for finding in findings:
        recorded, varied, changed = finding["as_recorded"], finding["varied"], finding["after"] is not None
        lines.append(
            [
                finding["name"],
                *([finding["idea"]] if ideas else []),
                finding["after"] or "",
                f"{recorded['mean']:.2f}",
                f"{varied['mean']:.2f}",
                f"{finding['gain']:+.2f}" if changed else "",
                f"{finding['standard_error']:.2f}" if changed and finding["standard_error"] is not None else "",
                f"{recorded['at_best']}/{recorded['rows']}, {varied['at_best']}/{varied['rows']}",
                where_it_shows(finding["gain_as_recorded"]) if changed else "",
            ]
        )
    return header, lines


def where_it_shows(gains: Mapping[str, float]) -> str:
    most = [(trace, points) for trace, points in gains.items() if abs(points) >= TOLERANCE]
    return ", ".join(f"{short(trace)} {points:+.1f}" for trace, points in most[:2])


def short(trace: str) -> str:
    """Return a trace's name without the way it was made."""
    return re.sub(r"(^|_)(psi|synth|bm25|k\d+|\d+|\d+docs|\d+topics)(?=_|$)", "", trace).strip("_")


def print_markdown(header: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    print(f"| {' | '.join(header)} |")
    print(f"|{'---|' * len(header)}")
    for line in lines:
        print(f"| {' | '.join(map(str, line))} |")


if __name__ == "__main__":
    main()
