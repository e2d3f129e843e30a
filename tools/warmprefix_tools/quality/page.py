"""The page of a report: each arm's difference from its baseline, with its interval, as a chart."""

from __future__ import annotations

from typing import NamedTuple

from warmprefix_tools.quality.remarks import interval, measure_cells, remarks
from warmprefix_tools.quality.results import QualityResults, verdict
from warmprefix_tools.quality.scores import JUDGE, MEASURES
from warmprefix_tools.report.pages import render_page

__all__ = ["quality_page"]

_LEFT, _WIDTH, _ROW = 140, 460, 34
_NAME_CHARACTERS = 18
_LOOKS = {"better": "good", "not worse": "good", "worse, within margin": "good", "worse": "bad", "open": "open"}


class _Bar(NamedTuple):
    """One arm in the chart; positions in pixels."""

    name: str
    """Short enough for its place."""
    y: float
    low: float
    high: float
    middle: float
    worst: float
    look: str


def quality_page(results: QualityResults) -> str:
    """Return a self-contained HTML page; equal arguments make equal bytes."""
    compared = [arm for arm in results.arms if arm.comparison is not None]
    ends = [abs(end) for arm in compared if arm.comparison for end in (arm.comparison.low, arm.comparison.high)]
    reach = max([results.margin * 1.5, *ends]) * 1.1

    def x(difference: float) -> float:
        return round(_LEFT + _WIDTH * (difference + reach) / (2 * reach), 1)

    bars = [
        _Bar(
            arm.arm.rpartition(":")[2][:_NAME_CHARACTERS],
            _ROW * (number + 1),
            x(arm.comparison.low),
            x(arm.comparison.high),
            x(arm.comparison.difference),
            x(arm.comparison.worst),
            _LOOKS[verdict(arm, results.margin)],
        )
        for number, arm in enumerate(compared)
        if arm.comparison is not None
    ]
    return render_page(
        "quality/page.html",
        title="What orders, notes and references do to the answers",
        results=results,
        measure={**MEASURES, JUDGE: "preference of the judge"}.get(results.measure, results.measure),
        intervals={arm.arm: interval(arm.comparison) for arm in compared if arm.comparison is not None},
        measures={arm.arm: tuple(measure_cells(arm)) for arm in results.arms},
        verdicts={arm.arm: verdict(arm, results.margin) for arm in results.arms},
        remarks=remarks(results),
        bars=bars,
        height=_ROW * (len(bars) + 1) + 10,
        width=_LEFT + _WIDTH + 20,
        zero=x(0.0),
        margin=x(-results.margin),
    )
