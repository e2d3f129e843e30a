"""Geometry of a chart of lines over a run of requests, each named where it ends.

The template draws it: `line_chart` in charts.html. Vertical places are pixels; the plot itself is stretched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from warmprefix.forks import ForkSafeProperty
from warmprefix_tools.report.amounts import percent
from warmprefix_tools.report.visible import visible

__all__ = ["Line", "LineChart", "scale_top"]

_HEIGHT = 230
_PAD = 12  # above and below the plot, for half a line of text
_LINE_OF_TEXT = 17
_LABEL_LETTERS = 15
_LETTER = 8  # pixels
_WIDE_PLOT, _NARROW_PLOT = 250, 100  # least pixels of a plot; below _WIDE_PLOT, the style hides optional ticks
_DIGIT, _COMMA, _GAP = 8, 4, 4  # pixels
_GRID = 1_000  # units of a plot's width and height, whatever they are on the screen


def scale_top(largest: float) -> float:
    """Return a round share that ends a scale from 0 and is not below the largest.

    >>> [scale_top(share) for share in (0.0, 0.004, 0.013, 0.41, 0.97)]
    [0.01, 0.01, 0.02, 0.5, 1.0]
    """
    return next((top for top in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8) if top >= largest), 1.0)


@dataclass(frozen=True, slots=True)
class Line:
    """Shares in [0, 1] over an ascending number of requests; one point or more."""

    name: str
    class_: str
    """CSS class: the colour and the dashes."""
    points: tuple[tuple[int, float], ...]

    @property
    def last_share(self) -> float:
        """Share at the end of the line."""
        return self.points[-1][1]


class LineChart:
    """One line or more over each other; the first is drawn on top."""

    height: ClassVar = _HEIGHT
    pad: ClassVar = _PAD
    grid: ClassVar = _GRID

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self._top = scale_top(max(share for line in lines for _, share in line.points))
        self._end = max(line.points[-1][0] for line in lines)

    @property
    def ends(self) -> str:
        """Share of each line at its end, as a list in a sentence."""
        return ", ".join(f"{line.name} {percent(line.last_share)}" for line in self.lines)

    @property
    def scale(self) -> list[tuple[str, float]]:
        """Labels of the vertical scale with their heights."""
        return [(f"{round(100 * share, 3):g}%", self._y(share)) for share in (0, self._top / 2, self._top)]

    @property
    def polylines(self) -> Iterator[tuple[str, str]]:
        """CSS class and points of each line, on the grid, in the order of drawing."""
        for line in reversed(self.lines):
            places = (f"{self._x(at)},{round(_GRID * (1 - share / self._top))}" for at, share in line.points)
            yield line.class_, " ".join(places)

    @ForkSafeProperty
    def rows(self) -> list[tuple[str, ...]]:
        """Numbers of the chart: a row per number of requests, with a cell per line."""
        columns = [dict(line.points) for line in self.lines]
        return [
            (f"{at:,}", *(percent(column[at]) if at in column else "\u2013" for column in columns))
            for at in self._places
        ]

    @property
    def columns(self) -> Iterator[tuple[int, int, str]]:
        """Left edge, right edge and hint of each column under a pointer."""
        left = 0
        for at, (requests, *values) in zip(self._places, self.rows, strict=True):
            hint = ", ".join(f"{line.name} {value}" for line, value in zip(self.lines, values, strict=True))
            yield left, self._x(at), f"{requests} requests: {hint}"
            left = self._x(at)

    @property
    def names(self) -> Iterator[dict[str, Any]]:
        """Names of the lines, highest first, with the heights of `end` and name (`y`).

        Each has the line's share and CSS class. Names are moved apart if they would touch.
        """
        ordered = sorted(self.lines, key=lambda line: -line.last_share)
        ends = [self._y(line.last_share) for line in ordered]
        for line, end, y in zip(ordered, ends, _spread(ends), strict=True):
            name = visible(line.name)
            name = name if len(name) <= _LABEL_LETTERS else f"{name[: _LABEL_LETTERS - 1]}\u2026"
            yield {"text": name, "share": line.last_share, "class": line.class_, "end": end, "y": y}

    @property
    def names_width(self) -> int:
        """Pixels that the names need, with a leader on the left."""
        letters = max(min(len(visible(line.name)), _LABEL_LETTERS) for line in self.lines)
        return 24 + _LETTER * (letters + len(" 100.0%"))

    @property
    def requests(self) -> Iterator[tuple[int, float, str, bool]]:
        """Number, place and anchor of each label below, and True if it is optional."""
        end, always = self._end, _ticks(self._end, _NARROW_PLOT)
        yield 0, 0, "start", False
        yield from ((at, at / end, "middle", at not in always) for at in _ticks(end, _WIDE_PLOT))
        yield end, 1, "end", False

    @ForkSafeProperty
    def _places(self) -> list[int]:
        return sorted({at for line in self.lines for at, _ in line.points})

    def _x(self, requests: int) -> int:
        return round(_GRID * requests / self._end)

    def _y(self, share: float) -> float:
        return round(_PAD + (_HEIGHT - 2 * _PAD) * (1 - share / self._top), 1)


def _spread(places: Sequence[float]) -> list[float]:
    """Return ascending places a line of text apart; close ones move to both sides.

    >>> _spread([40.0, 42.0, 100.0])
    [32.5, 49.5, 100.0]
    """
    # Subtract a line of text for each name above a place. Then each place only must not be less than the one before
    # it: that is isotonic regression, by pooling neighbours that are out of order.
    pools: list[tuple[float, int]] = []  # the mean and the size of each pool
    for i, place in enumerate(places):
        mean, size = place - _LINE_OF_TEXT * i, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, size = (other * others + mean * size) / (others + size), others + size
        pools.append((mean, size))
    lowest = _HEIGHT - _PAD - _LINE_OF_TEXT * (len(places) - 1)
    means = [max(min(mean, lowest), _PAD) for mean, size in pools for _ in range(size)]
    return [round(mean + _LINE_OF_TEXT * i, 1) for i, mean in enumerate(means)]


def _ticks(end: int, width: int) -> list[int]:
    """Return round numbers between 0 and `end` whose labels fit into a pixel width.

    The first multiple is always in the list.

    >>> [_ticks(end, 250) for end in (1, 3, 7, 100, 480, 2_800)]
    [[], [1, 2], [2, 4, 6], [50], [200, 400], [1000, 2000]]
    >>> [_ticks(end, 100) for end in (3, 2_800)]
    [[1, 2], [1000]]
    """
    step = _round_step(end)
    per_request = width / end
    multiples = range(step, end, step)
    # The label of `end` ends there; all others are centred.
    fitting = [at for at in multiples if per_request * (end - at) >= _label(at) / 2 + _label(end) + _GAP]
    apart = per_request * step >= _label(multiples[-1] if multiples else end) + _GAP
    return fitting if fitting and apart else [*multiples[:1]]


def _label(number: int) -> int:
    """Return the pixels of a number's label."""
    label = f"{number:,}"
    return _DIGIT * len(label) - (_DIGIT - _COMMA) * label.count(",")


def _round_step(end: int) -> int:
    """Return a round number of requests, about half of them.

    >>> [_round_step(end) for end in (1, 7, 100, 2_800)]
    [1, 2, 50, 1000]
    """
    power = int(10.0 ** (len(str(max(end // 2, 1))) - 1))
    steps = [power * factor for factor in (1, 2, 5)]
    return max((step for step in steps if step <= end / 2), default=1)
