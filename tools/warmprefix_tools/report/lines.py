"""A chart of lines over a run of requests, each named where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix_tools.report.amounts import percent
from warmprefix_tools.report.bars import scale_top
from warmprefix_tools.report.markup import Markup, element, visible

__all__ = ["Line", "line_chart", "line_rows"]

_HEIGHT = 230
_PAD = 12  # above and below the plot, for half a line of text
_LINE_OF_TEXT = 17
_LABEL_LETTERS = 15
_WIDE_PLOT, _NARROW_PLOT = 250, 100  # pixels at least; below _WIDE_PLOT, the style hides ticks of class "more"
_DIGIT, _COMMA, _GAP = 8, 4, 4  # pixels
_GRID = 1_000  # units of a plot's width and height, whatever they are on the screen


@dataclass(frozen=True, slots=True)
class Line:
    """Shares in [0, 1] over a number of requests, ascending."""

    name: str
    class_: str
    points: tuple[tuple[int, float], ...]


def line_chart(label: str, lines: Sequence[Line]) -> Markup:
    """The lines over one another; every line has a point at least. The text keeps its size on any screen."""
    top = scale_top(max(share for line in lines for _, share in line.points))
    end = max(line.points[-1][0] for line in lines)
    ends = ", ".join(f"{line.name} {percent(line.points[-1][1])}" for line in lines)
    return element(
        "div",
        _scale(top),
        _plot(f"{label} At the end: {ends}.", lines, top, end),
        _names(lines, top),
        _requests(end),
        class_="lines",
    )


def line_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """The numbers of the chart: a row for each number of requests, a cell for each line."""
    columns = [dict(line.points) for line in lines]
    return [
        (f"{place:,}", *(percent(column[place]) if place in column else "\u2013" for column in columns))
        for place in _places(lines)
    ]


def _places(lines: Sequence[Line]) -> list[int]:
    return sorted({place for line in lines for place, _ in line.points})


def _scale(top: float) -> Markup:
    ticks = [
        element("text", f"{round(100 * share, 3):g}%", x="36", y=_y(share, top) + 4, text_anchor="end")
        for share in (0, top / 2, top)
    ]
    return element("svg", *ticks, class_="scale", width="42", height=_HEIGHT, aria_hidden="true")


def _plot(label: str, lines: Sequence[Line], top: float, end: int) -> Markup:
    grid = [
        element("line", x1="0%", x2="100%", y1=_y(share, top), y2=_y(share, top), class_="grid")
        for share in (0, top / 2, top)
    ]
    drawn = [
        element(
            "polyline",
            points=" ".join(f"{round(_GRID * x / end)},{round(_GRID * (1 - share / top))}" for x, share in line.points),
            class_=f"line {line.class_}",
        )
        for line in reversed(lines)  # the first on top
    ]
    stretched = element(
        "svg",
        *drawn,
        *_columns(lines, end),
        viewBox=f"0 0 {_GRID} {_GRID}",
        preserveAspectRatio="none",
        x="0",
        y=_PAD,
        width="100%",
        height=_HEIGHT - 2 * _PAD,
        class_="stretched",
    )
    return element("svg", *grid, stretched, class_="plot", width="100%", height=_HEIGHT, role="img", aria_label=label)


def _columns(lines: Sequence[Line], end: int) -> list[Markup]:
    """What a pointer is told, column by column."""
    columns: list[Markup] = []
    left = 0
    for place, (requests, *values) in zip(_places(lines), line_rows(lines), strict=True):
        right = round(_GRID * place / end)
        said = ", ".join(f"{line.name} {value}" for line, value in zip(lines, values, strict=True))
        hint = element("title", f"{requests} requests: {said}")
        area = element("rect", hint, x=left, y="0", width=right - left, height=_GRID)
        cursor = element("line", x1=right, x2=right, y1="0", y2=_GRID)
        columns.append(element("g", area, cursor, class_="column"))
        left = right
    return columns


def _names(lines: Sequence[Line], top: float) -> Markup:
    """The names at the lines' ends, moved apart where they would touch."""
    ordered = sorted(lines, key=lambda line: -line.points[-1][1])
    marks: list[Markup] = []
    for line, place in zip(ordered, _spread([_y(line.points[-1][1], top) for line in ordered]), strict=True):
        y = _y(line.points[-1][1], top)
        name = visible(line.name)
        name = name if len(name) <= _LABEL_LETTERS else f"{name[: _LABEL_LETTERS - 1]}\u2026"
        value = element("tspan", f" {percent(line.points[-1][1])}", class_="value")
        marks.append(
            element("polyline", points=f"0,{y:g} 6,{y:g} 14,{place:g} 20,{place:g}", class_=f"line {line.class_}")
        )
        marks.append(element("text", name, value, x="24", y=place + 4, class_=f"name {line.class_}"))
    letters = max(min(len(visible(line.name)), _LABEL_LETTERS) for line in lines) + len(" 100.0%")
    return element("svg", *marks, class_="names", width=24 + 8 * letters, height=_HEIGHT, aria_hidden="true")


