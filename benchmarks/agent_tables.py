"""The tables of docs/agents.md, made of what `agent_routing.py` measured.

python benchmarks/agent_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

__all__ = ["PAGE", "tables", "write_page"]

PAGE = Path(__file__).parent.parent / "docs/agents.md"
OURS = "AgentRouter"
Row = Mapping[str, Any]


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Each as Markdown, by the name that its place in the page has."""
    rows: Sequence[Row] = results["simulated"]
    return {
        "sessions": _table(
            ("workload (recurs)", "agents", *_SESSIONS, "times sooner (seeds)"),
            _sessions(rows),
        ),
        "settings": _table(("workload", *_SETTINGS.values()), _settings(rows)),
        "hot": _table(
            ("workload", "agents", "hash", "affinity alone", "AgentRouter", "spilled", "max / mean, same order"),
            _hot(rows),
        ),
        "together": _table(
            ("workload", "agents", "in turn", "in turn, one prompt", "AgentRouter, one prompt"), _together(rows)
        ),
        "killed": _table(
            ("workload", "documents read", "read again", *(f"stayed, {way}" for way in _WAYS)),
            _killed(rows),
        ),
        "http": _table(("", "agents", "prompts", "reported hits", "simulated", "one killed"), _http(results["http"])),
    }


def write_page(results: Mapping[str, Any]) -> None:
    """Put the tables where the page has its marks."""
    page = PAGE.read_text()
    for name, table in tables(results).items():
        before, opened, rest = page.partition(f"<!-- {name} -->\n")
        _, closed, after = rest.partition("<!-- end -->")
        if opened and closed:
            page = f"{before}{opened}\n{table}\n\n{closed}{after}"
    PAGE.write_text(page)


def _table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    cells = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([cells[0], "|---" * len(header) + "|", *cells[1:]])


def _of(rows: Sequence[Row], setting: str) -> list[Row]:
    return [row for row in rows if row["setting"] == setting]


_WAYS = ("round robin", "hash", OURS)
_SESSIONS = [f"{what}, {way}" for what in ("computed", "read, ms") for way in _WAYS]


def _sessions(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _of(rows, "sessions"):
        arms = row["arms"]
        shares = [f"{arms[way]['documents_computed_percent']:.0f} %" for way in _WAYS]
        times = [f"{arms[way]['read_mean_ms']:.0f}" for way in _WAYS]
        low, high = arms[OURS]["read_ratio_range"]
        ratio = f"**{arms[OURS]['read_ratio']:.2f}** ({low:.2f} to {high:.2f})"
        name = f"{row['workload']} ({row['recurring_percent']:.0f} %)"
        yield [name, str(row["agents"]), *shares, *times, ratio]


_SETTINGS = {
    "tight": "caches of 32,000 tokens",
    "turns": "conversations",
    "backlog": "8 requests at once, all along",
    "light": "2 ms per prompt",
}


def _settings(rows: Sequence[Row]) -> Iterator[list[str]]:
    """With 15 agents: how many times fewer tokens of documents, and how many times sooner read and answered."""
    ratios = {
        (row["setting"], row["workload"]): row["arms"][OURS]
        for setting in _SETTINGS
        for row in _of(rows, setting)
        if row["agents"] == 15
    }
    keys = ("documents_ratio", "read_ratio", "makespan_ratio")
    for workload in dict.fromkeys(workload for _, workload in ratios):
        found = [ratios[setting, workload] for setting in _SETTINGS]
        yield [workload, *(" / ".join(f"{arm[key]:.2f}" for key in keys) for arm in found)]


def _hot(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _of(rows, "hot"):
        arms = [row["arms"][way] for way in ("hash", "affinity without a bound", OURS)]
        less = [f"{arm['documents_ratio']:.2f}" for arm in arms]
        spilled = f"{100 * arms[2]['spilled'] / row['documents']:.1f} %"
        worst = [f"{arm['worst_max_over_mean']:.2f}" for arm in arms]
        name = row["workload"].removesuffix(", one hot document")
        yield [name, str(row["agents"]), *less, spilled, f"{worst[0]}, {worst[1]}, **{worst[2]}**"]


def _together(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _of(rows, "together"):
        base = row["arms"]["round robin"]
        arms = [base, *(row["arms"][f"{way}, one prompt an agent"] for way in ("round robin", OURS))]
        cells = [f"{arm['documents_computed_percent']:.0f} %, {arm['read_mean_ms']:.0f} ms" for arm in arms]
        yield [row["workload"], str(row["agents"]), *cells]


def _killed(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in _of(rows, "killed"):
        arms = [row["arms"][way] for way in _WAYS]
        answered, lost = min(arm["answered"] for arm in arms), max(arm["lost_prompts"] for arm in arms)
        stayed = [f"{arm['stayed_percent']:.1f} %" for arm in arms]
        yield [row["workload"], f"{answered:,} of {row['documents']:,}", f"{lost} at most", *stayed]


def _http(rows: Sequence[Row]) -> Iterator[list[str]]:
    for way in ("round robin", OURS, "ChainOfAgents"):
        whole, killed = (
            next(row for row in rows if row["arm"] == way and row["killed"] is dead) for dead in (False, True)
        )
        yield [
            way,
            str(whole["agents"]),
            f"{whole['answered']:,}",
            f"{whole['hit_percent']:.2f} %",
            f"{whole['simulated_hit_percent']:.2f} %" if "simulated_hit_percent" in whole else "",
            f"{killed['answered']:,} of {killed['documents']:,} answered, {killed['hit_percent']:.2f} %",
        ]


if __name__ == "__main__":
    write_page(json.loads((RESULTS / "agent_routing.json").read_text())["results"])
