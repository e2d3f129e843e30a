"""The arithmetic of a line chart."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.report.line_chart import Line, LineChart, _round_step, _spread, _ticks, scale_top

SHARES = st.floats(0, 1)


@given(st.lists(st.floats(12, 218), min_size=1, max_size=8).map(sorted))
def test_names_are_moved_apart_and_stay_inside(places: list[float]) -> None:
    spread = _spread(places)
    assert len(spread) == len(places)
    assert all(after - before >= 16.8 for before, after in pairwise(spread))
    assert spread[0] >= 11.9
    assert spread[-1] <= 218.1


@given(st.lists(st.floats(12, 218), min_size=1, max_size=8, unique_by=lambda place: place // 17).map(sorted))
def test_names_that_have_room_stay_where_they_are(places: list[float]) -> None:
    if all(after - before >= 17 for before, after in pairwise(places)):
        assert _spread(places) == [round(place, 1) for place in places]


@given(st.integers(1, 10**7))
def test_the_tick_between_is_round_and_no_later_than_the_middle(end: int) -> None:
    step = _round_step(end)
    assert step == 1 or step <= end / 2
    assert str(step).rstrip("0") in ("1", "2", "5")
    assert step * 5.1 > end


def test_no_round_number_of_requests_lacks_its_tick() -> None:
    chart = LineChart([Line("one", "hero", ((1_400, 0.2), (2_800, 0.3)))])
    assert [number for number, *_ in chart.requests] == [0, 1_000, 2_000, 2_800]


@given(st.integers(2, 10**7), st.sampled_from([100, 250]))
def test_ticks_are_apart_and_none_is_missing_between(end: int, width: int) -> None:
    ticks, step = _ticks(end, width), _round_step(end)
    assert ticks == [step * (i + 1) for i in range(len(ticks))]
    assert 0 < ticks[0] <= ticks[-1] < end
    if len(ticks) > 1:
        letters = 4 * len(str(end))
        assert width * step / end > letters
        assert width * (end - ticks[-1]) / end > letters


@given(SHARES)
def test_a_scale_holds_its_largest_share(share: float) -> None:
    assert share <= scale_top(share) <= 1


@given(st.lists(SHARES, min_size=1, max_size=20), st.lists(SHARES, min_size=1, max_size=20))
def test_every_number_of_the_chart_is_in_its_rows(first: list[float], second: list[float]) -> None:
    lines = [
        Line(name, "hero", tuple((10 * (i + 1), share) for i, share in enumerate(shares)))
        for name, shares in (("one", first), ("two", second))
    ]
    chart = LineChart(lines)
    rows = chart.rows
    assert [row[0] for row in rows] == [f"{10 * (i + 1):,}" for i in range(max(len(first), len(second)))]
    for column, shares in ((1, first), (2, second)):
        assert [row[column] for row in rows] == [f"{share:.1%}" for share in shares] + ["\u2013"] * (
            len(rows) - len(shares)
        )
    assert chart.ends == f"one {first[-1]:.1%}, two {second[-1]:.1%}"
