"""The list of metrics against what a planner counts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from warmprefix import FeedStats, LatencySnapshot, PlannerStats
from warmprefix.telemetry.measures import DURATIONS, MEASURES

NOT_METRICS: dict[str, str] = {}
"""Counts that are deliberately no metrics, and why."""

HEARD = PlannerStats(feed=FeedStats(sources=1), residency_confidence=0.0)


def metrics_of(stats: PlannerStats) -> dict[tuple[str, str | None], object]:
    told: dict[tuple[str, str | None], object] = {
        (measure.name, labels.get("reason")): value for measure in MEASURES for labels, value in measure.samples(stats)
    }
    return told | {(duration.name, None): duration.read(stats) for duration in DURATIONS}


def changed_by(stats: PlannerStats) -> list[tuple[str, str | None]]:
    before, after = metrics_of(HEARD), metrics_of(stats)
    assert before.keys() == after.keys()
    return [key for key in after if after[key] != before[key]]


@pytest.mark.parametrize("field", [field.name for field in fields(PlannerStats) if field.name != "feed"])
def test_every_count_is_one_metric_or_none_on_purpose(field: str) -> None:
    value: Any = LatencySnapshot((1,) * 16, 4.0) if field.endswith("_latency") else 0.75
    changed = changed_by(replace(HEARD, **{field: value}))
    assert (len(changed), field in NOT_METRICS) in {(1, False), (0, True)}


@pytest.mark.parametrize("field", [field.name for field in fields(FeedStats)])
def test_every_count_of_a_feed_is_one_metric(field: str) -> None:
    value: Any = 7
    changed = changed_by(replace(HEARD, feed=replace(HEARD.feed, **{field: value})))
    assert [name.startswith("feed_") for name, _ in changed] == [True]


def test_what_is_left_out_on_purpose_exists() -> None:
    assert NOT_METRICS.keys() <= {field.name for field in fields(PlannerStats)}


def test_names_and_reasons_are_distinct() -> None:
    names = [measure.name for measure in MEASURES] + [duration.name for duration in DURATIONS]
    assert len(set(names)) == len(names)
    keys = [key for measure in MEASURES if not callable(measure.read) for key in measure.read]
    assert len(set(keys)) == len(keys)


def test_without_a_feed_there_is_nothing_to_tell_of_it() -> None:
    assert not [name for name, _ in metrics_of(PlannerStats()) if name.startswith("feed_")]


def test_a_confidence_that_is_unknown_is_not_0() -> None:
    assert ("residency_confidence_ratio", None) not in metrics_of(PlannerStats())
    assert metrics_of(HEARD)["residency_confidence_ratio", None] == 0.0
