"""Does the record know what the history holds? Conversations of each plugin, on a real Redis, by two workers.

`counts`: two processes serve the turns of long conversations alternately. The engine counts the prompt tokens that it
has to compute, with the history shown to the planner, with the record alone, and without warmprefix.

`turns`: random turns with faults of Redis; `recorded_prompts` reads what the engine received, and finds references that
point to nothing, and passages that are missing.

    python benchmarks/recorded_conversations.py counts
    python benchmarks/recorded_conversations.py turns --turns 100000
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from common import print_table
from recorded import APPLICATIONS, application_named, is_installed
from recorded_counts import count_tokens
from recorded_traces import read_talks
from recorded_turns import RecordedWorld
from result_files import read_rows, write_rows
from store_faults import RedisLaboratory

PERIOD = 150
"""Turns between two faults."""
MOST_TO_SHOWN = 1.02
"""Most computed tokens with the record, to those with the history shown."""
RECORDS: Mapping[str, Any] = {"ttl": 1_800.0, "max_blocks": 24, "budget": 0.05}
"""Bounds of the records: less time than a jump of the server's clock, and fewer blocks than long conversations have. A
call of Redis may take a little longer than by default, because on a busy machine few references would be made."""


def run(
    name: str, turns: int, seed: int, faults: str, *, period: int = PERIOD, progress: bool = False
) -> dict[str, Any]:
    """Run random turns of an application; return what was found."""
    began = time.perf_counter()
    failing = faults != "none"
    asymmetric: dict[str, Any] = {"lossy": failing, "asymmetric": failing}
    with RedisLaboratory(seed, faults, **asymmetric, **RECORDS) as laboratory:
        world = RecordedWorld(laboratory, application_named(name), seed)
        next_fault, faulty_until, next_line = period, None, turns // 10
        shown = 0
        try:
            while world.turns < turns:
                world.step()
                if faulty_until is not None and time.monotonic() >= faulty_until:
                    laboratory.end_fault()
                    faulty_until, next_fault = None, world.turns + period
                elif failing and faulty_until is None and world.turns >= next_fault:
                    faulty_until = time.monotonic() + laboratory.begin_fault()
                for example in world.findings.examples[shown:]:
                    print(f"seed {seed}: {example}", flush=True)
                shown = len(world.findings.examples)
                if progress and world.turns >= next_line:
                    next_line += turns // 10
                    rate = world.turns / (time.perf_counter() - began)
                    found = world.findings
                    counts = f"{found.references:,} references, {found.wrong} wrong"
                    print(f"  {world.turns:7,} turns, {rate:5,.0f}/s, {counts}", flush=True)
        finally:
            laboratory.repair()
            world.close()
    found = world.findings
    return {
        "application": name,
        "seeds": [seed],
        "turns": found.turns,
        "prompts": found.prompts,
        "passages": found.passages,
        "references": found.references,
        "checked_references": found.checked,
        "dangling": found.dangling,
        "lost": found.lost,
        "ambiguous": found.ambiguous,
        "crossed": found.crossed,
        "operations": dict(sorted(world.operations.items())),
        "faults": dict(sorted(laboratory.faults.items())),
        "store_errors": world.errors,
        "seconds": round(time.perf_counter() - began),
    }


def chosen(names: Sequence[str]) -> list[str]:
    """Return the applications with these names, or all; without those whose framework is not installed."""
    known = list(names or APPLICATIONS)
    installed = [name for name in known if is_installed(name)]
    for name in sorted(set(known) - set(installed)):
        print(f"{name}: its framework is not installed, so its rows stay as they are")
    return installed


def random_turns(options: argparse.Namespace) -> int:
    rows = []
    for name in chosen(options.applications):
        print(f"{name}, seed {options.seed}:", flush=True)
        rows.append(run(name, options.turns, options.seed, options.faults, progress=True))
    keys = ("turns", "references", "dangling", "lost", "ambiguous", "crossed", "store_errors", "seconds")
    table = [[row["application"], *(row[key] for key in keys), sum(row["faults"].values())] for row in rows]
    print_table(["application", *keys, "faults"], table)
    if options.write:
        write_rows("recorded_conversations_turns", list(map(added, rows)), ("application",))
    return 1 if any(row[key] for row in rows for key in ("dangling", "lost", "ambiguous", "crossed")) else 0


def added(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the sums of this run and of those before it, which had other seeds."""
    before = [old for old in read_rows("recorded_conversations_turns") if old["application"] == row["application"]]
    if not before or row["seeds"][0] in before[0]["seeds"]:
        return row
    total: dict[str, Any] = {}
    for key, value in row.items():
        old = before[0].get(key)
        if isinstance(value, Mapping):
            total[key] = dict(sorted((Counter(value) + Counter(old or {})).items()))
        else:
            total[key] = value if key == "application" or old is None else old + value
    return total


def counts(options: argparse.Namespace) -> int:
    rows = []
    for name in chosen(options.applications):
        for trace, talks in read_talks().items():
            row: dict[str, Any] = {"trace": trace, **count_tokens(name, talks)}
            rows.append(row)
            row |= {
                f"record_to_{arm}{net}": round(row["record"][kind] / row[arm][kind], 4)
                for arm in ("shown", "without")
                for net, kind in (("", "computed"), ("_net_of_labels", "net_of_labels"))
                if arm in row
            }
            print(f"  {name}, {trace}: {row['record_to_without']}", flush=True)
    ratios = ("record_to_shown", "record_to_shown_net_of_labels", "record_to_without", "record_references", "wrong")
    table = [
        [row["application"], row["trace"], row["turns"]]
        + [row.get(arm, {}).get("computed", "") for arm in ("shown", "record", "without")]
        + [row.get(ratio, "") for ratio in ratios]
        for row in rows
    ]
    print_table(["application", "trace", "turns", "shown", "record", "without", *ratios], table)
    if options.write:
        write_rows("recorded_conversations_counts", rows, ("application", "trace"))
    return 1 if any(row["wrong"] or row.get("record_to_shown_net_of_labels", 1) > MOST_TO_SHOWN for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["counts", "turns"])
    parser.add_argument("applications", nargs="*", help=f"all by default: {', '.join(APPLICATIONS)}")
    parser.add_argument("--turns", type=int, default=5_000, help="random turns per application")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="all", help="none, all, or a part of a name, such as 'killed'")
    parser.add_argument("--write", action="store_true", help="write the result file, or add to its sums")
    options = parser.parse_args()
    logging.getLogger("warmprefix").setLevel(logging.ERROR)  # stores fail on purpose here
    return counts(options) if options.part == "counts" else random_turns(options)


if __name__ == "__main__":
    sys.exit(main())
