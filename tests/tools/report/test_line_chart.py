"""The arithmetic of a line chart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.report.line_chart import Line, LineChart, scale_top

SHARES = st.floats(0, 1)


@given(st.lists(SHARES, min_size=1, max_size=20), st.lists(SHARES, min_size=1, max_size=20))
def test_every_number_of_the_chart_is_in_its_rows(first: list[float], second: list[float]) -> None:
    lines = [
        Line(name, "hero", tuple((10 * (i + 1), share) for i, share in enumerate(shares)))
        for name, shares in (("one", first), ("two", second))
    ]
    chart = LineChart(lines)
    assert max(first + second) <= scale_top(max(first + second)) <= 1
    assert [row[0] for row in chart.rows] == [f"{10 * (i + 1):,}" for i in range(max(len(first), len(second)))]
    for column, shares in ((1, first), (2, second)):
        missing = ["\u2013"] * (len(chart.rows) - len(shares))
        assert [row[column] for row in chart.rows] == [f"{share:.1%}" for share in shares] + missing
    assert {line.title for line in chart.legend} == {f"one {first[-1]:.1%}", f"two {second[-1]:.1%}"}
    assert chart.legend[0].points[-1][1] == max(first[-1], second[-1])
