"""`plan_dataset` on a real Ray cluster."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.ray.conftest import Row, dataset_of, make_rows

from warmprefix import ContextPlanner
from warmprefix_ray import DatasetPlanning, plan_dataset, request_of_row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]
"""Ray uses what it has deprecated itself."""


def plans_of(rows: Any) -> dict[str, Any]:
    """Return the column `plan` of each planned row, by its id."""
    return {row["plan"]["id"]: row["plan"] for row in rows.iter_rows() if row["plan"]["error"] is None}


def test_each_request_is_planned_once_and_saves_about_as_much_as_in_one_plan(tmp_path: Path) -> None:
    rows = make_rows(1_200)
    plan = plan_dataset(dataset_of(rows), tmp_path, DatasetPlanning(partition_requests=500), replicas=4)
    planned = list(plan.rows.iter_rows())
    assert sorted(row["plan"]["id"] for row in planned) == sorted(row["id"] for row in rows)
    assert [row["plan"]["replica"] for row in planned] == sorted(row["plan"]["replica"] for row in planned)
    for row in planned:
        assert sorted(row["plan"]["order"]) == list(range(5))
        content = json.loads(row["plan"]["messages"])[-1]["content"]
        places = [content.index(row["blocks"][position]) for position in row["plan"]["order"]]
        assert places == sorted(places)
        assert content.endswith(row["question"])
    assert (plan.requests, plan.unreadable, len(plan.partitions)) == (1_200, 0, 4)
    single = ContextPlanner().plan_batch(map(request_of_row, rows))
    assert plan.total_tokens == single.total_tokens
    assert single.hit_ratio - 0.02 < plan.hit_ratio <= single.upper_bound / single.total_tokens


def test_a_request_stands_behind_the_one_that_warms_it(tmp_path: Path) -> None:
    plan = plan_dataset(dataset_of(make_rows(600)), tmp_path, replicas=3)
    plans = plans_of(plan.rows)
    warmed = [one for one in plans.values() if one["warmed_by"] is not None]
    assert len(warmed) > 300
    for one in warmed:
        warmer = plans[one["warmed_by"]]
        assert (warmer["partition"], warmer["place"] < one["place"]) == (one["partition"], True)


def test_the_plan_does_not_depend_on_how_ray_reads_the_rows(tmp_path: Path) -> None:
    dataset = dataset_of(make_rows(400))
    planning = DatasetPlanning(partition_requests=100, sample=150)
    one = plan_dataset(dataset.repartition(1), tmp_path / "one", planning)
    other = plan_dataset(dataset.repartition(7), tmp_path / "other", planning)
    assert plans_of(one.rows) == plans_of(other.rows)


def test_rows_without_a_request_are_counted_and_keep_their_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Row] = [
        *make_rows(20),
        {"id": "empty", "blocks": None, "question": "?"},
        {"id": "r3", "blocks": ["Another."], "question": "?"},
    ]
    with caplog.at_level(logging.WARNING, logger="warmprefix"):
        plan = plan_dataset(dataset_of(rows), tmp_path)
    assert (plan.requests, plan.unreadable) == (20, 2)
    errors = {row["id"]: row["plan"]["error"] for row in plan.rows.iter_rows() if row["plan"]["error"]}
    assert errors["empty"].startswith("TypeError: ")
    assert "another row of the partition has the id 'r3' too" in errors["r3"]
    assert "partition 0: 2 rows have no request; the first: " in caplog.text


def test_finished_plans_are_used_again_and_damaged_ones_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_of(make_rows(300))
    planning = DatasetPlanning(partition_requests=100)
    first = plan_dataset(dataset, tmp_path, planning)
    plans = plans_of(first.rows)
    times = [file.stat().st_mtime_ns for file in first.files]
    damaged, missing, *_ = first.files
    damaged.write_bytes(damaged.read_bytes()[:-20])
    missing.unlink()
    with caplog.at_level(logging.WARNING, logger="warmprefix"):
        second = plan_dataset(dataset, tmp_path, planning)
    assert f"{damaged}: damaged" in caplog.text
    assert plans_of(second.rows) == plans
    kept = [file.stat().st_mtime_ns == time for file, time in zip(second.files, times, strict=True)]
    assert kept == [False, False, True]


def test_damaged_or_missing_rows_are_divided_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(make_rows(300))
    planning = DatasetPlanning(partition_requests=100)
    plans = plans_of(plan_dataset(dataset, tmp_path, planning).rows)
    for described in ("damaged", "rows are missing"):
        file = min(tmp_path.glob("rows/*=1/*.parquet"))
        file.unlink()
        if described == "damaged":
            file.write_bytes(b"PAR1")
        for plan in tmp_path.glob("plans-*/*.parquet"):
            plan.unlink()
        with caplog.at_level(logging.WARNING, logger="warmprefix"):
            again = plan_dataset(dataset, tmp_path, planning)
        assert described in caplog.text
        assert str(file.parent) in caplog.text
        assert plans_of(again.rows) == plans
        caplog.clear()


def test_the_folder_of_another_dataset_is_refused(tmp_path: Path) -> None:
    dataset = dataset_of(make_rows(20))
    plan_dataset(dataset, tmp_path)
    for other, replicas in ((dataset_of(make_rows(21)), 1), (dataset.drop_columns(["question"]), 1), (dataset, 2)):
        with pytest.raises(ValueError, match="folder must be that of this dataset and these numbers, or a new one"):
            plan_dataset(other, tmp_path, replicas=replicas)


def test_one_group_that_is_larger_than_a_partition_is_planned_in_pieces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Row] = [{"id": i, "blocks": ["First.", f"Pair {i // 2}."]} for i in range(400)]
    with caplog.at_level(logging.WARNING, logger="warmprefix"):
        plan = plan_dataset(dataset_of(rows), tmp_path, DatasetPlanning(partition_requests=100, sample=10))
    assert plan.requests == 400
    assert max(numbers.pieces for numbers in plan.partitions) > 1
    assert "too large, and planned in" in caplog.text
    places = Counter((one["partition"], one["place"]) for one in plans_of(plan.rows).values())
    assert set(places.values()) == {1}
    pairs = [one for one in plans_of(plan.rows).values() if one["saved_tokens"] > 3]
    assert len(pairs) > 150  # nearly all pairs stay together


@pytest.mark.parametrize("count", [1, 3])
def test_more_replicas_than_requests(tmp_path: Path, count: int) -> None:
    plan = plan_dataset(dataset_of(make_rows(count)), tmp_path, replicas=8)
    assert (plan.requests, plan.rows.count()) == (count, count)


def test_no_rows(tmp_path: Path) -> None:
    plan = plan_dataset(dataset_of(make_rows(3)).filter(lambda row: row["id"] == "none"), tmp_path)
    assert (plan.requests, plan.hit_ratio, plan.rows.count()) == (0, 0.0, 0)


def test_numbers_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replicas must be 1 or more, got 0"):
        plan_dataset(dataset_of(make_rows(1)), tmp_path, replicas=0)
    with pytest.raises(ValueError, match="partition_requests must be 1 or more, got 0"):
        DatasetPlanning(partition_requests=0)
    with pytest.raises(ValueError, match="sample must be 1 or more, got 0"):
        DatasetPlanning(sample=0)


def test_a_column_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset must have no column `plan`"):
        plan_dataset(dataset_of([{"id": 1, "blocks": ["a"], "plan": 2}]), tmp_path)


def test_a_missing_cluster_is_an_error_unless_a_local_one_is_allowed() -> None:
    script = "from warmprefix_ray import connect; connect('127.0.0.1:9')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "RayClusterError: No Ray cluster at 127.0.0.1:9: start one with `ray start --head`" in ended.stderr


def test_rows_of_a_dataset_name_pins_and_neighbours() -> None:
    blocks = [{"text": "One.", "id": "1"}, {"text": "Two.", "follows": "1", "pinned": "end"}]
    request = request_of_row({"id": "r", "blocks": blocks})
    assert [(block.follows, block.pinned) for block in request.blocks] == [(None, None), ("1", "end")]


def test_a_text_that_follows_another_in_one_row_only_stays_behind_it(tmp_path: Path) -> None:
    def block(name: str, follows: str | None = None) -> Row:
        return {"text": " ".join(f"{name}-{i}" for i in range(200)), "id": name, "follows": follows}

    rows: list[Row] = [
        {"id": "free", "blocks": [block("two"), block("other")], "question": "?"},
        {"id": "run", "blocks": [block("one"), block("two", follows="one"), block("other")], "question": "?"},
    ]
    plans = plans_of(plan_dataset(dataset_of(rows), tmp_path, replicas=1).rows)
    order = list(plans["run"]["order"])
    assert order.index(1) == order.index(0) + 1
