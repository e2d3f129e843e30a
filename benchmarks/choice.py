"""What choosing evidence in view of the cache saves, and what of the gold is still fed, next to a control by chance.

    python benchmarks/choice.py [TRACE_OR_FOLDER ...] [--caches 100000,30000,unbounded] [--limit 2000]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, a generated one. Only traces with scores take part. `k` is the trace's own, 15 at most
(`nq_open_records`: 5), and a request has up to twelve candidates more. Each arm is a
`ContextPlanner` with the default policy, whose mirror has the size of the cache, in the simulator of
`warmprefix replay`; labels and notes count as computed.

- *default*: the first `k` candidates, ordered as today.
- *choice*: `Choice(k)`.
- *chance*: the same places with as many exchanges, drawn by lot among the same candidates.
- *extra*: `Choice(k, keep=k, extra=2)`: all of the first `k`, and what costs nothing besides.
- *choice, extra*: `Choice(k, extra=2)`.
- *twins*: `Choice(k, keep=k, twins=True)`: of passages that differ in their release alone, one is fed.
- *choice, twins*: `Choice(k, twins=True)`.

*change*: of the computed tokens, against *default*. *gold*: the share of the passages that the data set names which are
fed; by chance, the mean of 20 draws. *changed*: requests whose passages are not those of relevance. *most fed*: the
share of all that is fed which the most-fed 1 % of passages have. *same*: requests with the very context of *default*.
A run with given traces and the default limit is written to `results/`; the means are those of all rows there. So are
the *pooled* points of gold of all traces together, with their error, half of the 95 % interval: that of as many
requests that lose or win gold, if each did so on its own. `--means` only calculates them again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import print_table, size, zipf_requests
from result_files import read_rows, write_results, write_rows
from trace_lines import MORE_CANDIDATES
from traces import given_files, reported_k, trace_of
from warmprefix_tools.chance_swaps import chance_swaps
from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.evidence import ChanceControl
from warmprefix_tools.replay.replay_options import parse_capacities
from warmprefix_tools.replay.results import DEFAULT_POLICY, ReplayResult
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import DEFAULT_K, ReplayRequest, Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace, stand_in

LIMIT = 2_000
KIND = ("trace", "cache", "arm")
DRAWS = 20
ALL_KEPT = "keep=1000"
"""More places than any trace has."""
ARMS: Mapping[str, str] = {
    "choice": "",
    "extra": f"{ALL_KEPT},extra=2",
    "choice, extra": "extra=2",
    "twins": f"{ALL_KEPT},twins=yes",
    "choice, twins": "twins=yes",
}
"""The choice of each arm, in the words of `warmprefix replay --choose`."""
ALWAYS = ("choice",)
"""Arms that are measured with all caches, not with the first alone."""
OF_TEXTS = ("twins", "choice, twins")
"""The same, of traces with texts; others have no twins."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE_OR_FOLDER", type=Path)
    parser.add_argument("--caches", default="100000,30000,unbounded")
    parser.add_argument("--limit", type=int, default=LIMIT, help="requests of each trace")
    parser.add_argument("--means", action="store_true", help="only renew results/choice_means.csv")
    options = parser.parse_args()
    if options.means:
        write_results("choice_means", [*means(read_rows("choice"))])
        return
    paths = given_files(options.traces)
    capacities = parse_capacities(options.caches)
    rows: list[dict[str, Any]] = []
    for trace in (read_trace(path, options.limit) for path in paths) if paths else [generated()]:
        if with_scores := scored(trace):
            rows += measured(with_scores, capacities)
            print(f"{trace.name}: done", file=sys.stderr)
    for capacity in capacities:
        report([row for row in rows if row["cache"] == size(capacity)])
    if paths and options.limit == LIMIT:
        write_rows("choice", rows, KIND)
        write_results("choice_means", [*means(read_rows("choice"))])


def generated() -> Trace:
    """Return a generated trace with scores that fall by the rank."""
    trace = trace_of("generated_topics", zipf_requests(1_000, k=20, topics=50, per_topic=40))
    requests = [
        replace(request, scores=tuple(1 / (rank + 1) for rank in range(len(request.blocks))))
        for request in trace.requests
    ]
    return replace(trace, requests=tuple(requests), k=8)


