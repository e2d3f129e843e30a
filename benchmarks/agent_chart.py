"""The picture of docs/agents.md: every agent's load over the hot-spot workload, with three ways to share it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

__all__ = ["CHARTED", "load_chart"]

CHARTED = {"hash": "Hash of the document", "affinity without a bound": "Affinity alone", "AgentRouter": "AgentRouter"}

_WIDTH, _HEIGHT = 250, 170
_LEFT, _TOP, _GAP, _BELOW = 46, 44, 26, 46
_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff }
text { fill: #444 } .title { font-weight: 600; fill: #111 } .quiet { fill: #777 }
.agent { fill: none; stroke: #7a8ca5; stroke-width: 1; opacity: .55 }
.top { fill: none; stroke: #c2410c; stroke-width: 1.8 }
.ours .top { stroke: #0f766e }
.grid { stroke: #e4e4e4 } .bound { stroke: #111; stroke-dasharray: 4 3 }
"""


def load_chart(workload: str, series: Mapping[str, Sequence[tuple[int, Sequence[float]]]]) -> str:
    """Return an SVG with a panel for each way, a line for each agent, the highest load and the bound.

    Args:
        workload: Its name.
        series: For each of `CHARTED`, at regular intervals, each agent's load over the highest that the bound allows.
    """
    highest = max(load for points in series.values() for _, loads in points for load in loads)
    top = float(int(highest) + 1)
    panels = [_panel(number, name, title, series[name], top) for number, (name, title) in enumerate(CHARTED.items())]
    width = _LEFT + len(CHARTED) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + _BELOW
    summary = ", ".join(f"{title}: at most {_most(series[name]):.2f}" for name, title in CHARTED.items())
    drawing = element(
        "svg",
        element("title", f"Load of each agent over the highest that the bound allows, {workload}. {summary}."),
        element("style", Markup(_STYLE)),
        element("rect", width=width, height=height, fill="#fff"),
        element("text", "load / bound", x=_LEFT - 38, y=_TOP - 26, class_="quiet"),
        *panels,
        element(
            "text", f"requests ({workload})", x=_LEFT + (width - _LEFT) / 2, y=height - 8, text_anchor="middle",
            class_="quiet",
        ),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
    )  # fmt: skip
    return f"{drawing}\n"


def element(name: str, /, *children: str | Markup, **attributes: Any) -> Markup:
    """Return an escaped element; in attribute names, underscores stand for hyphens, and a last one is dropped."""
    written = [
        (key.removesuffix("_").replace("_", "-"), value if isinstance(value, str) else f"{round(value, 2):.15g}")
        for key, value in attributes.items()
        if value is not None
    ]
    head = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in written)
    body = Markup("").join(children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, head, body)


def _most(points: Sequence[tuple[int, Sequence[float]]]) -> float:
    return max(load for _, loads in points for load in loads)


def _panel(number: int, name: str, title: str, points: Sequence[tuple[int, Sequence[float]]], top: float) -> Markup:
    left = _LEFT + number * (_WIDTH + _GAP)
    end = points[-1][0]

    def x(request: int) -> float:
        return left + _WIDTH * request / end

    def y(load: float) -> float:
        return _TOP + _HEIGHT * (1 - load / top)

    def line(loads: Sequence[float], class_: str) -> Markup:
        places = zip(points, loads, strict=True)
        path = " ".join(f"{x(request):.1f},{y(load):.1f}" for (request, _), load in places)
        return element("polyline", points=path, class_=class_)

    ticks: list[Markup] = []
    for load in range(0, int(top) + 1, 1 if top <= 6 else 2):
        ticks.append(element("line", x1=left, x2=left + _WIDTH, y1=y(load), y2=y(load), class_="grid"))
        if number == 0:
            ticks.append(element("text", str(load), x=left - 8, y=y(load) + 4, text_anchor="end"))
    for request, anchor in ((0, "start"), (end, "end")):
        ticks.append(element("text", f"{request:,}", x=x(request), y=_TOP + _HEIGHT + 16, text_anchor=anchor))
    agents = [line([loads[i] for _, loads in points], "agent") for i in range(len(points[0][1]))]
    return element(
        "g",
        element("text", title, x=left, y=_TOP - 8, class_="title"),
        element("text", f"at most {_most(points):.2f}", x=left + _WIDTH, y=_TOP - 8, text_anchor="end"),
        *ticks,
        *agents,
        line([max(loads) for _, loads in points], "top"),
        element("line", x1=left, x2=left + _WIDTH, y1=y(1), y2=y(1), class_="bound"),
        class_="ours" if name == "AgentRouter" else None,
    )
