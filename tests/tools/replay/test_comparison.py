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
    untouched_requests=50,
    note_tokens=3_000,
)


def summary_of(result: ReplayResult) -> str:
    (comparison,) = compare([result])
    return summary(comparison)


def test_summary_of_a_gain() -> None:
    assert GAINED.prefill_change == pytest.approx(-0.3)
    assert summary_of(GAINED) == (
        "With a cache of 100,000 tokens, coaccess would have found 40.0% of the context in it; as things are, it is"
        " 10.0%. Net of labels and notes, that is 30.0% less to prefill. These take 15 tokens per request, and are 4.8%"
        " of what is left to prefill. Of the requests, 60% would have less to prefill, 5% more and 35% as much as"
        " today; 25% would be left exactly as they are."
    )


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 500), st.integers(0, 500))
def test_shares_of_requests_add_up_to_100(gained: int, lost: int, even: int, reordered: int) -> None:
    requests = gained + lost + even
    result = replace(
        GAINED,
        requests=requests,
        gained_requests=gained,
        lost_requests=lost,
        untouched_requests=requests - min(reordered, requests),
    )
    (shares,) = re.findall(
        r"(\d+)% would have less to prefill, (\d+)% more and (\d+)% as much as today", summary_of(result)
    )
    assert sum(map(int, shares)) == 100
    for share, count in zip(map(int, shares), (gained, lost, even), strict=True):
        assert abs(share - 100 * count / requests) < 1


def test_summary_of_a_loss_to_notes() -> None:
    short = replace(GAINED, note_tokens=45_000)
    assert (short.net_saved_tokens, short.prefill_change) == (-15_000, 105 / 90 - 1)
    assert (
        "Net of labels and notes, it does not pay here: 16.7% more to prefill. These take 225 tokens per request, and"
        " are 42.9% of what is left to prefill. Without them it would be 33.3% less: use --annotate none if your model"
        " needs no note, else leave the order alone." in summary_of(short)
    )


@given(st.integers(0, 99_999), st.integers(0, 100_000), st.integers(0, 50_000), st.integers(0, 50_000))
def test_loss_is_never_called_a_gain(saved: int, today: int, notes: int, saved_notes: int) -> None:
    result = replace(
        GAINED,
        saved_tokens=saved,
        today_saved_tokens=today,
        note_tokens=notes + saved_notes,
        saved_note_tokens=saved_notes,
    )
    text = summary_of(result)
    net = (100_000 - today) - (100_000 - saved) - notes
    assert result.net_saved_tokens == net
    (outcome,) = re.findall(r"% (less|more) to prefill\.|(as much) to prefill as today\.", text)
    assert "".join(outcome) == ("less" if net > 0 else "more" if net < 0 else "as much")
    assert ("does not pay" in text or "hardly" in text) >= (net < 0)
    assert ("Leave these prompts as they are" in text or "leave the order alone" in text) == (net < 0)


def test_estimates_of_seconds_and_money() -> None:
    estimates = Estimates(prefill_rate=1_000, price=2, cached_price=0.5)
    assert estimates.ttft_seconds(GAINED) == 63_000 / 1_000 / 200
    assert estimates.ttft_seconds_today(GAINED) == 90_000 / 1_000 / 200
    assert estimates.cost(GAINED) == (63_000 * 2 + 40_000 * 0.5) / 1e6
    assert estimates.cost_today(GAINED) == (90_000 * 2 + 10_000 * 0.5) / 1e6
    assert Estimates().ttft_seconds(GAINED) is None
    assert Estimates().cost(GAINED) is None
