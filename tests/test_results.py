"""The tables of README.md and docs/ are those of the files in benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from result_files import read_rows
from result_tables import MARKED, PAGES, other_defaults, with_tables
from result_tables import tables as result_tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS_PAGE = ROOT / "docs/results.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_marked_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_every_table_stands_on_one_page() -> None:
    shown = [mark[2] for page in PAGES for mark in MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(result_tables())


def test_the_failures_of_the_peer_are_those_counted() -> None:
    failed = {row["trace"]: row["peer_failed"] for row in read_rows("online_hit_ratio") if row["peer_failed"]}
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

    rows = read_rows("net_gain")
    (saved, lost), (published, published_lost) = shown("default"), shown("published")
    readme = " ".join(README.read_text().split())
    assert f"on {len({row['trace'] for row in rows})} traces" in readme
    assert f"saves {saved} of the prefill, and loses {lost} % on the worst trace" in readme
    assert f"saves {published} and loses up to {float(published_lost):.1f} %" in readme


def test_the_readmes_times_on_a_real_engine_are_those_measured() -> None:
    rows = [row for row in read_rows("engine_ttft") if row["model_shape"] == "wide"]

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


def test_another_annotation_needs_two_sets_of_a_thousand_questions() -> None:
    def rows(questions: int, **verdicts: str) -> list[dict[str, object]]:
        common = {"model": "m", "measure": "contains", "questions": questions}
        return [
            {**common, "set": f"set {number}", "arm": arm, "verdict": verdict}
            for number in range(2)
            for arm, verdict in verdicts.items()
        ]

    assert other_defaults(rows(1000, note="worse", planned="not worse", labels="not worse")) == {"m": "none"}
    assert other_defaults(rows(1000, note="worse", planned="open", labels="better")) == {"m": "labels"}
    assert other_defaults(rows(999, note="worse", planned="not worse")) == {}
    assert other_defaults(rows(1000, note="open", planned="better")) == {}
    assert other_defaults(rows(1000, note="worse", planned="worse, within margin")) == {}
    assert other_defaults(rows(1000, note="worse", planned="not worse")[:2]) == {}


def test_published_reports_hold_no_text() -> None:
    """The longest texts are names of sets, arms and verdicts."""
    files = list((ROOT / "benchmarks/results/models").glob("*.json"))
    assert files
    for file in files:
        assert max(map(len, re.findall(r'"([^"]*)"', file.read_text()))) <= 40
