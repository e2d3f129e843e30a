"""Hit ratios of the ordering policies, per trace and cache.

    python benchmarks/online_hit_ratio.py [TRACE_OR_FOLDER ...] [--check] [--variants as-recorded,shuffled,half,k=3]

Without an argument the traces are those that any clone can make, `generated_topics`, `generated_bursts`,
`generated_control`, `generated_conversations` and `standard_library` (real text: the documentation inside of Python's
own standard library, whose numbers depend on the version of Python); and those in the folder that the environment
variable WARMPREFIX_TRACES names, which `fetch_traces.py` can fill. Each is replayed in order of arrival through every
policy of warmprefix, and through the online path of the published `contextpilot` package where that is installed, each
with a prefix cache of its own; all are counted by the same cache model (docs/replay.md). `k` is the trace's own, 15
at most, unless `REPORTED_K` or `--k NAME=K` changes it.

Hit ratios are gross: nothing is written into the prompts. Net is the prefill saved against relevance order, in % of its
prefill, with labels and notes counted as prefilled unless the cache holds them. The default prices its note. The orders
of the others are charged twice: with the same short note, and with the published one (a label in front of each block,
and a sentence that lists all labels).

*bound*: the most that any order can find with any cache: the tokens that each request shares with
its best earlier partner. *margin*: the default policy minus the best other column, in points; `--check` ends with
status 1 if one is below -0.05. Variants: `shuffled` requests; `half` of them, drawn at random; the last 60 % of them,
`last=60`; fewer blocks, `k=3`.

A run of all policies with `contextpilot` installed, without `--limit`, `--k` or `--seed`, is written to `results/`,
each row with its environment. Rows of other traces stay there unchanged. The rows of README.md that come neither from a
clone nor from `fetch_traces.py` are of traces that are not published with this project, so a clone cannot reproduce
them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from common import percentile, print_table, size
from result_files import write_rows
from traces import from_a_clone, given_files, is_variant, reported_k, vary
from warmprefix.annotate import Templates
from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView
from warmprefix_baselines import POLICIES
from warmprefix_tools.replay.results import ReplayResult
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

CAPACITIES = (None, 500_000, 100_000)
DEFAULT = "coaccess"
PEER = "contextpilot"
TOLERANCE = 0.05
COLUMNS = {
    "hit_percent": "hit ratio in %, gross",
    "net_percent": "net prefill saved in %, with the short note",
    "net_published_percent": f"net prefill saved in %, with the published note, but {DEFAULT} with the short one",
}
"""Titles of the measured numbers, by their field in a row."""


def main() -> None:
    options = arguments()
    paths = given_files(options.traces)
    traces = [] if options.traces else [limited(trace, options.limit) for trace in from_a_clone()]
    traces += [read_trace(path, options.limit) for path in paths]
    requested_k = dict(options.k)
    policies = [*options.policies, *([PEER] if peer_is_there() else [])]
    rows: list[dict[str, object]] = []
    below: list[str] = []
    for variant in options.variants:
        for trace in traces:
            varied = vary(trace, variant, requested_k.get(trace.name, reported_k(trace)), options.seed)
            if varied is None:
                print(f"{trace.name}: no variant {variant}, it has no more blocks than that a request")
                continue
            row = measure(varied, policies, {"trace": trace.name, "variant": variant})
            rows.append(row)
            below += falls_short(row)
            print(f"{trace.name}, {variant}: done in {row['seconds']:.0f} s", file=sys.stderr)
    for field, title in COLUMNS.items():
        for capacity in CAPACITIES:
            print_rows(rows, policies, capacity, field, title)
    print_notes(rows, policies)
    whole = set(POLICIES) | {PEER} <= set(policies)
    if whole and options.limit is None and not options.k and options.seed == 0:
        write_rows("online_hit_ratio", rows, ("trace", "variant"))
    if options.check:
        print(
            "\n".join([f"\n{DEFAULT} is below another column:", *below])
            if below
            else f"\n{DEFAULT} is below no column."
        )
        sys.exit(1 if below else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--policies", type=names, default=list(POLICIES), help="with commas between them")
    parser.add_argument(
        "--variants", type=names, default=["as-recorded"], help="as-recorded, shuffled, half, last=PERCENT, k=N"
    )
    parser.add_argument("--k", type=name_and_number, action="append", default=[], metavar="NAME=K")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--seed", type=int, default=0, help="of shuffled and half")
    parser.add_argument("--check", action="store_true", help="status 1 if the default is not the best")
    options = parser.parse_args()
    for name in options.policies:
        if name not in POLICIES:
            parser.error(f"--policies takes {', '.join(POLICIES)}; got {name}")
    for variant in options.variants:
        if not is_variant(variant):
            parser.error(f"--variants takes as-recorded, shuffled, half, last=PERCENT and k=N; got {variant}")
    if options.check and DEFAULT not in options.policies:
        parser.error(f"--check needs {DEFAULT} among the policies")
    return options


def limited(trace: Trace, limit: int | None) -> Trace:
    return trace if limit is None else replace(trace, requests=trace.requests[:limit])


def names(text: str) -> list[str]:
    return text.split(",")


def name_and_number(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    return name, int(number)


def measure(workload: Workload, policies: Sequence[str], identity: dict[str, object]) -> dict[str, object]:
    """Return all hit ratios and net savings of one trace, in %."""
    started = time.perf_counter()
    free, noted = Replay(workload, annotate="none"), Replay(workload)
    published = Replay(workload, annotate="both", templates=Templates(most_named=None))
    peer = Peer(workload) if PEER in policies else None
    row: dict[str, object] = {**identity, "requests": len(workload.requests), "k": workload.k}
    numbers: dict[str, dict[str, dict[str, float]]] = {field: {} for field in COLUMNS}
    for policy in policies:
        for capacity in CAPACITIES:

            def run(replay: Replay, policy: str = policy, capacity: int | None = capacity) -> ReplayResult:
                if policy == PEER and peer is not None:
                    return replay.run(peer.again(), capacity, name=PEER)
                return replay.run(policy, capacity, name=policy)

            result, net = run(free), run(noted)
            measured = {
                "hit_percent": result.hit_ratio,
                "net_percent": 0 - net.prefill_change,
                "net_published_percent": 0 - (net if policy == DEFAULT else run(published)).prefill_change,
            }
            for field, share in measured.items():
                numbers[field].setdefault(policy, {})[size(capacity)] = round(100 * share, 2)
            if policy == DEFAULT and capacity is None:
                row["plan_us_p50"], row["plan_us_p99"] = round(net.plan_us_p50, 1), round(net.plan_us_p99, 1)
    row |= numbers
    if peer is not None:
        row |= peer.report()
    row["bound_percent"] = round(100 * bound(workload), 2)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def bound(workload: Workload) -> float:
    """Return the share of tokens that no order can exceed, as each hit is shared with one earlier request."""
    holders: dict[int, list[int]] = {}
    most = total = 0
    for number, request in enumerate(workload.requests):
        shared: Counter[int] = Counter()
        for key, tokens in zip(request.keys, request.tokens, strict=True):
            earlier = holders.setdefault(key, [])
            for other in earlier:
                shared[other] += tokens
            earlier.append(number)
        most += max(shared.values(), default=0)
        total += request.context_tokens
    return most / max(total, 1)


def margin(row: dict[str, object], capacity: int | None, field: str = "hit_percent") -> float | None:
    """Return the default's points above the best of the others; None where it was not run."""
    ratios = row[field]
    assert isinstance(ratios, dict)
    others = [ratio[size(capacity)] for policy, ratio in ratios.items() if policy != DEFAULT]
    return ratios[DEFAULT][size(capacity)] - max(others) if DEFAULT in ratios and others else None


