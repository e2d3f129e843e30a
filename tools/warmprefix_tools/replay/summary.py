"""What a replay means to whoever ran it, in a few sentences."""

from __future__ import annotations

from warmprefix_tools.replay.results import Comparison, ReplayResult, cache_name
from warmprefix_tools.report.amounts import percent, whole_shares

__all__ = ["summary"]

_WORTH_SAYING = 0.01


def summary(comparison: Comparison) -> str:
    """On the default policy, or else the best one, beside today, with the first cache size that was asked for."""
    after = comparison.after
    if not after.total_tokens:
        return "The requests held no context, so there is nothing to save."
    return " ".join([_finding(after), _prefill(after), _requests(after)])


def _finding(result: ReplayResult) -> str:
    what = "context" if result.placement == "head" else "prompts"
    found = percent(result.hit_ratio)
    return (
        f"With a cache {cache_name(result.capacity_tokens)}, {result.policy} would have found {found} of the {what} in"
        f" it; as things are, it is {percent(result.today_hit_ratio)}."
    )


def _prefill(result: ReplayResult) -> str:
    change = result.prefill_change
    direction = f"{abs(change):.1%} {'less' if change < 0 else 'more'} to prefill, order annotations included"
    if change <= -_WORTH_SAYING:
        return f"That is {direction}."
    if change < _WORTH_SAYING:
        return f"That hardly makes a difference: {direction}.{_main_cause(result)}"
    if not result.annotation_tokens:
        return f"It does not pay here: {direction}."
    return (
        f"It does not pay here: {direction}. One takes {result.annotation_tokens / result.reordered_requests:,.0f}"
        f" tokens, where a request has {result.total_tokens / result.requests:,.0f}."
    )


def _main_cause(result: ReplayResult) -> str:
    """Of the misses."""
    causes = {
        "that never came before": result.misses.new,
        "that came before, but never behind the same ones": result.misses.order,
        "that the cache had evicted again": result.misses.evicted,
    }
    cause = max(causes, key=causes.__getitem__)
    return f" {causes[cause] / result.prefilled_tokens:.0%} of it is blocks {cause}." if causes[cause] else ""


def _requests(result: ReplayResult) -> str:
    # Whether a request is changed and whether it gains are two questions: only the answers to one add up to 100 %.
    gained, lost, even = whole_shares([result.gained_requests, result.lost_requests, result.even_requests])
    return (
        f"Of the requests, {gained} would have less to prefill, {lost} more and {even} as much as today;"
        f" {result.untouched_requests / result.requests:.0%} would be left exactly as they are."
    )
