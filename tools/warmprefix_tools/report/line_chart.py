"""Geometry of a chart of lines over a run of requests.

The template draws it: `line_chart` in charts.html. Vertical places are pixels; the plot itself is stretched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from warmprefix_tools.report.amounts import percent

__all__ = ["Line", "LineChart", "scale_top"]

_HEIGHT = 230
_PAD = 12  # above and below the plot, for half a line of text
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
    def title(self) -> str:
        """Its name, and its share at the end."""
        return f"{self.name} {percent(self.points[-1][1])}"


class LineChart:
    """One line or more over each other; the first is drawn on top."""

    height: ClassVar = _HEIGHT
    pad: ClassVar = _PAD
    grid: ClassVar = _GRID

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        """The lines."""
        self.end = max(line.points[-1][0] for line in lines)
        """Number of requests."""
        columns = [dict(line.points) for line in lines]
        self._places = sorted({at for line in lines for at, _ in line.points})
        self.rows = [
            (f"{at:,}", *(percent(column[at]) if at in column else "\u2013" for column in columns))
            for at in self._places
        ]
        """Numbers of the chart: a row per number of requests, with a cell per line."""
        self._top = scale_top(max(share for line in lines for _, share in line.points))

    @property
    def legend(self) -> list[Line]:
        """The lines, the highest at the end first."""
        return sorted(self.lines, key=lambda line: -line.points[-1][1])

    @property
    def scale(self) -> list[tuple[str, float]]:
        """Labels of the vertical scale with their heights."""
        shares = (0, self._top / 2, self._top)
        room = _HEIGHT - 2 * _PAD
        return [(f"{round(100 * share, 3):g}%", round(_PAD + room * (1 - share / self._top), 1)) for share in shares]

    @property
    def polylines(self) -> Iterator[tuple[str, str]]:
        """CSS class and points of each line, on the grid, in the order of drawing."""
        for line in reversed(self.lines):
            places = (f"{self._x(at)},{round(_GRID * (1 - share / self._top))}" for at, share in line.points)
            yield line.class_, " ".join(places)

    @property
    def columns(self) -> Iterator[tuple[int, int, str]]:
        """Left edge, right edge and hint of each column under a pointer."""
        left = 0
        for at, (requests, *values) in zip(self._places, self.rows, strict=True):
            hint = ", ".join(f"{line.name} {value}" for line, value in zip(self.lines, values, strict=True))
            yield left, self._x(at), f"{requests} requests: {hint}"
            left = self._x(at)

    def _x(self, requests: int) -> int:
        return round(_GRID * requests / self.end)
