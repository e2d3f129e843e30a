"""What the person at the keyboard reads."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.errors import MissingExtraError
from warmprefix.replay.compared import Comparison, compare
from warmprefix.replay.estimates import Estimates
from warmprefix.replay.result import ReplayResult
from warmprefix.replay.summary import summary

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["print_results"]

_TEXT_WIDTH = 100


def print_results(results: Sequence[ReplayResult], estimates: Estimates, console: Console) -> None:
    """A table for each trace, what it means, and how to read the columns."""
    for comparison in compare(results):
        console.print(Text(_title(comparison), style="bold"))
        console.print(_table(comparison, estimates))
        _print_text(summary(comparison), console)
        console.print()
    for line in [*_failures(results), *_legend(estimates)]:
        _print_text(line, console, style="dim")


def _print_text(text: str, console: Console, style: str = "default") -> None:
    console.print(Text(text, style=style), width=min(console.width, _TEXT_WIDTH))


def _title(comparison: Comparison) -> str:
    requests = comparison.headline[0].requests
    return f"{comparison.trace}: {requests:,} requests, k = {comparison.k}, placement {comparison.placement}"


def _table(comparison: Comparison, estimates: Estimates) -> Table:
    results = list(comparison.cells.values())
    references = any(result.reference_tokens for result in results)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cache\n  policy", no_wrap=True)
    columns = ["hit\nratio", "tokens\nsaved", *(["referred\nto"] if references else []), "\nprefill"]
    columns += ["requests\nbetter", "\nworse", "plan µs\np50", "\np99"]
    columns += [] if estimates.prefill_rate is None else ["est. TTFT\nms"]
    columns += [] if estimates.price is None else ["est.\ncost"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for capacity in comparison.capacities:
        same_size = [result for result in results if result.capacity_tokens == capacity]
        least = min(result.prefill_change for result in same_size)
        table.add_row(Text("no bound" if capacity is None else f"{capacity:,} tokens", style="dim"))
        for result in same_size:
            best = result.prefill_change == least < 0
            table.add_row(*_cells(result, estimates, references), style="bold" if best else None)
    return table


def _cells(result: ReplayResult, estimates: Estimates, references: bool) -> list[str]:
    cells = [f"  {result.policy}", f"{result.hit_ratio:.1%}", f"{result.saved_tokens:,}"]
    cells += [f"{result.reference_tokens:,}"] if references else []
    cells += [f"{result.prefill_change:+.1%}", _share(result.gained_requests, result)]
    cells += [_share(result.lost_requests, result), f"{result.plan_us_p50:,.0f}", f"{result.plan_us_p99:,.0f}"]
    seconds, cost = estimates.ttft_seconds(result), estimates.cost(result)
    cells += [] if seconds is None else [f"{1e3 * seconds:,.1f}"]
    cells += [] if cost is None else [f"{cost:,.2f}"]
    return cells


def _share(requests: int, result: ReplayResult) -> str:
    return f"{requests / max(result.requests, 1):.0%}"


def _failures(results: Sequence[ReplayResult]) -> list[str]:
    return [
        f"{result.policy} failed in {result.policy_errors:,} requests of {result.trace}; they count in relevance order."
        for result in results
        if result.policy_errors
    ]


def _legend(estimates: Estimates) -> list[str]:
    lines = [
        "prefill: change against the application as it is, in relevance order and with nothing de-duplicated; order"
        " annotations count. better, worse: requests that prefill less or more than so, annotations apart.",
    ]
    if estimates.prefill_rate is not None:
        lines.append(
            f"est. TTFT: the prefill of a request at {estimates.prefill_rate:,.0f} tokens a second, mean, on an idle"
            " engine; what stands around the context is left out."
        )
    if estimates.price is not None:
        cached = f"{estimates.cached_price:g}" if estimates.cached_price else "nothing"
        lines.append(
            f"est. cost: of all prompts, at {estimates.price:g} for a million prefilled tokens and {cached} for a"
            " million cached ones; what stands around the context is left out."
        )
    return lines
