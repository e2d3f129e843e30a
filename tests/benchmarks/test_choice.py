"""The benchmark of choosing evidence: its arms, its figures, and the mean of the control's draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

import choice
from warmprefix_tools.traces.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    generated = choice.generated()
    requests = [replace(request, gold=request.blocks[6:10]) for request in generated.requests[:200]]
    scored = choice.scored(replace(generated, requests=tuple(requests)))
    assert scored is not None
    return scored


def test_each_arm_is_measured_against_the_default(trace: Trace) -> None:
    rows = {row["arm"]: row for row in choice.measured(trace, [100_000])}
    assert [*rows] == ["default", "choice", "chance", *[arm for arm in choice.ARMS if arm != "choice"]]
    assert {row["k"] for row in rows.values()} == {8}
    default, chosen = rows["default"], rows["choice"]
    assert default["gold_percent"] == 50, "two of four stand among the first eight"
    assert (default["change_percent"], default["same_percent"], default["changed_percent"]) == (0, 100, 0)
    assert chosen["change_percent"] < 0 < chosen["exchanged_per_request"]
    assert rows["chance"]["exchanged_per_request"] == chosen["exchanged_per_request"]
    assert rows["chance"]["change_percent"] > chosen["change_percent"]
    extra = rows["extra"]
    assert (extra["exchanged_per_request"], extra["extra_per_request"] > 0) == (0, True)
    assert extra["gold_percent"] >= 50
    assert rows["twins"]["same_percent"] == 100, "no text has a twin"
    others = [row["arm"] for row in choice.measured(trace, [100_000, 30_000]) if row["cache"] == "30000"]
    assert others == ["default", "choice"]


def test_the_means_name_the_worst_trace(trace: Trace) -> None:
    rows = [*choice.measured(trace, [None])]
    other = [{**row, "trace": "other", "change_percent": row["change_percent"] + 2} for row in rows]
    summary = {line["arm"]: line for line in choice.means([*rows, *other])}
    own = {row["arm"]: row for row in rows}
    assert summary["choice"]["worst_change_percent"] == own["choice"]["change_percent"] + 2
    assert summary["choice"]["change_percent"] == pytest.approx(own["choice"]["change_percent"] + 1)
    assert summary["default"]["least_gold_over_relevance"] == 0
    assert summary["choice"]["gold_traces"] == 2


def test_traces_without_scores_are_left_out(trace: Trace) -> None:
    bare = [replace(request, scores=()) for request in trace.requests]
    assert choice.scored(replace(trace, requests=tuple(bare))) is None
