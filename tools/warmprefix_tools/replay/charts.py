"""The charts of one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from warmprefix.plan import Placement
from warmprefix_tools.replay.compared import Comparison, cache_name
from warmprefix_tools.replay.result import Misses, ReplayResult
from warmprefix_tools.report.amounts import duration, percent, rounded, whole_shares
from warmprefix_tools.report.bars import bars, scale_top, stack, swatch
from warmprefix_tools.report.lines import Line, line_chart, line_rows
from warmprefix_tools.report.markup import Markup, element, outside
from warmprefix_tools.report.tables import data, row, table

__all__ = ["by_policy", "cache_size", "listed", "misses", "over_time", "per_request"]

_OTHERS_DRAWN = 3
_UNKNOWN = "\u2013"
_CAUSES: tuple[tuple[str, str, Callable[[Misses], int]], ...] = (
    ("new", "new", lambda misses: misses.new),
    ("order", "other order", lambda misses: misses.order),
    ("evicted", "evicted", lambda misses: misses.evicted),
    ("other", "questions and references", lambda misses: misses.other),
)

_OTHER_ORDER: dict[Placement, str] = {
    "head": "are what ordering might still save",
    "tail": "had come before, but behind other context or another history",
}


def by_policy(comparison: Comparison) -> Markup:
    """Chart and table in one: a row for each policy, a bar and a number for each cache size."""
    sizes = comparison.capacities
    ratios = {
        policy: [_ratio(comparison.cells.get((policy, size))) for size in sizes]
        for policy in dict.fromkeys(result.policy for size in sizes for result in comparison.at(size))
    }
    best = [comparison.at(size)[0].hit_ratio for size in sizes]
    untouched = [comparison.at(size)[0].today_hit_ratio for size in sizes]
    top = scale_top(max(best + untouched))
    rows = [
        _ratios_row(outside(policy), found, best, top, _look(comparison, policy)) for policy, found in ratios.items()
    ]
    if untouched not in ratios.values():  # else relevance order is what they have today
        rows.append(_ratios_row("today", untouched, best, top, "rest"))
    caches = listed([cache_name(size) for size in sizes])
    lanes = f" From top to bottom: a cache {caches}." if len(sizes) > 1 else ""
    label = "Hit ratio by order and cache size"
    return element(
        "figure",
        element("h3", label),
        element(
            "figcaption", f"The full width of a bar is {top:.0%}. The highest ratio of each cache size is bold.{lanes}"
        ),
        table(label, ("Order", "", *map(cache_size, sizes)), rows, class_="barred"),
    )


def _ratio(result: ReplayResult | None) -> float | None:
    return None if result is None else result.hit_ratio


def _ratios_row(name: str, ratios: Sequence[float | None], best: Sequence[float], top: float, look: str) -> Markup:
    cells = [
        _UNKNOWN if ratio is None else element("b" if percent(ratio) == percent(most) else "span", percent(ratio))
        for ratio, most in zip(ratios, best, strict=True)
    ]
    return row(
        name, bars([None if ratio is None else ratio / top for ratio in ratios], class_=look), *cells, class_=look
    )


def over_time(comparison: Comparison) -> Markup | None:
    """How the hit ratio came about; None where a trace is too short to tell."""
    drawn = [result for result in comparison.best(_OTHERS_DRAWN) if len(result.over_time) > 1]
    if not drawn:
        return None
    lines = [Line(result.policy, _look(comparison, result.policy), tuple(_so_far(result))) for result in drawn]
    head = ("Requests", *(outside(line.name) for line in lines))
    label = "Hit ratio over time"
    return element(
        "figure",
        element("h3", label),
        element("figcaption", f"Of all requests up to then, {_with_cache(comparison)}.{_left_out(comparison)}"),
        line_chart(f"{label}, by number of requests.", lines),
        data(label, head, [row(*cells) for cells in line_rows(lines)]),
    )


def _so_far(result: ReplayResult) -> Iterator[tuple[int, float]]:
    saved = total = 0
    for point in result.over_time:
        saved, total = saved + point.saved_tokens, total + point.total_tokens
        yield point.requests, saved / total if total else 0.0


def misses(comparison: Comparison) -> Markup | None:
    """Where the misses come from; None without any."""
    drawn = comparison.best(_OTHERS_DRAWN)
    most = max(result.misses.total for result in drawn)
    if not most:
        return None
    causes = [cause for cause in _CAUSES if any(cause[2](result.misses) for result in comparison.headline)]
    bars_of = [
        row(
            outside(result.policy),
            stack([(class_, of(result.misses) / most, _hint(name, of(result.misses))) for class_, name, of in causes]),
            rounded(result.misses.total),
            class_=_look(comparison, result.policy),
        )
        for result in drawn
    ]
    numbers = [
        row(outside(result.policy), *(f"{of(result.misses):,}" for _, _, of in causes), f"{result.misses.total:,}")
        for result in comparison.headline
    ]
    label = "Where the misses come from"
    return element(
        "figure",
        element("h3", label),
        element(
            "figcaption",
            f"Tokens prefilled, {_with_cache(comparison)}. New ones had never come before. Those of another order"
            f" {_OTHER_ORDER[comparison.placement]}; evicted ones are what a larger cache would keep."
            f"{_left_out(comparison)}",
        ),
        element("ul", *(element("li", swatch(class_), name) for class_, name, _ in causes), class_="legend"),
        table(label, ("Order", "", "Tokens"), bars_of, class_="barred"),
        data(label, ("Order", *(name[0].upper() + name[1:] for _, name, _ in causes), "All"), numbers),
    )


def per_request(comparison: Comparison) -> Markup:
    """How many requests gain or lose, and how long planning takes."""
    wanted = comparison.best(_OTHERS_DRAWN)
    shown = [
        row(
            outside(result.policy),
            *_parts(result),
            duration(result.plan_us_p50),
            duration(result.plan_us_p99),
            class_="default" if result is comparison.after else None,
        )
        for result in comparison.headline
        if result in wanted
    ]
    label = "Request by request"
    return element(
        "figure",
        element("h3", label),
        element(
            "figcaption",
            "The share of requests that have less to prefill than today, more, or as much; the share that is sent"
            f" exactly as today, {_with_cache(comparison)}; and how long planning one took.{_left_out(comparison)}",
        ),
        table(label, ("Order", "Less", "More", "Same", "As is", "Plan p50", "p99"), shown),
        data(f"{label}, every order and cache size", _EVERY_HEAD, map(_every_row, comparison.cells.values())),
    )


_EVERY_HEAD = (
    "Order", "Cache", "Tokens saved", "To prefill", "Less", "More", "Same", "As is", "Reordered", "Referring",
    "Annotations", "Plan p50", "p99", "Commit p50", "p99",
)  # fmt: skip


def _every_row(result: ReplayResult) -> Markup:
    requests = (result.gained_requests, result.lost_requests, result.even_requests, result.untouched_requests)
    return row(
        outside(result.policy),
        cache_size(result.capacity_tokens),
        f"{result.saved_tokens:,}",
        f"{result.prefilled_tokens:,}",
        *(f"{count:,}" for count in (*requests, result.reordered_requests, result.referring_requests)),
        f"{result.annotation_tokens:,}",
        *map(duration, (result.plan_us_p50, result.plan_us_p99, result.commit_us_p50, result.commit_us_p99)),
    )


def cache_size(capacity: int | None) -> str:
    """As short as a column's heading has to be."""
    return "no bound" if capacity is None else rounded(capacity)


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence.

    >>> listed(["one", "two", "three"]), listed(["one"])
    ('one, two and three', 'one')
    """
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _look(comparison: Comparison, policy: str) -> str:
    """The colour and dashes of a policy, the same in all charts of a trace."""
    if policy == comparison.after.policy:
        return "hero"
    if comparison.before is not None and policy == comparison.before.policy:
        return "base"
    pair = (comparison.after, comparison.before)
    others = [each.policy for each in comparison.best(_OTHERS_DRAWN) if each not in pair]
    return f"o{others.index(policy) + 1}" if policy in others else "rest"


def _left_out(comparison: Comparison) -> str:
    """What a chart with room for the best few has to say of the rest."""
    known = len(comparison.headline)
    if len(comparison.best(_OTHERS_DRAWN)) == known:
        return ""
    pair = ", ".join(result.policy for result in (comparison.after, comparison.before) if result is not None)
    return f" Of {known} orders: {pair} and the {_OTHERS_DRAWN} best others."


def _with_cache(comparison: Comparison) -> str:
    return f"with a cache {cache_name(comparison.capacities[0])}"


def _parts(result: ReplayResult) -> list[str]:
    """Shares of the requests that prefill less, more, and as much; and of those that are sent as today."""
    if not result.requests:
        return [_UNKNOWN] * 4
    shares = whole_shares([result.gained_requests, result.lost_requests, result.even_requests])
    return [*shares, f"{result.untouched_requests / result.requests:.0%}"]


def _hint(name: str, tokens: int) -> str:
    return f"{name}: {tokens:,} tokens"
