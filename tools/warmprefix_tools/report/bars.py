"""Bars and dots: shares of a width, drawn to fill whatever width there is."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix_tools.report.markup import Markup, element

__all__ = ["bars", "dumbbell", "fills", "scale_top", "stack", "swatch"]

_LANE = 7
_GAP = 2
_STACK_HEIGHT = 18
_DOTS_HEIGHT = 22


def bars(lengths: Sequence[float | None], *, class_: str) -> Markup:
    """One bar below the other, each with its length as a share of the width; None leaves a gap.

    Decoration for numbers that stand beside it, so it has no name of its own.
    """
    height = len(lengths) * (_LANE + _GAP) - _GAP
    lanes = [
        element("rect", x="0", y=i * (_LANE + _GAP), width=_share(length), height=_LANE, class_=f"lane-{min(i, 2)}")
        for i, length in enumerate(lengths)
        if length is not None
    ]
    return element("svg", *lanes, class_=f"bars {class_}", width="100%", height=height, aria_hidden="true")


def stack(parts: Sequence[tuple[str, float, str]]) -> Markup:
    """Bars end to end: of each its class, its length as a share of the width, and what a pointer is told of it."""
    drawn: list[Markup] = []
    start = 0.0
    for class_, length, hint in parts:
        if length > 0:
            hover = element("title", hint)
            part = element("rect", hover, class_=class_, x=_share(start), width=_share(length), height=_STACK_HEIGHT)
            drawn.append(part)
        start += length
    return element("svg", *drawn, class_="stack", width="100%", height=_STACK_HEIGHT, aria_hidden="true")


def dumbbell(before: float, after: float, *, class_: str) -> Markup:
    """From a ring to a dot, each at a share of the width."""
    middle = _DOTS_HEIGHT / 2
    marks = [
        element("line", x1="0%", x2="100%", y1=middle, y2=middle, class_="track"),
        element("line", x1=_share(before), x2=_share(after), y1=middle, y2=middle, class_="change"),
        element("circle", cx=_share(before), cy=middle, r="5", class_="before"),
        element("circle", cx=_share(after), cy=middle, r="6", class_="after"),
    ]
    return element("svg", *marks, class_=f"dumbbell {class_}", width="100%", height=_DOTS_HEIGHT, aria_hidden="true")


def swatch(class_: str) -> Markup:
    """A patch of what a part of a stack is filled with."""
    patch = element("rect", width="14", height="14", class_=class_)
    return element("svg", patch, class_="swatch", width="14", height="14", aria_hidden="true")


def fills() -> Markup:
    """The hatching and dots that parts of a stack are filled with; once in a page that has stacks."""
    hatched = element("path", d="M0 6 6 0M-1 1 1 -1M5 7 7 5")
    dotted = element("circle", cx="3", cy="3", r="1.6")
    patterns = [_pattern("hatched", hatched), _pattern("dotted", dotted)]
    return element("svg", element("defs", *patterns), class_="patterns", aria_hidden="true")


def _pattern(id: str, figure: Markup) -> Markup:
    ground = element("rect", width="6", height="6")
    return element("pattern", ground, figure, id=id, width="6", height="6", patternUnits="userSpaceOnUse")


def scale_top(largest: float) -> float:
    """Where a scale of shares that starts at 0 should end.

    >>> [scale_top(share) for share in (0.0, 0.004, 0.013, 0.41, 0.97)]
    [0.01, 0.01, 0.02, 0.5, 1.0]
    """
    return next((top for top in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8) if top >= largest), 1.0)


def _share(share: float) -> str:
    return f"{round(100 * share, 2):.15g}%"