def falls_short(row: dict[str, object]) -> list[str]:
    found: list[str] = []
    for capacity in CAPACITIES:
        points = margin(row, capacity)
        if points is not None and points < -TOLERANCE:
            found.append(f"  {row['trace']}, {row['variant']}, {size(capacity)}: {points:+.2f}")
    return found


def print_rows(
    rows: Sequence[dict[str, object]], policies: Sequence[str], capacity: int | None, field: str, title: str
) -> None:
    print(f"\n{title}, cache {'without bound' if capacity is None else f'of {capacity:,} tokens'}\n")
    header = ["trace (requests, k)", *policies, "bound", "margin"]
    lines: list[list[object]] = []
    for row in rows:
        ratios = row[field]
        assert isinstance(ratios, dict)
        name = f"{row['trace']} ({row['requests']}, {row['k']})"
        if row["variant"] != "as-recorded":
            name += f" {row['variant']}"
        points = margin(row, capacity, field)
        shown = "" if points is None else f"{points:+.1f}{' <' if points < -TOLERANCE else '  '}"
        lines.append(
            [name, *(f"{ratios[policy][size(capacity)]:.1f}" for policy in policies), row["bound_percent"], shown]
        )
    print_table(header, lines)


def print_notes(rows: Sequence[dict[str, object]], policies: Sequence[str]) -> None:
    print(f"\nmargin: {DEFAULT} less the best other column, in points; '<' marks where it is below.")
    if PEER not in policies:
        print(f"{PEER} is not installed, so its column is missing.")
    for row in rows:
        if row.get("peer_failed"):
            print(
                f"{PEER} raised in {row['peer_failed']} of {row['requests']} requests of {row['trace']},"
                f" {row['variant']}, from number {row['peer_failed_first']} on; those count in relevance order."
            )


