"""Rows with scores: a partition's plan chooses which of their blocks are fed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warmprefix import Choice, ContextPlanner

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray")

from warmprefix_ray import DatasetPlanning, request_of_row  # noqa: E402
from warmprefix_ray.partition_plan import write_plan  # noqa: E402


def rows() -> list[dict[str, Any]]:
    """Return rows of which some share passages, with other scores for the same text."""
    texts = [f"Passage {i}. " + "It has some words. " * 30 for i in range(12)]
    return [
        {
            "id": f"q{n}",
            "question": "Why?",
            "blocks": [{"text": texts[(n + 2 * i) % 12], "score": 9.0 - i - n / 100} for i in range(5)],
        }
        for n in range(40)
    ]


def test_plan_of_a_partition_feeds_the_chosen_blocks(tmp_path: Path) -> None:
    source, target, choice = tmp_path / "rows.parquet", tmp_path / "plan.parquet", Choice(3, keep=1, within=1, extra=1)
    parquet.write_table(pa.Table.from_pylist(rows()), source)
    numbers = write_plan(0, 0, [source], target, DatasetPlanning(options={"choose": choice}))
    expected = ContextPlanner().plan_batch(sorted(map(request_of_row, rows()), key=lambda one: one.id), choose=choice)
    assert any(planned.entered for planned in expected)
    plans = [row["plan"] for row in parquet.read_table(target).to_pylist()]
    assert [(plan["id"], tuple(plan["order"])) for plan in plans] == [(one.id, one.order) for one in expected]
    assert [json.loads(plan["messages"]) for plan in plans] == [one.messages() for one in expected]
    assert (numbers.saved_tokens, numbers.total_tokens) == (expected.saved_tokens, expected.total_tokens)


def test_rows_that_nothing_can_be_chosen_for_are_reported(tmp_path: Path) -> None:
    source, target, bad = tmp_path / "rows.parquet", tmp_path / "plan.parquet", rows()
    bad[7]["blocks"][2]["score"] = None
    bad[8]["blocks"].reverse()
    bad[9]["order_locked"] = True
    parquet.write_table(pa.Table.from_pylist([row | {"order_locked": False} | row for row in bad]), source)
    numbers = write_plan(0, 0, [source], target, DatasetPlanning(options={"choose": Choice(3)}))
    errors = {row["id"]: row["plan"]["error"] for row in parquet.read_table(target).to_pylist() if row["plan"]["error"]}
    assert (numbers.requests, numbers.unreadable) == (37, 3)
    assert errors == {
        "q7": "ValueError: candidate 2 must have a finite score to choose by, got None",
        "q8": "ValueError: candidates must come with descending scores, but candidate 1 has 5.92 behind 4.92",
        "q9": "ValueError: choose must be None with order_locked=True",
    }


def test_folder_of_a_choice_with_functions_can_be_continued() -> None:
    def planning(**choice: Any) -> DatasetPlanning:
        return DatasetPlanning(options={"choose": Choice(3, version=lambda block: None, **choice)})

    assert planning().digest("source") == planning().digest("source")
    assert planning().digest("source") != planning(extra=1).digest("source")
