"""The tables of README.md and docs/ are those of the files in benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from result_tables import MARKED, PAGES, with_tables
from result_tables import tables as result_tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS_PAGE = ROOT / "docs/results.md"


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_marked_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_every_table_stands_on_one_page() -> None:
    shown = [mark[2] for page in PAGES for mark in MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(result_tables())


def test_the_hit_ratios_are_those_of_the_benchmark() -> None:
    policies = ("relevance", "contextpilot", "frequency", "greedy", "oracle", "coaccess")
    expected = [
        [
            f"{row['trace']} ({row['requests']:,}, {row['k']})",
            *(f"{hit['unbounded']:.1f} / {hit['100000']:.1f}" for hit in map(row["hit_percent"].get, policies)),
        ]
        for row in results("online_hit_ratio")
    ]
    rows = re.findall(r"^\| (\S+ \([\d,]+, \d+\)) \| (.*) \|$", RESULTS_PAGE.read_text(), re.MULTILINE)
    shown = [[name, *cells.replace("*", "").split(" | ")] for name, cells in rows]
    assert sorted(shown) == sorted(expected)


def test_the_failures_of_the_peer_are_those_counted() -> None:
    failed = {row["trace"]: row["peer_failed"] for row in results("online_hit_ratio") if row["peer_failed"]}
    page = " ".join(RESULTS_PAGE.read_text().split())
    for trace, requests in failed.items():
        assert re.search(
            rf"{requests:,} (?:requests )?of {trace.removesuffix('_records_bm25_k20').removesuffix('_rag')}", page
        )
    assert len(failed) == 3


def test_the_readmes_net_saving_is_that_of_the_benchmark() -> None:
    def shown(arm: str) -> tuple[str, str]:
        kind = ("100000", arm, "cl100k")
        found = [r["net_percent"] for r in rows if (r["cache"], r["arm"], r["tokenizer"]) == kind]
        return f"{fmean(found):.1f} %", f"{-min(found):.2f}"

    rows = results("net_gain")
    (saved, lost), (published, published_lost) = shown("default"), shown("published")
    readme = " ".join(README.read_text().split())
    assert f"on {len({row['trace'] for row in rows})} traces" in readme
    assert f"saves {saved} of the prefill, and loses {lost} % on the worst trace" in readme
    assert f"saves {published} and loses up to {float(published_lost):.1f} %" in readme


def test_the_readmes_times_on_a_real_engine_are_those_measured() -> None:
    rows = results("engine_ttft")

    def ratios(mode: str) -> list[float]:
        ours = "merge" if mode == "batch" else "coaccess"
        return [row["ratio_mean"] for row in rows if (row["mode"], row["arm"], row["concurrency"]) == (mode, ours, 1)]

    readme = " ".join(README.read_text().split())
    for mode, wording in (
        ("online", "is {:.2f} to {:.2f} times shorter for requests that come one by one"),
        ("batch", "{:.2f} to {:.2f} times shorter for batches"),
        ("turns", "{:.2f} times for follow-up questions"),
    ):
        assert wording.format(*sorted({min(ratios(mode)), max(ratios(mode))})) in readme
    assert [round(ratio, 2) for ratio in ratios("control")] == [1.0]


def test_the_hit_ratios_of_batches_are_those_of_the_benchmark() -> None:
    measured = results("batch_quality")
    planners = ("as it comes", "frequency", "top-down", "contextpilot", "merge")
    expected = [
        [
            f"{row['trace'].partition(', ')[0]} ({row['requests']:,}, {row['k']})",
            *(f"{hit['unbounded']:.1f} / {hit['30000']:.1f}" for hit in map(row["hit_percent"].get, planners)),
            f"{row['bound_percent']:.1f}",
            *(f"{row['seconds'][planner]:.1f}" for planner in ("contextpilot", "merge")),
        ]
        for row in measured["traces"]
    ]
    page = (ROOT / "docs/batch.md").read_text()
    rows = re.findall(r"^\| (\S+ \([\d,]+, \d+\)) \| (.*) \|$", page, re.MULTILINE)
    assert [[name, *cells.replace("*", "").split(" | ")] for name, cells in rows] == expected
    small = measured["small_batches"]
    exact = {planner: found["exact"] for planner, found in small["share_of_optimum"].items()}
    assert (
        f"{small['batches']} random batches of up to 7 requests were solved exactly. "
        f"In {small['with_something_to_save']} of them a plan can save tokens. `merge` finds the best plan of "
        f"{exact['merge']}, top-down of {exact['top-down']}, and ContextPilot of {exact['contextpilot']}."
    ) in " ".join(page.split())


def test_the_times_of_batches_are_those_of_the_benchmark() -> None:
    measured = results("batch_scale")["merge"]
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| (\d+) MB \|$",
        (ROOT / "docs/batch.md").read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["2,000", "10,000", "100,000", "200,000"]
    for requests, *seconds, peak in rows:
        runs = {run["generator"]: run for run in measured if f"{run['requests']:,}" == requests}
        assert seconds == [f"{runs[name]['first_seconds']:.1f}" for name in ("clustered", "topics", "zipf")]
        assert peak == f"{max(run['peak_megabytes'] for run in runs.values()):.0f}"


def test_the_gain_of_windows_is_that_of_the_benchmark() -> None:
    measured = results("window_quality")
    gains: dict[tuple[str, int], list[float]] = {}
    alone: dict[str, list[float]] = {}
    for row in measured:
        alone.setdefault(row["cache"], []).append(row["one_by_one_percent"])
        for size, percent in row["window_percent"].items():
            gains.setdefault((row["cache"], int(size)), []).append(percent - row["one_by_one_percent"])
    page = (ROOT / "docs/batch.md").read_text()
    sizes = sorted({size for _, size in gains})
    assert f"| cache | one by one | {' | '.join(map(str, sizes))} |\n" in page
    for cache, name in (("30000", "30k"), ("100000", "100k"), ("unbounded", "unbounded")):
        cells = [f"{fmean(alone[cache]):.1f}", *(f"{fmean(gains[cache, size]):+.1f}" for size in sizes)]
        assert f"| {name} | {' | '.join(cells)} |\n" in page
    text = " ".join(page.split())
    every = [gain for found in gains.values() for gain in found]
    assert f"Means of {len(alone['unbounded'])} traces." in text
    assert f"The worst of all {len(every)} differences is {min(every):.2f} points" in text


def test_the_costs_of_shards_are_those_of_the_benchmark() -> None:
    ways = ("shards", "first block, planned", "round robin, planned", "round robin of the plan")
    rows = {(row["trace"], row["replicas"], row["way"]): row for row in results("batch_shards")}
    page = (ROOT / "docs/batch.md").read_text().replace("*", "")
    found = re.findall(r"^\| (\w+), (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(found) == 6
    for trace, replicas, cells in found:
        expected = [
            next(row for key, row in rows.items() if key[0].startswith(trace) and key[1:] == (int(replicas), way))
            for way in ways
        ]
        assert cells.split(" | ") == [f"{row['computed']:.3f} / {row['greatest']:.2f}" for row in expected]


def test_the_savings_of_plugins_are_those_of_the_benchmark() -> None:
    expected = []
    for row in results("plugin_hit_ratio"):
        without, plugin = row["without"], row["with"]
        saved = 1 - plugin["prefilled_tokens"] / without["prefilled_tokens"]
        if row["text"] == "standard library":
            expected.append([f"{without['hit_percent']} → {plugin['hit_percent']}", f"{saved:.0%}"])
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+ → [\d.]+) \| (\d+%) \|$", RESULTS_PAGE.read_text(), re.MULTILINE)
    assert sorted(map(list, rows)) == sorted(expected)
    assert len(rows) == 9


def test_the_times_of_redis_are_those_measured() -> None:
    rows = [row for row in results("redis_state")["turns"] if row["workload"] == "pool of 60"]
    page = RESULTS_PAGE.read_text()
    for row in rows:
        for what in ("prepare", "commit"):
            assert f", {what} | {row[f'{what} p50 µs']:.0f} µs | {row[f'{what} p99 µs']:.0f} µs |" in page
    assert len(rows) == 2
