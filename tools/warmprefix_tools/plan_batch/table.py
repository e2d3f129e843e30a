"""What the person at the keyboard reads."""

from __future__ import annotations

from warmprefix.batch import BatchPlan, BoundKind
from warmprefix.errors import MissingExtraError
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.markup import visible

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["print_plan"]

_TEXT_WIDTH = 100

_BOUNDS: dict[BoundKind, str] = {
    "spanning forest": "exact maximum spanning forest",
    "best partners": "every request with its best partner",
    "sampled": "estimated from some of the requests",
    "every block once": "every block prefilled once",
}


def print_plan(plan: BatchPlan, trace: str, saved_before: int, console: Console) -> None:
    """What a plan saves, of what could be saved, and how to read it.

    Args:
        plan: Of the whole trace.
        trace: Its name.
        saved_before: Tokens that the same cache would hold if the requests ran as they came.
        console: Where to print.
    """
    bounded = plan.capacity_tokens is not None
    cache = f"a cache of {plan.capacity_tokens:,} tokens" if bounded else "a cache without bounds"
    total = max(plan.total_tokens, 1)
    console.print(Text(f"{visible(trace)}: {counted(len(plan), 'request')}, {cache}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in (
        ("planner", plan.planner),
        ("hit ratio", f"{saved_before / total:.1%} as they came -> {plan.hit_ratio:.1%} planned"),
        ("tokens saved", f"{plan.saved_tokens:,} of {plan.total_tokens:,}"),
        ("upper bound", f"{plan.upper_bound:,} ({plan.upper_bound / total:.1%}), {_BOUNDS[plan.bound]}"),
        ("planned in", f"{plan.seconds:,.2f} s on {plan.device}"),
    ):
        table.add_row(name, Text(value))
    console.print(table, crop=False)
    legend = (
        "as they came: blocks in relevance order, requests in the order of the trace, the same cache. upper bound: the"
        " most that any plan could save, whatever the cache."
    )
    console.print(Text(legend, style="dim"), width=min(console.width, _TEXT_WIDTH))
