"""The page of a demo: what the terminal shows, with charts and more of each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from warmprefix_tools.demo.demo_measures import PromptLine, pick_examples, prompt_lines, summarize_arm
from warmprefix_tools.demo.demo_options import DEFAULT_PAGE, DemoOptions
from warmprefix_tools.demo.demo_report import (
    COLUMNS,
    PLACEMENTS,
    comparison_rows,
    made_up_questions,
    notes,
    workload_summary,
)
from warmprefix_tools.demo.session import DemoResult, ServedTurn
from warmprefix_tools.report.line_chart import Line, LineChart
from warmprefix_tools.report.pages import render_page

__all__ = ["default_page", "demo_page"]

_TITLE = "What warmprefix saves"
_MOST_POINTS = 120
_LOOKS = {"all": "found", "part": "partly", "none": "new", "unknown": "new"}


def default_page() -> Path | None:
    """Return the file of the page if none is named; None if another file has that name."""
    if DEFAULT_PAGE.exists() and not DEFAULT_PAGE.is_file():
        return None
    try:
        with DEFAULT_PAGE.open(encoding="utf-8", errors="replace") as file:
            is_ours = f"<title>{_TITLE}</title>" in file.read(2_000)
    except FileNotFoundError:
        return DEFAULT_PAGE
    except OSError:
        return None
    return DEFAULT_PAGE if is_ours else None


def demo_page(result: DemoResult, options: DemoOptions) -> str:
    """Return a self-contained HTML page; equal arguments make equal bytes."""
    return render_page(
        "demo/page.html",
        title=_TITLE,
        summary=workload_summary(result, options),
        made_up="" if result.documents is None else made_up_questions(result.documents),
        columns=COLUMNS,
        sections=[
            (PLACEMENTS[placement], comparison_rows(*map(summarize_arm, arms)), _chart(*arms))
            for placement, arms in result.runs.items()
        ],
        examples=[
            (
                f"{example.title}, {example.placement}, turn {example.before.question.turn}",
                example.before.question.text,
                [(name, _bars(prompt_lines(served, example.placement))) for name, served in _columns(example[2:])],
                example.after.context.order_annotation,
            )
            for example in pick_examples(result.runs)
        ],
        notes=notes(result),
    )


def _columns(pair: Sequence[ServedTurn]) -> Iterator[tuple[str, ServedTurn]]:
    return zip(COLUMNS[:2], pair, strict=True)


def _bars(lines: Sequence[PromptLine]) -> list[tuple[str, str]]:
    """Return the look of each part of a prompt, and its name behind its place, as a note counts the places."""
    places = count(1)
    return [
        (
            "reference" if line.is_reference else _LOOKS[line.cached],
            line.label if line.is_history else f"{next(places)}. {line.label}",
        )
        for line in lines
    ]


def _chart(before: Sequence[ServedTurn], after: Sequence[ServedTurn]) -> LineChart | None:
    """Return the hit ratio of all requests up to each; None if the engine does not report it."""
    arms = {"warmprefix": (after, "hero"), "relevance order": (before, "base")}
    if len(before) < 2 or any(summarize_arm(served).hit_ratio is None for served, _ in arms.values()):
        return None
    return LineChart([Line(name, look, tuple(_so_far(served))) for name, (served, look) in arms.items()])


def _so_far(served: Sequence[ServedTurn]) -> Iterator[tuple[int, float]]:
    cached = prompt = 0
    step = -(-len(served) // _MOST_POINTS)
    for number, each in enumerate(served, 1):
        cached += each.answer.cached_tokens or 0
        prompt += each.answer.prompt_tokens or 0
        if number % step == 0 or number == len(served):
            yield number, cached / prompt if prompt else 0.0