def _spread(places: Sequence[float]) -> list[float]:
    """Ascending places at least a line of text apart: those that would touch make room to both sides.

    >>> _spread([40.0, 42.0, 100.0])
    [32.5, 49.5, 100.0]
    """
    # Less a line of text for each name above it, a place must just not be less than the one before: that is isotonic
    # regression, by pooling neighbours that are out of order.
    pools: list[tuple[float, int]] = []  # the mean of each, and how many are in it
    for i, place in enumerate(places):
        mean, size = place - _LINE_OF_TEXT * i, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, size = (other * others + mean * size) / (others + size), others + size
        pools.append((mean, size))
    lowest = _HEIGHT - _PAD - _LINE_OF_TEXT * (len(places) - 1)
    means = [max(min(mean, lowest), _PAD) for mean, size in pools for _ in range(size)]
    return [round(mean + _LINE_OF_TEXT * i, 1) for i, mean in enumerate(means)]


def _requests(end: int) -> Markup:
    always = _ticks(end, _NARROW_PLOT)
    ticks = [(0, "start"), *((at, "middle") for at in _ticks(end, _WIDE_PLOT)), (end, "end")]
    marks = [
        element(
            "text",
            f"{at:,}",
            x=f"{100 * at / end:.4g}%",
            y="12",
            text_anchor=anchor,
            class_=None if at in (0, *always, end) else "more",
        )
        for at, anchor in ticks
    ]
    return element("svg", *marks, class_="requests", width="100%", height="16", aria_hidden="true")


def _ticks(end: int, width: int) -> list[int]:
    """Multiples of a round step between 0 and `end` whose labels fit into so many pixels; always the first.

    >>> [_ticks(end, 250) for end in (1, 3, 7, 100, 480, 2_800)]
    [[], [1, 2], [2, 4, 6], [50], [200, 400], [1000, 2000]]
    >>> [_ticks(end, 100) for end in (3, 2_800)]
    [[1, 2], [1000]]
    """
    step = _round_step(end)
    per_request = width / end
    multiples = range(step, end, step)
    # The label of `end` ends there; all others are centred.
    fitting = [at for at in multiples if per_request * (end - at) >= _width(at) / 2 + _width(end) + _GAP]
    apart = per_request * step >= _width(multiples[-1] if multiples else end) + _GAP
    return fitting if fitting and apart else [*multiples[:1]]


def _width(number: int) -> int:
    label = f"{number:,}"
    return _DIGIT * len(label) - (_DIGIT - _COMMA) * label.count(",")


def _round_step(end: int) -> int:
    """A round number of requests, about half of them.

    >>> [_round_step(end) for end in (1, 7, 100, 2_800)]
    [1, 2, 50, 1000]
    """
    power = int(10.0 ** (len(str(max(end // 2, 1))) - 1))
    steps = [power * factor for factor in (1, 2, 5)]
    return max((step for step in steps if step <= end / 2), default=1)


def _y(share: float, top: float) -> float:
    return round(_PAD + (_HEIGHT - 2 * _PAD) * (1 - share / top), 1)