def scored(trace: Trace) -> Trace | None:
    """Return the requests with scores, cut to the candidates; None without any."""
    k = min(reported_k(trace), DEFAULT_K)
    requests = [
        replace(
            request, blocks=request.blocks[: k + MORE_CANDIDATES], scores=request.scores[: k + MORE_CANDIDATES], k=k
        )
        for request in trace.requests
        if request.blocks and request.scores
    ]
    return replace(trace, requests=tuple(requests)) if requests else None


# -- runs --------------------------------------------------------------------------------------------------------------


class Contexts:
    """What one run feeds, request by request."""

    def __init__(self) -> None:
        self.requests: list[tuple[ReplayRequest, ContextOrder]] = []

    def observe(self, request: ReplayRequest, order: ContextOrder) -> None:
        self.requests.append((request, order))

    def sent(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the order of each request and the tokens of its notes."""
        return [(order.order, order.written_tokens) for _, order in self.requests]


def measured(trace: Trace, capacities: Sequence[int | None]) -> Iterator[dict[str, Any]]:
    """Yield a row for each cache and arm: all arms for the first cache, `ALWAYS` and `OF_TEXTS` for the others."""
    texts = trace.texts or {block: stand_in(json.dumps(block)) for block in trace.tokens}  # which have no twins
    whole = replace(trace, texts=texts)
    replays = {arm: Replay(Workload(whole, choose=parse_choice(text))) for arm, text in ARMS.items()}
    for capacity in capacities:
        is_first = capacity == capacities[0]
        contexts = {arm: Contexts() for arm in ("default", "chance", *ARMS)}
        control = ChanceControl()
        results = {"default": replays["choice"].run(DEFAULT_POLICY, capacity, observe=contexts["default"].observe)}
        for arm, replay in replays.items():
            if is_first or arm in ALWAYS or (arm in OF_TEXTS and trace.texts):
                results[arm] = replay.run(DEFAULT_POLICY, capacity, places=None, observe=contexts[arm].observe)
            if is_first and arm == "choice":
                for request, order in contexts[arm].requests:
                    control.observe(request, order)
                results["chance"] = replay.run(
                    DEFAULT_POLICY, capacity, places=control.places, observe=contexts["chance"].observe
                )
        for arm, result in results.items():
            yield row_of(arm, result, results["default"], contexts)


def row_of(arm: str, result: ReplayResult, default: ReplayResult, contexts: Mapping[str, Contexts]) -> dict[str, Any]:
    """Return the figures of one run."""
    evidence, requests, own = result.evidence, max(result.requests, 1), contexts[arm]
    assert evidence is not None
    changed = sum({*order.order} != {*request.relevance} for request, order in own.requests)
    exchanged = evidence.exchanged
    if arm == "chance":  # the planner received what was drawn
        exchanged = sum(len({*order.order} - {*request.relevance}) for request, order in own.requests)
    same = sum(ours == theirs for ours, theirs in zip(own.sent(), contexts["default"].sent(), strict=True))
    row: dict[str, Any] = {
        "trace": result.trace,
        "cache": size(result.capacity_tokens),
        "arm": arm,
        "requests": result.requests,
        "k": result.k,
        "computed_per_request": round(result.net_prefilled_tokens / requests, 1),
        "change_percent": round(100 * (result.net_prefilled_tokens / default.net_prefilled_tokens - 1), 2),
        "over_relevance_percent": round(100 * result.prefill_change, 2),
        "exchanged_per_request": round(exchanged / requests, 3),
        "extra_per_request": round(evidence.extra / requests, 3),
        "twins_per_request": round(evidence.twins / requests, 3),
        "changed_percent": round(100 * changed / requests, 1),
        "same_percent": round(100 * same / requests, 1),
        "most_fed_percent": round(100 * evidence.most_fed_share, 2),
        "distinct": evidence.distinct,
    }
    if evidence.gold:
        row["gold"] = evidence.gold
        row["gold_percent"] = round(100 * (evidence.gold_share or 0.0), 2)
        row["gold_lost"], row["gold_won"] = evidence.gold_lost_requests, evidence.gold_won_requests
        if arm in ("choice", "choice, extra"):
            row["gold_chance_percent"] = round(100 * drawn_gold(own) / evidence.gold, 2)
    return row


def drawn_gold(chosen: Contexts) -> float:
    """Return how many passages of gold as many exchanges feed in the mean, if they are drawn by lot."""
    found = 0
    for seed in range(DRAWS):
        rng, before = random.Random(seed), set[int]()
        for request, order in chosen.requests:
            assert request.choice is not None
            exchanged = sum(left.reason == "exchanged" for left in order.left_out)
            scores = [block.score or 0.0 for block in request.blocks]
            known = [i for i, key in enumerate(request.keys) if key in before]
            fed = chance_swaps(scores, request.choice, exchanged, rng, order.entered - exchanged, known)
            before.update([request.keys[i] for i in fed])
            found += len({request.ids[i] for i in fed} & {*request.source.gold})
    return found / DRAWS


# -- tables ------------------------------------------------------------------------------------------------------------


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean over traces of each cache and arm, the worst trace, and the gold against relevance and chance."""
    default = {(row["trace"], row["cache"]): row for row in rows if row["arm"] == "default"}
    for cache, arm in dict.fromkeys((row["cache"], row["arm"]) for row in rows):
        own = [row for row in rows if (row["cache"], row["arm"]) == (cache, arm)]
        line: dict[str, Any] = {"cache": cache, "arm": arm, "traces": len(own)}
        for field in ("change_percent", "over_relevance_percent"):
            line[field] = round(statistics.fmean(row[field] for row in own), 2)
            line[f"worst_{field}"] = max(row[field] for row in own)
        gold = [row for row in own if "gold_percent" in row]
        drawn = [row for row in gold if "gold_chance_percent" in row]
        points = {
            "relevance": [row["gold_percent"] - default[row["trace"], cache]["gold_percent"] for row in gold],
            "chance": [row["gold_percent"] - row["gold_chance_percent"] for row in drawn],
        }
        for other, gains in points.items():
            if gains:
                line["gold_traces"] = len(gold)
                line[f"gold_over_{other}"] = round(statistics.fmean(gains), 2)
                line[f"least_gold_over_{other}"] = round(min(gains), 2)
        if gold and arm != "default":
            total = sum(row["gold"] for row in gold)
            points_of = [row["gold"] * gain for row, gain in zip(gold, points["relevance"], strict=True)]
            line["gold_pooled"] = round(sum(points_of) / total, 2)
            changed = {which: sum(row[f"gold_{which}"] for row in gold) for which in ("lost", "won")}
            line |= {f"gold_{which}_requests": count for which, count in changed.items()}
            line["gold_pooled_error"] = round(1.96 * 100 * math.sqrt(sum(changed.values())) / total, 2)
        yield line


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print each trace of one cache, and the means."""
    if not rows:
        return
    arms = list(dict.fromkeys(row["arm"] for row in rows if row["arm"] != "default"))
    print(f"\ncache {rows[0]['cache']}: change of computed tokens in % (gold, points over relevance)\n")
    gold = {row["trace"]: row.get("gold_percent") for row in rows if row["arm"] == "default"}
    lines: list[list[object]] = []
    for trace, share in gold.items():
        own = {row["arm"]: row for row in rows if row["trace"] == trace}

        def cell(row: Mapping[str, Any] | None, share: float | None = share) -> str:
            if row is None:
                return ""
            return f"{row['change_percent']:+.1f}" + ("" if share is None else f" ({row['gold_percent'] - share:+.2f})")

        lines.append([trace, own["default"]["k"], *(cell(own.get(arm)) for arm in arms)])
    summary = {line["arm"]: line for line in means(rows)}
    for title, change, points in (
        ("mean", "change_percent", "gold_over_relevance"),
        ("worst", "worst_change_percent", "least_gold_over_relevance"),
    ):
        cells = [f"{summary[arm][change]:+.1f} ({summary[arm].get(points, 0):+.2f})" for arm in arms]
        lines.append([title, "", *cells])
    print_table(["trace", "k", *arms], lines)


if __name__ == "__main__":
    main()
