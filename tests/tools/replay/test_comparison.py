"""The summary of a trace, and the estimates."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.replay.comparison import compare, summary
from warmprefix_tools.replay.results import Estimates, Misses, ReplayResult

GAINED = ReplayResult(
    trace="t",
    policy="coaccess",
    capacity_tokens=100_000,
    k=15,
    placement="head",
    requests=200,
    saved_tokens=40_000,
    total_tokens=100_000,
    gained_requests=120,
    reordered_requests=150,
    reference_tokens=0,
    misses=Misses(30_000, 20_000, 10_000),
    over_time=(),
    plan_us_p50=50,
    plan_us_p99=90,
    today_saved_tokens=10_000,
    today_total_tokens=100_000,
    lost_requests=10,
    annotation_tokens=3_000,
)


def summary_of(result: ReplayResult) -> str:
    (comparison,) = compare([result])
    return summary(comparison)


def test_summary_of_a_gain() -> None:
    assert GAINED.prefill_change == pytest.approx(-0.3)
    assert summary_of(GAINED) == (
        "With a cache of 100,000 tokens, coaccess would have found 40.0% of the context in it; as things are, it is"
        " 10.0%. That is 30.0% less to prefill, order annotations included. Of the requests, 60% would have less to"
        " prefill, 5% more and 35% as much as today; 25% would be left exactly as they are."
    )


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 500), st.integers(0, 500))
def test_shares_of_requests_add_up_to_100(gained: int, lost: int, even: int, reordered: int) -> None:
    requests = gained + lost + even
    result = replace(
        GAINED,
        requests=requests,
        gained_requests=gained,
        lost_requests=lost,
        reordered_requests=min(reordered, requests),
    )
    (shares,) = re.findall(
        r"(\d+)% would have less to prefill, (\d+)% more and (\d+)% as much as today", summary_of(result)
    )
    assert sum(map(int, shares)) == 100
    for share, count in zip(map(int, shares), (gained, lost, even), strict=True):
        assert abs(share - 100 * count / requests) < 1


def test_summary_of_a_small_change_names_the_main_cause() -> None:
    same = replace(GAINED, saved_tokens=12_000, misses=Misses(60_000, 20_000, 8_000), annotation_tokens=2_300)
    assert "hardly makes a difference: 0.3% more to prefill" in summary_of(same)
    assert "68% of it is blocks that never came before." in summary_of(same)
    other = replace(same, misses=Misses(10_000, 70_000, 8_000))
    assert "80% of it is blocks that came before, but never behind the same ones." in summary_of(other)
    evicted = replace(same, misses=Misses(10_000, 8_000, 70_000))
    assert "80% of it is blocks that the cache had evicted again." in summary_of(evicted)


def test_summary_of_a_loss_to_annotations() -> None:
    short = replace(GAINED, annotation_tokens=45_000)
    assert "It does not pay here: 16.7% more to prefill, order annotations included." in summary_of(short)
    assert "An annotation takes 300 tokens, and a request has 500." in summary_of(short)


def test_summary_without_context() -> None:
    empty = replace(GAINED, saved_tokens=0, total_tokens=0, today_saved_tokens=0, today_total_tokens=0)
    assert summary_of(empty) == "The requests held no context, so there is nothing to save."


def test_estimates_of_seconds_and_money() -> None:
    estimates = Estimates(prefill_rate=1_000, price=2, cached_price=0.5)
    assert estimates.ttft_seconds(GAINED) == 63_000 / 1_000 / 200
    assert estimates.ttft_seconds_today(GAINED) == 90_000 / 1_000 / 200
    assert estimates.cost(GAINED) == (63_000 * 2 + 40_000 * 0.5) / 1e6
    assert estimates.cost_today(GAINED) == (90_000 * 2 + 10_000 * 0.5) / 1e6
    assert Estimates().ttft_seconds(GAINED) is None
    assert Estimates().cost(GAINED) is None