# -- contextpilot ------------------------------------------------------------------------------------------------------


def peer_is_there() -> bool:
    return find_spec(PEER) is not None


class Peer:
    """The orders of ContextPilot's online path, with one instance per trace.

    It takes no cache size, so its orders are worked out once. A request in which it raises counts in relevance order.
    """

    def __init__(self, workload: Workload) -> None:
        import contextpilot  # type: ignore[import-not-found]

        self._orders: list[tuple[int, ...]] = []
        self._failed: list[int] = []
        self._times: list[float] = []
        with contextlib.redirect_stdout(io.StringIO()):
            pilot = contextpilot.ContextPilot(use_gpu=False)
            for number, request in enumerate(workload.requests):
                if not request.keys:
                    self._orders.append(())
                    continue
                started = time.perf_counter()
                try:
                    (context,), _ = pilot.reorder(list(request.keys), conversation_id=str(number))
                    order = tuple(request.keys.index(key) for key in context)
                    if sorted(order) != list(request.relevance):
                        raise ValueError("contextpilot returned other blocks")
                except Exception:
                    self._failed.append(number)
                    order = request.relevance
                self._times.append(time.perf_counter() - started)
                self._orders.append(order)

    def again(self) -> Callable[[], OrderingPolicy]:
        """Return a policy that repeats the orders for the whole trace, whatever the scopes of its requests."""
        repeated = Repeated(self._orders)
        return lambda: repeated

    def report(self) -> dict[str, object]:
        return {
            "peer_us_p50": round(1e6 * percentile(self._times, 50), 1),
            "peer_failed": len(self._failed),
            "peer_failed_first": self._failed[0] if self._failed else None,
        }


class Repeated:
    """A policy of orders that were computed before, one per request."""

    def __init__(self, orders: Sequence[tuple[int, ...]]) -> None:
        self._orders = iter(orders)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return next(self._orders)

    def observe(self, served: Sequence[BlockView]) -> None:
        """Do nothing: the orders are there already."""


if __name__ == "__main__":
    main()
