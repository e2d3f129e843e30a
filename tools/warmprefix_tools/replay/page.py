"""The page of a replay: how much each order found in the cache, as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from warmprefix.plan import Placement
from warmprefix_tools.replay.comparison import TraceComparison, cache_name, compare, summary
from warmprefix_tools.replay.results import Estimates, ReplayResult
from warmprefix_tools.report.amounts import change, counted, duration, percent, rounded, whole_shares
from warmprefix_tools.report.line_chart import Line, LineChart, scale_top
from warmprefix_tools.report.pages import render_page

__all__ = ["replay_page"]

_OTHERS_DRAWN = 3
_LEAST_CHANGE = 0.01
_UNKNOWN = "\u2013"
_PLACEMENTS: dict[Placement, str] = {
    "head": "tokens of context, rebuilt each turn in front of the history",
    "tail": "tokens of prompts, whose context stays in the history",
}
_OTHER_ORDER: dict[Placement, str] = {
    "head": "are what ordering might still save",
    "tail": "had come before, but behind other context or another history",
}
_CAUSES = {"new": "new", "order": "other order", "evicted": "evicted", "other": "questions and references"}


def replay_page(results: Sequence[ReplayResult], estimates: Estimates | None = None) -> str:
    """Return a self-contained HTML page about one result or more; equal arguments make equal bytes.

    Headlines, and charts with room for one cache size, are about the first size among a trace's results.

    Raises:
        ValueError: There is no result.
    """
    if not results:
        raise ValueError("results must hold one result or more, got none")
    estimates = estimates or Estimates()
    comparisons = compare(results)
    sizes = list(dict.fromkeys(size for each in comparisons for size in each.capacities))
    after = [each.after for each in comparisons]
    return render_page(
        "replay/page.html",
        title="What ordering the context saves",
        sections=[_Section(each, estimates, number) for number, each in enumerate(comparisons, 1)],
        policies={policy for each in comparisons for policy, _ in each.cells},
        caches=[cache_name(size) for size in sizes],
        verdict=_verdict(after),
        top=scale_top(max(ratio for each in after for ratio in (each.today_hit_ratio, each.hit_ratio))),
        assumptions=_assumptions(estimates),
        other_order=_OTHER_ORDER,
        unknown=_UNKNOWN,
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
    return f"{verdict}. The sentences that give the model the order of relevance are counted."


def _assumptions(estimates: Estimates) -> list[str]:
    assumptions = []
    if estimates.prefill_rate is not None:
        assumptions.append(f"a prefill of {estimates.prefill_rate:,.15g} tokens per second")
    if estimates.price is not None:
        assumptions.append(f"a price of {estimates.price:g} per million prefilled tokens")
        assumptions.append(f"{estimates.cached_price:g} per million cached ones")
    return assumptions


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

    def __init__(self, comparison: TraceComparison, estimates: Estimates, number: int) -> None:
        self._comparison = comparison
        self._estimates = estimates
        self.id = f"trace-{number}"
        self.trace = comparison.trace
        self.placement = comparison.placement
        self.after = comparison.after
        self.summary = summary(comparison)
        self.caches = [cache_name(size) for size in comparison.capacities]
        self.sizes = [_short_size(size) for size in comparison.capacities]
        self.with_cache = f"with a cache {self.caches[0]}"
        self._drawn = comparison.best(_OTHERS_DRAWN)
        best = [comparison.at(size)[0] for size in comparison.capacities]
        self._best = [each.hit_ratio for each in best]
        self._today = [each.today_hit_ratio for each in best]
        self.top = scale_top(max(self._best + self._today))
        self.most_missed = max(result.misses.total for result in self._drawn)

    @property
    def facts(self) -> str:
        """Size of the trace."""
        return (
            f"{counted(self.after.requests, 'request')} of up to {counted(self._comparison.k, 'block')};"
            f" {rounded(self.after.today_total_tokens)} {_PLACEMENTS[self.placement]}"
        )

    @property
    def omitted(self) -> str:
        """Sentence on the orders that a chart of the best few leaves out."""
        if len(self._drawn) == len(self._comparison.headline):
            return ""
        pair = (self.after, self._comparison.before)
        names = ", ".join(result.policy for result in pair if result is not None)
        return f" Of {len(self._comparison.headline)} orders: {names} and the {_OTHERS_DRAWN} best others."

    @property
    def tiles(self) -> Iterator[tuple[str, str, str | None]]:
        """Number, meaning and CSS class of each headline figure."""
        after = self.after
        yield percent(after.hit_ratio), f"hit ratio with {after.policy}", "hero"
        yield percent(after.today_hit_ratio), "hit ratio today", None
        spared = after.today_prefilled_tokens - after.prefilled_tokens - after.annotation_tokens
        direction = "less" if spared >= 0 else "more"
        yield change(after.prefill_change), f"to prefill: {rounded(abs(spared))} tokens {direction}", None
        if after.reference_tokens:
            yield rounded(after.reference_tokens), "tokens removed as references", None
        seconds, seconds_today = self._estimates.ttft_seconds(after), self._estimates.ttft_seconds_today(after)
        if seconds is not None and seconds_today is not None:
            yield duration(1e6 * seconds), f"to prefill one, estimated; today {duration(1e6 * seconds_today)}", None
        cost, cost_today = self._estimates.cost(after), self._estimates.cost_today(after)
        if cost is not None and cost_today is not None:
            yield f"{cost:,.2f}", f"to pay, estimated; today {cost_today:,.2f}", None

    @property
    def by_size(self) -> Iterator[tuple[str, ReplayResult, ReplayResult | None]]:
        """For each cache size the result that found most, and the result of the headline's policy."""
        for size in self._comparison.capacities:
            yield _short_size(size), self._comparison.at(size)[0], self._comparison.cells.get((self.after.policy, size))

    @property
    def results(self) -> Iterator[tuple[str, ReplayResult]]:
        """Every result with its cache size."""
        return ((_short_size(result.capacity_tokens), result) for result in self._comparison.cells.values())

    @property
    def ratios(self) -> Iterator[_Ratios]:
        """Hit ratios of each policy; and today's, if relevance order is not among the policies."""
        sizes, cells = self._comparison.capacities, self._comparison.cells
        policies = list(dict.fromkeys(result.policy for size in sizes for result in self._comparison.at(size)))
        rows: dict[str, list[float | None]] = {
            policy: [cells[policy, size].hit_ratio if (policy, size) in cells else None for size in sizes]
            for policy in policies
        }
        yield from (self._ratios(policy, ratios, self._look(policy)) for policy, ratios in rows.items())
        if self._today not in rows.values():
            yield self._ratios(None, self._today, "rest")

    def _ratios(self, policy: str | None, ratios: Sequence[float | None], look: str) -> _Ratios:
        cells = [
            (ratio, ratio is not None and percent(ratio) == percent(best))
            for ratio, best in zip(ratios, self._best, strict=True)
        ]
        return _Ratios(policy, cells, [None if ratio is None else ratio / self.top for ratio in ratios], look)

    @property
    def shares(self) -> Iterator[tuple[ReplayResult, list[str]]]:
        """Shares of the requests that prefill less than today, more, as much; and of those sent as today."""
        for result in self._comparison.headline:
            if result not in self._drawn:
                continue
            if not result.requests:
                yield result, [_UNKNOWN] * 4
                continue
            shares = whole_shares([result.gained_requests, result.lost_requests, result.even_requests])
            yield result, [*shares, f"{result.untouched_requests / result.requests:.0%}"]

    @property
    def over_time(self) -> LineChart | None:
        """Hit ratio of all requests up to a time; None if the trace is too short for a line."""
        lines = [
            Line(result.policy, self._look(result.policy), tuple(_hit_ratio_so_far(result)))
            for result in self._drawn
            if len(result.over_time) > 1
        ]
        return LineChart(lines) if lines else None

    @property
    def causes(self) -> list[tuple[str, str]]:
        """CSS class and name of each cause of misses."""
        headline = self._comparison.headline
        return [
            (cause, name) for cause, name in _CAUSES.items() if any(getattr(each.misses, cause) for each in headline)
        ]

    @property
    def cause_names(self) -> list[str]:
        return [name[0].upper() + name[1:] for _, name in self.causes]

    @property
    def misses(self) -> Iterator[tuple[ReplayResult, str, list[tuple[str, float, str]]]]:
        """Bars end to end for the misses of each order."""
        for result in self._drawn:
            counts = [(cause, name, getattr(result.misses, cause)) for cause, name in self.causes]
            parts = [(cause, tokens / self.most_missed, f"{name}: {tokens:,} tokens") for cause, name, tokens in counts]
            yield result, self._look(result.policy), parts

    @property
    def miss_counts(self) -> Iterator[tuple[str, list[str]]]:
        """Policy and misses by cause, and all of them."""
        for result in self._comparison.headline:
            counts = [getattr(result.misses, cause) for cause, _ in self.causes]
            yield result.policy, [f"{tokens:,}" for tokens in (*counts, result.misses.total)]

    def _look(self, policy: str) -> str:
        """Return the colour and dashes of a policy, the same in all charts of a trace."""
        before = self._comparison.before
        if policy == self.after.policy:
            return "hero"
        if before is not None and policy == before.policy:
            return "base"
        others = [each.policy for each in self._drawn if each is not self.after and each is not before]
        return f"o{others.index(policy) + 1}" if policy in others else "rest"


def _hit_ratio_so_far(result: ReplayResult) -> Iterator[tuple[int, float]]:
    saved = total = 0
    for point in result.over_time:
        saved, total = saved + point.saved_tokens, total + point.total_tokens
        yield point.requests, saved / total if total else 0.0


def _short_size(capacity: int | None) -> str:
    """Return a cache size that is short enough for the heading of a column."""
    return "no bound" if capacity is None else rounded(capacity)
