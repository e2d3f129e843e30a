"""The tables of docs/engine.md and the README, created from the results of `engine_ttft.py`.

python benchmarks/engine_tables.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from common import RESULTS

__all__ = ["overview", "tables"]

Row = Mapping[str, Any]

NAMES = {
    "relevance": "relevance order",
    "frequency": "CRAFT",
    "greedy": "CacheWeaver",
    "context-index": "ContextPilot",
    "coaccess": "**warmprefix**",
    "merge": "**warmprefix**, as a batch",
}
PUBLISHED = ("frequency", "greedy", "context-index")
TEXTS = {"stdlib": "standard library", "lihua": "lihua", "xquad": "xquad_squad"}
MODES = {
    "online": "Online",
    "batch": "Batch",
    "turns": "Follow-ups in conversations",
    "control": "Control, nothing in common",
}
HEADER = "| | mean TTFT | ratio (95 %) | p50, ratio (95 %) | hit, predicted % | prefill saved, predicted % |"


def overview(rows: Sequence[Row]) -> str:
    """Return our gain in each run next to that of the best published order, as Markdown."""
    lines = ["| | median TTFT | median, ratio | mean, ratio | best published: median, mean |", "|---|---|---|---|---|"]
    for arms in runs(rows):
        by_name = {row["arm"]: row for row in arms}
        ours = by_name["merge" if "merge" in by_name else "coaccess"]
        published = [by_name[name] for name in PUBLISHED if name in by_name]
        best = max(published, key=lambda row: float(row["ratio_mean"]), default=None)
        cells = [
            title(ours).removesuffix("."),
            f"{by_name['relevance']['ttft_p50_ms']:.0f} → {ours['ttft_p50_ms']:.0f} ms",
            f"**{ours['ratio_p50']:.2f}**",
            f"**{ours['ratio_mean']:.2f}**",
            "-" if best is None else f"{best['ratio_p50']:.2f}, {best['ratio_mean']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one table per run, as Markdown: a title and a line per arm."""
    for arms in runs(rows):
        yield "\n".join([title(arms[0]), "", HEADER, "|---|---|---|---|---|---|", *map(line, arms)])


def runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Group the rows by run."""

    def run(row: Row) -> tuple[object, ...]:
        return (
            [*MODES].index(row["mode"]),
            [*TEXTS].index(row["text"]),
            row["concurrency"],
            row["kv_tokens"] or 10**12,
            row["requests"],
            row["k"],
        )

    def arm(row: Row) -> int:
        return [*NAMES].index(row["arm"])

    for _, arms in groupby(sorted(rows, key=run), key=run):
        yield [over_seeds(list(measured)) for _, measured in groupby(sorted(arms, key=arm), key=arm)]


def over_seeds(rows: Sequence[Row]) -> Row:
    """Return the means of an arm's runs; intervals then span its lowest and its highest run."""
    if len(rows) == 1:
        return rows[0]
    means = {
        name: statistics.fmean([row[name] for row in rows])
        for name, value in rows[0].items()
        if isinstance(value, float)
    }
    spans = {
        f"{name}_95": (min(row[name] for row in rows), max(row[name] for row in rows))
        for name in ("ratio_mean", "ratio_p50")
    }
    return {**rows[0], **means, **spans, "seeds": len(rows)}


def title(row: Row) -> str:
    cache = "" if row["kv_tokens"] is None else f", a cache of {row['kv_tokens']:,} tokens"
    at_once = "one at a time" if row["concurrency"] == 1 else f"{row['concurrency']} at a time"
    what = f"{MODES[row['mode']]}, {TEXTS[row['text']]}"
    seeds = f", {row['seeds']} seeds" if "seeds" in row else ""
    return f"{what}: {row['requests']} requests of {row['k']} blocks, {at_once}{cache}{seeds}."


def line(row: Row) -> str:
    ratios = [
        "{:.2f} ({:.2f} to {:.2f})".format(row[f"ratio_{name}"], *row[f"ratio_{name}_95"]) for name in ("mean", "p50")
    ]
    return (
        f"| {NAMES[row['arm']]} | {row['ttft_mean_ms']:.0f} ms | {' | '.join(ratios)}"
        f" | {row['hit_percent']:.1f}, {row['predicted_hit_percent']:.1f}"
        f" | {row['saved_percent']:.1f}, {row['predicted_saved_percent']:.1f} |"
    )


if __name__ == "__main__":
    measured = json.loads((RESULTS / "engine_ttft.json").read_text())["results"]
    print(overview(measured), *tables(measured), sep="\n\n")
