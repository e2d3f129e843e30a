"""The page of a replay: how much each order found in the cache, as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from warmprefix_tools.replay.comparison import (
    TraceComparison,
    cache_name,
    choice_columns,
    choice_summary,
    compare,
    summary,
)
from warmprefix_tools.replay.results import ChoiceResult, Estimates, ReplayResult
from warmprefix_tools.report.amounts import percent, rounded
from warmprefix_tools.report.line_chart import Line, LineChart, scale_top
from warmprefix_tools.report.pages import render_page

__all__ = ["replay_page"]

_OTHERS_DRAWN = 3
_LEAST_CHANGE = 0.01
_CAUSES = {"new": "new", "order": "other order", "evicted": "evicted", "other": "questions"}


def replay_page(
    results: Sequence[ReplayResult], estimates: Estimates | None = None, choices: Sequence[ChoiceResult] = ()
) -> str:
    """Return a self-contained HTML page; equal arguments make equal bytes.

    Headlines, and charts with room for one cache size, are about the first size among a trace's results.

    Raises:
        ValueError: There is no result.
    """
    if not results:
        raise ValueError("results must hold one result or more, got none")
    estimates = estimates or Estimates()
    comparisons = compare(results, choices)
    sizes = list(dict.fromkeys(size for each in comparisons for size in each.capacities))
    after = [each.after for each in comparisons]
    return render_page(
        "replay/page.html",
        title="What ordering the context saves",
        sections=[_Section(each, number) for number, each in enumerate(comparisons, 1)],
        policies={policy for each in comparisons for policy, _ in each.cells},
        caches=[cache_name(size) for size in sizes],
        verdict=_verdict(after),
        top=scale_top(max(ratio for each in after for ratio in (each.today_hit_ratio, each.hit_ratio))),
        short_size=_short_size,
        estimates=estimates,
        unknown="\u2013",
    )


def _verdict(headlines: Sequence[ReplayResult]) -> str:
    """Return on how many traces ordering pays."""
    changes = [each.prefill_change for each in headlines]
    names = {each.policy for each in headlines}
    name = names.pop() if len(names) == 1 else "the best order"
    less = sum(each <= -_LEAST_CHANGE for each in changes)
    more = sum(each >= _LEAST_CHANGE for each in changes)
    even = len(changes) - less - more
    verdict = f"On {less} of {len(changes)} traces, {name} would have left less to prefill, on {more or 'none'} more"
    verdict += f"; on {even} it makes less than 1% of difference" if even else ""
    return f"{verdict}. Labels, notes and references are counted."


class _Ratios(NamedTuple):
    """A row of hit ratios, one for each cache size; None if it was not replayed."""

    policy: str | None
    """None for the application as it is."""
    cells: list[tuple[float | None, bool]]
    """Each ratio, and True if it is the best of its size."""
    lengths: list[float | None]
    look: str


class _Section:
    """One trace, as the template shows it."""

    def __init__(self, comparison: TraceComparison, number: int) -> None:
        self.comparison = comparison
        self.id = f"trace-{number}"
        self.after = comparison.after
        self.summary = summary(comparison)
        self.caches = [cache_name(size) for size in comparison.capacities]
        self.sizes = [_short_size(size) for size in comparison.capacities]
        self.drawn = comparison.best(_OTHERS_DRAWN)
        """Results in charts with room for a few."""
        best = [comparison.at(size)[0] for size in comparison.capacities]
        self._best = [each.hit_ratio for each in best]
        self._today = [each.today_hit_ratio for each in best]
        self.top = scale_top(max(self._best + self._today))
        self.most_missed = max(result.misses.total for result in self.drawn)

    @property
    def omitted(self) -> str:
        """Sentence on the orders that a chart of the best few leaves out."""
        headline = self.comparison.headline
        if len(self.drawn) == len(headline):
            return ""
        pair = ", ".join(each.policy for each in (self.after, self.comparison.before) if each is not None)
        return f" Of {len(headline)} orders: {pair} and the {_OTHERS_DRAWN} best others."

    @property
    def ratios(self) -> Iterator[_Ratios]:
        """Hit ratios of each policy, and today's unless relevance order is among them."""
        sizes, cells = self.comparison.capacities, self.comparison.cells
        policies = list(dict.fromkeys(result.policy for size in sizes for result in self.comparison.at(size)))
        rows: dict[str, list[float | None]] = {
            policy: [cells[policy, size].hit_ratio if (policy, size) in cells else None for size in sizes]
            for policy in policies
        }
        yield from (self._ratios(policy, ratios, self.look(policy)) for policy, ratios in rows.items())
        if self._today not in rows.values():
            yield self._ratios(None, self._today, "rest")

    def _ratios(self, policy: str | None, ratios: Sequence[float | None], look: str) -> _Ratios:
        cells = [
            (ratio, ratio is not None and percent(ratio) == percent(best))
            for ratio, best in zip(ratios, self._best, strict=True)
        ]
        return _Ratios(policy, cells, [None if ratio is None else ratio / self.top for ratio in ratios], look)

    @property
    def over_time(self) -> LineChart | None:
        """Hit ratio of all requests up to a time; None if the trace is too short."""
        lines = [
            Line(result.policy, self.look(result.policy), tuple(_hit_ratio_so_far(result)))
            for result in self.drawn
            if len(result.over_time) > 1
        ]
        return LineChart(lines) if lines else None

    @property
    def choice_head(self) -> list[str]:
        """Headings of the columns on chosen evidence."""
        return [" ".join(heading.split()) for heading, _ in choice_columns(self.comparison.choices)]

    def choice_rows(self, choice: ChoiceResult) -> Iterator[tuple[str, float, list[str], str]]:
        """Yield name, prefill as a share of the largest, cells and look of each arm of a choice."""
        columns = choice_columns(self.comparison.choices)
        largest = max(arm.net_prefilled_tokens for arm in choice.arms.values()) or 1
        for name, arm in choice.arms.items():
            cells = [cell(arm).replace("-", "\u2212") for _, cell in columns]
            look = "hero" if arm is choice.chosen else "base" if arm is choice.relevance else "rest"
            yield name, arm.net_prefilled_tokens / largest, cells, look

    def choice_summary(self, choice: ChoiceResult) -> str:
        """Return what a choice would save and change."""
        return choice_summary(choice)

    @property
    def causes(self) -> dict[str, str]:
        """Name of each cause of misses, by CSS class, which is a field of `Misses`."""
        misses = [result.misses for result in self.comparison.headline]
        return {cause: name for cause, name in _CAUSES.items() if any(getattr(each, cause) for each in misses)}

    def miss_parts(self, result: ReplayResult) -> list[tuple[str, float, str]]:
        """Return a result's misses as parts of a stacked bar."""
        counts = [(cause, name, getattr(result.misses, cause)) for cause, name in self.causes.items()]
        return [(cause, tokens / self.most_missed, f"{name}: {tokens:,} tokens") for cause, name, tokens in counts]

    def look(self, policy: str) -> str:
        """Return the colour and dashes of a policy, the same in all charts of a trace."""
        before = self.comparison.before
        if policy == self.after.policy:
            return "hero"
        if before is not None and policy == before.policy:
            return "base"
        others = [each.policy for each in self.drawn if each is not self.after and each is not before]
        return f"o{others.index(policy) + 1}" if policy in others else "rest"


def _hit_ratio_so_far(result: ReplayResult) -> Iterator[tuple[int, float]]:
    saved = total = 0
    for point in result.over_time:
        saved, total = saved + point.saved_tokens, total + point.total_tokens
        yield point.requests, saved / total if total else 0.0


def _short_size(capacity: int | None) -> str:
    """Return a cache size that is short enough for the heading of a column."""
    return "no bound" if capacity is None else rounded(capacity)
