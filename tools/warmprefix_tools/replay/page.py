"""The page of a replay: what each order found in the cache, for people who would rather look than read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from warmprefix.plan import Placement
from warmprefix_tools.replay.charts import by_policy, cache_size, listed, misses, over_time, per_request
from warmprefix_tools.replay.compared import Comparison, cache_name, compare
from warmprefix_tools.replay.estimates import Estimates
from warmprefix_tools.replay.result import ReplayResult
from warmprefix_tools.replay.summary import summary
from warmprefix_tools.report.amounts import change, counted, duration, percent, points, rounded
from warmprefix_tools.report.bars import dumbbell, fills, scale_top
from warmprefix_tools.report.document import document
from warmprefix_tools.report.markup import Markup, element, join, outside
from warmprefix_tools.report.tables import data, row

__all__ = ["replay_page"]

_TITLE = "What ordering the context saves"
_HARDLY = 0.01
_UNKNOWN = "\u2013"
_PLACEMENTS: dict[Placement, str] = {
    "head": "tokens of context, rebuilt each turn in front of the history",
    "tail": "tokens of prompts, whose context stays in the history",
}


def replay_page(results: Sequence[ReplayResult], estimates: Estimates | None = None) -> str:
    """One self-contained HTML page about at least one result; the same bytes for the same arguments.

    Headlines, and the charts that have room for one cache size, are about the first that a trace's results came with.
    """
    if not results:
        raise ValueError("results is empty: there is nothing to show")
    estimates = estimates or Estimates()
    comparisons = compare(results)
    return document(
        _TITLE,
        fills(),
        _header(comparisons),
        _overview(comparisons) if len(comparisons) > 1 else None,
        *(_section(comparison, estimates, number) for number, comparison in enumerate(comparisons, 1)),
        _footer(estimates),
    )


def _header(comparisons: Sequence[Comparison]) -> Markup:
    policies = {policy for comparison in comparisons for policy, _ in comparison.cells}
    sizes = list(dict.fromkeys(size for comparison in comparisons for size in comparison.capacities))
    what = f"{counted(len(comparisons), 'recorded trace')}, replayed in {counted(len(policies), 'order')} of context"
    caches = f"with a prefix cache {listed([cache_name(size) for size in sizes])}"
    first = f" Headlines are for a cache {cache_name(sizes[0])}." if len(sizes) > 1 else ""
    return element(
        "header",
        element("h1", _TITLE),
        element("p", f"{what}, {caches}.{first}"),
        element(
            "p",
            "The hit ratio is the share of tokens that the cache would have held already, so that the engine would not"
            " have prefilled them. Today means as the requests were recorded: nothing ordered, nothing de-duplicated.",
            class_="dim",
        ),
    )


def _overview(comparisons: Sequence[Comparison]) -> Markup:
    top = scale_top(max(ratio for each in comparisons for ratio in (each.after.today_hit_ratio, each.after.hit_ratio)))
    head = ("Trace", "Cache", "Requests", "Today", "Order", "Hit ratio", "Points", "To prefill", "Found most")
    return element(
        "section",
        element("h2", "All traces"),
        element("p", _overall(comparisons), class_="lead"),
        element(
            "figure",
            element(
                "figcaption",
                f"Hit ratio today (ring) and ordered (dot), from 0 to {top:.0%}; the difference is in points.",
            ),
            element("ol", *(_glance(each, i, top) for i, each in enumerate(comparisons, 1)), class_="glance"),
            data("Every trace and cache size", head, [line for each in comparisons for line in _glance_rows(each)]),
        ),
    )


def _overall(comparisons: Sequence[Comparison]) -> str:
    """On how many traces ordering pays."""
    changes = [each.after.prefill_change for each in comparisons]
    names = {each.after.policy for each in comparisons}
    name = names.pop() if len(names) == 1 else "the best order"
    less, more = sum(each <= -_HARDLY for each in changes), sum(each >= _HARDLY for each in changes)
    said = f"On {less} of {len(changes)} traces, {name} would have left less to prefill"
    said += f", on {more} more" if more else ", on none more"
    even = len(changes) - less - more
    said += f"; on {even} it makes less than 1% of difference" if even else ""
    return f"{said}. The sentences that tell the model the order of relevance are counted."


def _glance(comparison: Comparison, number: int, top: float) -> Markup:
    before, after = comparison.after.today_hit_ratio, comparison.after.hit_ratio
    return element(
        "li",
        element("a", outside(comparison.trace), href=f"#trace-{number}"),
        dumbbell(before / top, after / top, class_="less" if after < before else "more"),
        element(
            "span", f"{percent(before)} \u2192 {percent(after)} ", element("b", points(after - before)), class_="value"
        ),
    )


def _glance_rows(comparison: Comparison) -> Iterator[Markup]:
    for capacity in comparison.capacities:
        most = comparison.at(capacity)[0]
        after = comparison.cells.get((comparison.after.policy, capacity))
        yield row(
            outside(comparison.trace),
            cache_size(capacity),
            f"{most.requests:,}",
            percent(most.today_hit_ratio),
            outside(comparison.after.policy),
            percent(after.hit_ratio) if after else _UNKNOWN,
            points(after.hit_ratio - after.today_hit_ratio) if after else _UNKNOWN,
            change(after.prefill_change) if after else _UNKNOWN,
            join(outside(most.policy), f" {percent(most.hit_ratio)}"),
        )


def _section(comparison: Comparison, estimates: Estimates, number: int) -> Markup:
    after = comparison.after
    facts = (
        f"{counted(after.requests, 'request')} of up to {counted(comparison.k, 'block')};"
        f" {rounded(after.today_total_tokens)} {_PLACEMENTS[comparison.placement]}"
    )
    return element(
        "section",
        element("h2", outside(comparison.trace)),
        element("p", facts, class_="dim"),
        element("ul", *_tiles(after, estimates), class_="tiles"),
        element("p", summary(comparison), class_="lead"),
        element(
            "div",
            element("div", by_policy(comparison), per_request(comparison)),
            element("div", over_time(comparison), misses(comparison)),
            class_="pair",
        ),
        id=f"trace-{number}",
    )


def _tiles(after: ReplayResult, estimates: Estimates) -> Iterator[Markup]:
    yield _tile(percent(after.hit_ratio), f"hit ratio with {after.policy}", class_="hero")
    yield _tile(percent(after.today_hit_ratio), "hit ratio today")
    spared = after.today_prefilled_tokens - after.prefilled_tokens - after.annotation_tokens
    yield _tile(change(after.prefill_change), f"to prefill: {rounded(abs(spared))} tokens {_direction(spared)}")
    if after.reference_tokens:
        yield _tile(rounded(after.reference_tokens), "tokens removed as references")
    seconds, seconds_today = estimates.ttft_seconds(after), estimates.ttft_seconds_today(after)
    if seconds is not None and seconds_today is not None:
        before = duration(1e6 * seconds_today)
        yield _tile(duration(1e6 * seconds), f"to prefill one, estimated; today {before}")
    cost, cost_today = estimates.cost(after), estimates.cost_today(after)
    if cost is not None and cost_today is not None:
        yield _tile(f"{cost:,.2f}", f"to pay, estimated; today {cost_today:,.2f}")


def _tile(number: str, meaning: str, class_: str | None = None) -> Markup:
    return element("li", element("b", number), element("span", meaning), class_=class_)


def _direction(spared: int) -> str:
    return "less" if spared >= 0 else "more"


def _footer(estimates: Estimates) -> Markup:
    assumed = [
        None if estimates.prefill_rate is None else f"a prefill of {estimates.prefill_rate:,.15g} tokens a second",
        None if estimates.price is None else f"a price of {estimates.price:g} for a million prefilled tokens",
        None if estimates.price is None else f"{estimates.cached_price:g} for a million cached ones",
    ]
    given = [each for each in assumed if each is not None]
    return element(
        "footer",
        element(
            "p",
            "These are replays against a model of the engine's prefix cache. They say nothing of answers: where the"
            " order changes, the model is told the order of relevance, and whether it answers as well is for you to"
            " measure. To check the saving, compare your engine's own count of cached tokens.",
        ),
        element("p", f"Estimates assume {listed(given)}, and an idle engine.") if given else None,
    )
