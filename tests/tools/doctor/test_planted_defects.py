"""Two hundred logs, with one, two or no planted defects: the planted ones are found, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmprefix_tools.doctor.findings import DoctorReport

Examine = Callable[[Any], DoctorReport]


@pytest.mark.sample(4)
def test_nothing_is_found_in_a_clean_log(
    make_log: Callable[..., Any], examine: Examine, clean: tuple[str, int]
) -> None:
    report = examine(make_log(*clean))
    assert report.findings == ()
    assert report.lost_tokens == 0
    assert report.requests >= 50


@pytest.mark.sample(24)
def test_planted_defects_are_found_and_no_others(
    make_log: Callable[..., Any], examine: Examine, planted: tuple[str, tuple[str, ...]]
) -> None:
    kind, defects = planted
    report = examine(make_log(kind, 0, *defects))
    assert {finding.kind for finding in report.findings} == set(defects)
    lost = [finding.lost_tokens for finding in report.findings]
    assert lost == sorted(lost, reverse=True)
    assert sum(lost) == report.lost_tokens
    assert report.hit_tokens + report.lost_tokens == report.repaired_hit_tokens <= report.bound_tokens
    for finding in report.findings:
        assert finding.lost_tokens > 0
        assert 0 < finding.share <= 1
        assert 0 < finding.requests <= report.requests
        divergence = finding.divergence
        assert divergence is not None
        assert divergence.earlier.line < divergence.later.line
        assert divergence.could_share_tokens > divergence.shared_tokens
