"""Prefill saved once labels and notes are paid for, and what looking at the queue adds.

    python benchmarks/net_gain.py [TRACE_OR_FOLDER ...] [--caches 30000,100000,500000,unbounded] [--tokenizers NAMES]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, those that any clone can make. `k` is the trace's own, 15 at most, unless `REPORTED_K` has otherwise.
Each arm is a `ContextPlanner` with its own settings, whose mirror has the size of the cache. *hit*: the share of
context tokens found in the cache. *net*: the share of the prefill of the application without warmprefix (relevance
order, no labels, no notes) that is spared, less all labels and notes.

- *published*: labels, and a note with all of them, whatever it costs: the wording of ContextPilot.
- *published, priced*: the same wording where it pays.
- *short, not priced*: a note that quotes the most relevant block.
- *default*: the same where it pays.
- *no note*: only the order changes.
- *8 waiting*: with the next 8 requests announced, in their order of arrival.

Notes are counted by the planner's estimate (`estimate`); of two arms, also by the tokenizers among those that
token_estimates.py finds installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import print_table, size
from result_files import measured_all, write_results, write_rows
from token_estimates import installed_counters
from traces import from_a_clone, given_files, reported_k
from warmprefix.annotate import Annotate, Templates
from warmprefix.ordering import BlockView, CoAccessPolicy, OrderingPolicy, PrefixView
from warmprefix.tokens import TokenCounter, estimated_tokens
from warmprefix_tools.replay.replay_options import parse_capacities
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace

COUNTED_WITH = ("cl100k", "Qwen")
"""Tokenizers of the tables, besides the estimate: digits in groups of three, and one by one."""
PUBLISHED = Templates(most_named=None)
KIND = ("trace", "cache", "arm", "tokenizer")


class NotPriced(CoAccessPolicy):
    """The default policy, to which notes are free."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return super().order(blocks, replace(prefix, note_tokens=lambda order: 0))


@dataclass(frozen=True)
class Arm:
    """Settings of a planner."""

    annotate: Annotate = "auto"
    policy: Callable[[], OrderingPolicy] = CoAccessPolicy
    templates: Templates = field(default_factory=Templates)
    waiting: int = 0


ARMS = {
    "published": Arm("both", NotPriced, PUBLISHED),
    "published, priced": Arm("both", templates=PUBLISHED),
    "short, not priced": Arm(policy=NotPriced),
    "default": Arm(),
    "default, 8 waiting": Arm(waiting=8),
    "no note": Arm("none"),
    "no note, 8 waiting": Arm("none", waiting=8),
}
COUNTED = ("published", "default")
"""Arms whose notes are counted with other tokenizers than the estimate too."""
COMPARED = (("published", "cl100k"), ("default", "cl100k"), ("default, 8 waiting", "estimate"))
"""Arms and tokenizers whose rows are kept by trace; of the others, the means are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE_OR_FOLDER", type=Path)
    parser.add_argument("--caches", default="30000,100000,500000,unbounded")
    parser.add_argument("--tokenizers", default=f"estimate,{','.join(COUNTED_WITH)}")
    options = parser.parse_args()
    found = {"estimate": estimated_tokens, **installed_counters()}
    names = options.tokenizers.split(",")
    if missing := [name for name in names if name not in found]:
        print(f"not installed, so not counted with: {', '.join(missing)}", file=sys.stderr)
    counters: dict[str, TokenCounter] = {name: found[name] for name in names if name in found}
    paths = given_files(options.traces)
    traces = [read_trace(path, None) for path in paths] if paths else list(from_a_clone())
    capacities = parse_capacities(options.caches)
    rows: list[dict[str, Any]] = []
    for trace in traces:
        workload = Workload(trace, reported_k(trace))
        for name, counter in counters.items():
            rows += measured(workload, name, counter, capacities)
        print(f"{trace.name}: done", file=sys.stderr)
    for name in counters:
        for capacity in capacities:
            report([row for row in rows if (row["tokenizer"], row["cache"]) == (name, size(capacity))])
    write_rows("net_gain", [row for row in rows if (row["arm"], row["tokenizer"]) in COMPARED], KIND)
    if paths and measured_all("net_gain", "trace", rows):
        write_results("net_gain_means", [*means(rows)])


def measured(
    workload: Workload, name: str, counter: TokenCounter, capacities: Sequence[int | None]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for label, arm in ARMS.items():
        if name != "estimate" and label not in COUNTED:
            continue
        replay = Replay(
            workload, annotate=arm.annotate, templates=arm.templates, tokenizer=counter, waiting=arm.waiting
        )
        for capacity in capacities:
            result = replay.run(arm.policy, capacity, name=label)
            rows.append(
                {
                    "trace": workload.name,
                    "cache": size(capacity),
                    "arm": label,
                    "tokenizer": name,
                    "hit_percent": round(100 * result.hit_ratio, 2),
                    "net_percent": round(-100 * result.prefill_change, 2),
                }
            )
    return rows


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean over traces of each arm, tokenizer and cache, and the worst trace's net."""
    names = ("arm", "tokenizer", "cache")
    for kind in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in names) == kind]
        yield {
            **dict(zip(names, kind, strict=True)),
            "traces": len(own),
            "hit_percent": round(statistics.fmean(row["hit_percent"] for row in own), 2),
            "net_percent": round(statistics.fmean(row["net_percent"] for row in own), 2),
            "worst_net_percent": min(row["net_percent"] for row in own),
        }


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print each arm of one cache and tokenizer, over all traces."""
    if not rows:
        return
    print(f"\ncache {rows[0]['cache']}, notes counted with {rows[0]['tokenizer']}\n")
    lines: list[list[object]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        net = [row["net_percent"] for row in own]
        worst = min(own, key=lambda row: row["net_percent"])
        hits = statistics.fmean(row["hit_percent"] for row in own)
        lines.append([arm, f"{hits:.2f}", f"{statistics.fmean(net):+.2f}", f"{min(net):+.2f}", worst["trace"]])
    print_table(["arm", "hit %", "net %", "worst", "on"], lines)


if __name__ == "__main__":
    main()
