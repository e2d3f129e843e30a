"""The declared metrics against the counts of a planner."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from warmprefix import PlannerStats
from warmprefix.residency import FeedStats
from warmprefix.telemetry import LatencySnapshot
from warmprefix_telemetry.exported_metrics import METRICS

NOT_METRICS = dict.fromkeys(["capacity_source", "engine_model", "profile", "profile_source"], "a name, not a number")
"""Counts that are deliberately not exported, and why."""

WITH_FEED = PlannerStats(feed=FeedStats(sources=1), residency_confidence=0.0, capacity_tokens=1, most_fed_share=0.0)


def samples_of(stats: PlannerStats) -> dict[tuple[str, str | None], object]:
    return {(metric.name, labels.get("reason")): value for metric in METRICS for labels, value in metric.samples(stats)}


def changed_by(stats: PlannerStats) -> list[tuple[str, str | None]]:
    before, after = samples_of(WITH_FEED), samples_of(stats)
    assert before.keys() == after.keys()
    return [key for key in after if after[key] != before[key]]


@pytest.mark.parametrize("field", [field.name for field in fields(PlannerStats) if field.name != "feed"])
def test_every_count_is_one_metric_unless_listed(field: str) -> None:
    value: Any = LatencySnapshot((1,) * 16, 4.0) if field.endswith("_latency") else 0.75
    changed = changed_by(replace(WITH_FEED, **{field: value}))
    assert (len(changed), field in NOT_METRICS) in {(1, False), (0, True)}


@pytest.mark.parametrize("field", [field.name for field in fields(FeedStats)])
def test_every_count_of_a_feed_is_one_metric(field: str) -> None:
    value: Any = 7
    changed = changed_by(replace(WITH_FEED, feed=replace(WITH_FEED.feed, **{field: value})))
    assert [name.startswith("feed_") for name, _ in changed] == [True]


def test_listed_exceptions_exist() -> None:
    assert NOT_METRICS.keys() <= {field.name for field in fields(PlannerStats)}


def test_names_and_reasons_are_distinct() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    keys = [key for metric in METRICS for key in metric.reasons]
    assert len(set(keys)) == len(keys)


def test_without_a_feed_its_metrics_have_no_samples() -> None:
    assert not [name for name, _ in samples_of(PlannerStats()) if name.startswith("feed_")]


def test_an_unmeasured_confidence_has_no_sample() -> None:
    assert ("residency_confidence_ratio", None) not in samples_of(PlannerStats())
    assert samples_of(WITH_FEED)["residency_confidence_ratio", None] == 0.0
