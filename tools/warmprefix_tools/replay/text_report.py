"""Tables and sentences of a replay for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import CacheUse
from warmprefix_tools.console import plain_table
from warmprefix_tools.replay.comparison import TraceComparison, choice_columns, choice_summary, compare, summary
from warmprefix_tools.replay.results import ChoiceResult, Estimates, ReplayResult
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible
from warmprefix_tools.traces.trace import Trace

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["print_conversations", "print_results"]

_TEXT_WIDTH = 100
_ANY_WIDTH = 10_000

_Column = tuple[str, Callable[[ReplayResult], str]]
"""Heading of two lines, and the cell of a result."""


def print_results(
    results: Sequence[ReplayResult],
    estimates: Estimates,
    console: Console,
    profile: CacheProfile | None = None,
    choices: Sequence[ChoiceResult] = (),
) -> None:
    """Print tables and summaries for each trace, and how to read the columns."""
    for comparison in compare(results, choices):
        console.print(Text(_title(comparison), style="bold"))
        _print_table(comparison, estimates, console, profile)
        _print_text(summary(comparison), console)
        if profile is not None:
            _print_text(_profile_summary(comparison.after, profile), console)
        if comparison.choices:
            console.print(_choice_table(comparison.choices), crop=False)
            _print_text(choice_summary(comparison.choices[0]), console)
        console.print()
    arms = [arm for choice in choices for arm in choice.arms.values() if arm is not choice.first]
    for line in [*_failures([*results, *arms]), *_legend(estimates, profile), *([_CHOICE_LEGEND] if choices else ())]:
        _print_text(line, console, style="dim")


def print_conversations(traces: Sequence[Trace], console: Console) -> None:
    """Print what a replay with placement `head` omits from traces with conversations."""
    number = sum(trace.conversations for trace in traces)
    if number:
        line = (
            f"{counted(number, 'conversation')} of several turns: if your application keeps their earlier context in"
            " the history, --placement tail shows how much references would spare."
        )
        _print_text(line, console, style="dim")


def _print_text(text: str, console: Console, style: str = "default") -> None:
    console.print(Text(text, style=style), width=min(console.width, _TEXT_WIDTH))


def _title(comparison: TraceComparison) -> str:
    requests = counted(comparison.headline[0].requests, "request")
    k = f"k = {comparison.k}"
    if comparison.choices:
        k += f" of up to {counted(comparison.choices[0].candidates, 'candidate')}"
    return f"{visible(comparison.trace)}: {requests}, {k}, placement {comparison.placement}"


def _print_table(
    comparison: TraceComparison, estimates: Estimates, console: Console, profile: CacheProfile | None
) -> None:
    """Print one table, or two if the console is too narrow; no number is ever cut."""
    counts, times = _columns(comparison, estimates, profile)
    whole = _table(comparison, [*counts, *times])
    fits = whole.width is not None and whole.width <= console.width
    for table in [whole] if fits else [_table(comparison, counts), _table(comparison, times)]:
        console.print(table, crop=False)


def _columns(
    comparison: TraceComparison, estimates: Estimates, profile: CacheProfile | None
) -> tuple[list[_Column], list[_Column]]:
    """Return the columns of counts, and those of time and money."""
    counts: list[_Column] = [
        ("gross\nhit ratio", lambda result: f"{result.hit_ratio:.1%}"),
        ("referred\nto", lambda result: f"{result.reference_tokens:,}"),
        ("net\nsaved", lambda result: f"{0 - result.prefill_change:+.1%}"),
        ("net\ntokens", lambda result: f"{result.net_saved_tokens:+,}"),
        ("requests\nbetter", lambda result: _share(result.gained_requests, result)),
        ("\nworse", lambda result: _share(result.lost_requests, result)),
    ]
    if not any(result.reference_tokens for result in comparison.cells.values()):
        del counts[1]
    if profile is not None:
        counts.append(("profile\nsaved", lambda result: f"{result.profile_saved_share:+.1%}"))
        if profile.read_price or profile.marks:
            counts.append(("\ncost", lambda result: _cost(result.profile_use, profile)))
            counts.append(("\ntoday", lambda result: _cost(result.today_profile_use, profile)))
    times: list[_Column] = [
        ("plan µs\np50", lambda result: f"{result.plan_us_p50:,.0f}"),
        ("\np99", lambda result: f"{result.plan_us_p99:,.0f}"),
    ]
    if estimates.prefill_rate is not None:
        times.append(("est. TTFT\nms", lambda result: f"{1e3 * (estimates.ttft_seconds(result) or 0.0):,.1f}"))
    if estimates.price is not None:
        times.append(("est.\ncost", lambda result: f"{estimates.cost(result) or 0.0:,.2f}"))
    return counts, times


def _table(comparison: TraceComparison, columns: Sequence[_Column]) -> Table:
    """Return a table that is as wide as its cells, on any console."""
    results = list(comparison.cells.values())
    table = plain_table("cache\n  policy", *(heading for heading, _ in columns))
    for capacity in comparison.capacities:
        same_size = [result for result in results if result.capacity_tokens == capacity]
        least = min(result.prefill_change for result in same_size)
        table.add_row(Text("no bound" if capacity is None else f"{capacity:,} tokens", style="dim"))
        for result in same_size:
            best = result.prefill_change == least < 0
            cells = [cell(result) for _, cell in columns]
            table.add_row(f"  {result.policy}", *cells, style="bold" if best else None)
    table.width = Console(width=_ANY_WIDTH).measure(table).maximum
    return table


def _choice_table(choices: Sequence[ChoiceResult]) -> Table:
    """Return a table of what is fed and computed, one row per arm and cache size."""
    columns = choice_columns(choices)
    table = plain_table("cache\n  evidence", *(heading for heading, _ in columns))
    for choice in choices:
        capacity = choice.chosen.capacity_tokens
        table.add_row(Text("no bound" if capacity is None else f"{capacity:,} tokens", style="dim"))
        for name, arm in choice.arms.items():
            cells = [cell(arm) for _, cell in columns]
            table.add_row(f"  {name}", *cells, style="bold" if arm is choice.chosen else None)
    table.width = Console(width=_ANY_WIDTH).measure(table).maximum
    return table


def _profile_summary(result: ReplayResult, profile: CacheProfile) -> str:
    saved = result.profile_saved_share
    change = f"{abs(saved):.1%} {'less' if saved > 0 else 'more'}" if round(saved, 3) else "as much"
    return f"In a cache such as {profile.name}, {result.policy} would leave {change} to prefill."


def _cost(use: CacheUse | None, profile: CacheProfile) -> str:
    if use is None:
        return ""
    cost = use.cost(profile)
    money = "" if profile.token_price is None else f" ${cost * profile.token_price:,.2f}"
    return f"{cost / max(use.tokens, 1):.1%}{money}"


def _share(requests: int, result: ReplayResult) -> str:
    return f"{requests / max(result.requests, 1):.0%}"


def _failures(results: Sequence[ReplayResult]) -> list[str]:
    policies = [
        f"{result.policy} failed in {counted(result.policy_errors, 'request')} of {visible(result.trace)};"
        " they count in relevance order."
        for result in results
        if result.policy_errors
    ]
    tokenizers = [
        f"The tokenizer failed for {counted(result.tokenizer_errors, 'text')} of {result.policy}; their tokens are"
        " estimated."
        for result in results
        if result.tokenizer_errors
    ]
    return policies + tokenizers


_CHOICE_LEGEND = (
    "chosen: evidence chosen among all candidates in view of the cache. by chance: as many exchanged and extra "
    "passages, drawn by lot among those of the same tolerance. exchanged: passages in place of one that relevance "
    "feeds. gold: passages that the trace names, such as clicked or cited ones; lost, won: requests that lack one "
    "that relevance feeds, or have one that it does not. most fed 1 %: share of all fed passages that the most-fed "
    "ones make up, which are 1 % of those that relevance feeds."
)


def _legend(estimates: Estimates, profile: CacheProfile | None) -> list[str]:
    lines = [
        "gross: without labels and notes. net: prefill, in percent and in tokens, that the order saves against the"
        " application as it is, in relevance order, with nothing de-duplicated and nothing written; labels, notes and"
        " references count. better, worse: requests that prefill less or more than that, net.",
    ]
    if profile is not None:
        lines.append(
            f"profile: whole prompts in a cache such as {profile.name}, as of {profile.as_of}; nothing expires in it."
            " saved: what there is less to prefill, net. cost, today: price of the input in percent of an uncached one,"
            f" writes included{'' if profile.token_price is None else ', and in dollars'}."
        )
    if estimates.prefill_rate is not None:
        lines.append(
            f"est. TTFT: the prefill of a request at {estimates.prefill_rate:,.15g} tokens per second, mean, on an"
            " idle engine; the text around the context is left out."
        )
    if estimates.price is not None:
        cached = f"{estimates.cached_price:g}" if estimates.cached_price else "nothing"
        lines.append(
            f"est. cost: of all prompts, at {estimates.price:g} per million prefilled tokens and {cached} per"
            " million cached ones; the text around the context is left out."
        )
    return lines
