"""Printed tables, on consoles of any width."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from warmprefix_tools.replay.results import Estimates, Misses, ReplayResult
from warmprefix_tools.replay.text_report import print_results

RESULT = ReplayResult(
    trace="t",
    policy="context-index",
    capacity_tokens=1_000_000_000,
    k=15,
    placement="tail",
    requests=1_000,
    saved_tokens=40_123_456,
    total_tokens=100_000_000,
    gained_requests=623,
    reordered_requests=150,
    reference_tokens=1_234_567,
    misses=Misses(new=59_876_544),
    over_time=(),
    plan_us_p50=51.0,
    plan_us_p99=10_234.0,
    today_saved_tokens=10_000_000,
    today_total_tokens=100_000_000,
    lost_requests=17,
    note_tokens=2_345_678,
    saved_note_tokens=345_678,
)
TODAY = replace(
    RESULT, policy="relevance", reference_tokens=0, saved_tokens=10_000_000, note_tokens=0, saved_note_tokens=0
)
ESTIMATES = Estimates(prefill_rate=8_000, price=3, cached_price=0.3)
NUMBERS = [
    "40.1%", "1,234,567", "+31.2%", "+28,123,456", "62%", "2%", "51", "10,234", "7,734.6",
    "197.77",
]  # fmt: skip


def printed(width: int, results: list[ReplayResult], estimates: Estimates = ESTIMATES) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_results(results, estimates, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_number_is_cut(width: int) -> None:
    lines = printed(width, [TODAY, RESULT])
    cells = [cell for line in lines if line.startswith("  context-index") for cell in line.split()[1:]]
    assert cells == NUMBERS
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (200, 1)])
def test_narrow_console_prints_times_in_a_second_table(width: int, tables: int) -> None:
    lines = printed(width, [TODAY, RESULT])
    assert sum(line.startswith("cache ") for line in lines) == tables
    assert sum("1,000,000,000 tokens" in line for line in lines) == tables + 1  # and in a sentence
    assert max(map(len, lines)) <= width
