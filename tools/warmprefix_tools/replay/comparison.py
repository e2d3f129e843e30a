"""Results of a trace next to each other, and what they mean in a few sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from warmprefix.plan import Placement
from warmprefix_tools.replay.results import DEFAULT_POLICY, TODAY, ChoiceResult, ReplayResult
from warmprefix_tools.report.amounts import counted, percent, whole_shares

__all__ = ["TraceComparison", "cache_name", "choice_columns", "choice_summary", "compare", "summary"]

_LEAST_CHANGE = 0.01


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Results of one trace, by policy and cache size.

    The headline is about the first cache size.
    """

    trace: str
    k: int
    placement: Placement
    cells: dict[tuple[str, int | None], ReplayResult] = field(default_factory=dict)
    choices: list[ChoiceResult] = field(default_factory=list)
    """One per cache size, if evidence was chosen."""

    @property
    def capacities(self) -> list[int | None]:
        return list(dict.fromkeys(capacity for _, capacity in self.cells))

    def at(self, capacity: int | None) -> list[ReplayResult]:
        """Return the results with a cache of this size, the highest hit ratio first."""
        found = [result for (_, size), result in self.cells.items() if size == capacity]
        return sorted(found, key=lambda result: -result.hit_ratio)

    @property
    def headline(self) -> list[ReplayResult]:
        return self.at(self.capacities[0])

    @property
    def after(self) -> ReplayResult:
        """Result of the default policy.

        Without it, the highest hit ratio, with relevance order last of all.
        """
        preferred = [result for result in self.headline if result.policy == DEFAULT_POLICY]
        others = [result for result in self.headline if result.policy != TODAY]
        return [*preferred, *others, *self.headline][0]

    @property
    def before(self) -> ReplayResult | None:
        """Result of relevance order; None if it was not replayed, or nothing else was."""
        result = self.cells.get((TODAY, self.capacities[0]))
        return None if result is self.after else result

    def best(self, number: int) -> list[ReplayResult]:
        """Return `after`, `before`, and the `number` highest hit ratios of the others."""
        pair = [result for result in (self.after, self.before) if result is not None]
        return pair + [result for result in self.headline if result not in pair][:number]


def compare(results: Sequence[ReplayResult], choices: Sequence[ChoiceResult] = ()) -> list[TraceComparison]:
    """Return the results by trace, in the given order, with the choices of each.

    If two traces share a name, the second gets a comparison of its own; no result replaces another.
    """
    comparisons: list[TraceComparison] = []
    latest: dict[tuple[str, int, Placement], TraceComparison] = {}
    for result in results:
        key: tuple[str, int, Placement] = (result.trace, result.k, result.placement)
        cell = (result.policy, result.capacity_tokens)
        if key not in latest or cell in latest[key].cells:
            latest[key] = TraceComparison(*key)
            comparisons.append(latest[key])
        latest[key].cells[cell] = result
    for choice in choices:
        latest[choice.chosen.trace, choice.chosen.k, choice.chosen.placement].choices.append(choice)
    return comparisons


def cache_name(capacity: int | None) -> str:
    """Return a cache size in words, to follow "a cache"."""
    return "without bound" if capacity is None else f"of {capacity:,} tokens"


def summary(comparison: TraceComparison) -> str:
    """Return what the headline's policy would save, in a few sentences."""
    after = comparison.after
    if not after.total_tokens:
        return "The requests held no context, so there is nothing to save."
    return " ".join([_hit_ratios(after), _prefill(after), _requests(after)])


def choice_summary(choice: ChoiceResult) -> str:
    """Return what choosing evidence would save and change, in a few sentences."""
    chosen, evidence, drawn = choice.chosen, choice.chosen.evidence, choice.chance.evidence
    assert evidence is not None
    assert drawn is not None
    sentences = [
        f"With a cache {cache_name(chosen.capacity_tokens)}, choosing evidence would leave {_less(choice.change)}"
        f" ordering what relevance feeds, and {_less(chosen.prefill_change)} relevance order, net.",
        f"Per request it feeds {evidence.exchanged / max(chosen.requests, 1):.2f} passages in place of others, and"
        f" {evidence.extra / max(chosen.requests, 1):.2f} extra ones.",
    ]
    if evidence.gold:
        twins = f" ({counted(evidence.gold_twins, 'twin')} of such passages fed)" if evidence.gold_twins else ""
        sentences.append(
            f"Of {counted(evidence.gold_requests, 'request')} with gold, {evidence.gold_lost_requests} would lack a"
            f" passage of gold that relevance feeds{twins}, and {evidence.gold_won_requests} would have one that it"
            f" does not; with as many passages drawn by lot, {drawn.gold_lost_requests} and {drawn.gold_won_requests}."
        )
    if choice.errors:
        sentences.append(
            f"Nothing can be chosen for {counted(len(choice.errors), 'request')}, which count with their first"
            f" passages: {choice.errors[0]}."
        )
    return " ".join(sentences)


def choice_columns(choices: Sequence[ChoiceResult]) -> list[tuple[str, Callable[[ReplayResult], str]]]:
    """Return a heading of two lines, and the cell of an arm, for each column that has something to show."""

    def count(name: str) -> Callable[[ReplayResult], str]:
        return lambda arm: f"{getattr(arm.evidence, name):,}"

    def per_request(name: str) -> Callable[[ReplayResult], str]:
        return lambda arm: f"{getattr(arm.evidence, name) / max(arm.requests, 1):.2f}"

    def share(name: str) -> Callable[[ReplayResult], str]:
        return lambda arm: f"{getattr(arm.evidence, name):.1%}"

    columns = [
        ("computed\ntokens", lambda arm: f"{arm.net_prefilled_tokens:,}"),
        ("net\nsaved", lambda arm: f"{0 - arm.prefill_change:+.1%}"),
        ("per request\nexchanged", per_request("exchanged")),
        ("\nextra", per_request("extra")),
    ]
    evidence = [choice.chosen.evidence for choice in choices]
    names = [name for name in ("twins", "superseded") if any(getattr(each, name) for each in evidence)]
    columns += [(f"\n{name}", per_request(name)) for name in names]
    if any(each is not None and each.gold for each in evidence):
        columns += [
            ("gold\nfed", share("gold_share")),
            ("requests\nlost", count("gold_lost_requests")),
            ("\nwon", count("gold_won_requests")),
        ]
    return [*columns, ("passages\nfed", count("distinct")), ("most fed\n1 %", share("most_fed_share"))]


def _less(change: float) -> str:
    if not round(change, 3):
        return "as much to prefill as"
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} to prefill than"


def _hit_ratios(result: ReplayResult) -> str:
    what = "context" if result.placement == "head" else "prompts"
    return (
        f"With a cache {cache_name(result.capacity_tokens)}, {result.policy} would have found"
        f" {percent(result.hit_ratio)} of the {what} in it; as things are, it is {percent(result.today_hit_ratio)}."
    )


def _prefill(result: ReplayResult) -> str:
    """Return the net change as a sentence, then the cost of notes, and what to do about a loss."""
    change, less = result.prefill_change, result.net_saved_tokens
    if not less:
        return f"Net of labels and notes, there is as much to prefill as today.{_main_cause(result)}"
    sentence = f"{abs(change):.1%} {'less' if less > 0 else 'more'} to prefill.{_notes(result)}"
    if abs(change) < _LEAST_CHANGE:
        sentence = f"that hardly makes a difference: {sentence}{_main_cause(result)}"
    else:
        sentence = f"that is {sentence}" if less > 0 else f"it does not pay here: {sentence}"
    return f"Net of labels and notes, {sentence}{_advice(result) if less < 0 else ''}"


def _notes(result: ReplayResult) -> str:
    """Return the cost of labels, notes and references, as a sentence."""
    if not result.note_tokens:
        return ""
    share = result.prefilled_note_tokens / max(result.net_prefilled_tokens, 1)
    each = result.note_tokens / result.requests
    return f" These take {each:,.0f} tokens per request, and are {share:.1%} of what is left to prefill."


def _advice(result: ReplayResult) -> str:
    """Return what avoids a net loss, as a sentence."""
    gross = result.today_prefilled_tokens - result.prefilled_tokens
    if gross <= 0 or result.placement == "tail":
        return " Leave these prompts as they are."
    return (
        f" Without them it would be {gross / result.today_prefilled_tokens:.1%} less: use --annotate none if your model"
        " needs no note, else leave the order alone."
    )


def _main_cause(result: ReplayResult) -> str:
    """Return the most frequent cause of misses, as a sentence."""
    causes = {
        "that never came before": result.misses.new,
        "that came before, but never behind the same ones": result.misses.order,
        "that the cache had evicted again": result.misses.evicted,
    }
    cause = max(causes, key=causes.__getitem__)
    return (
        f" {causes[cause] / result.prefilled_tokens:.0%} of the context to prefill is blocks {cause}."
        if causes[cause]
        else ""
    )


def _requests(result: ReplayResult) -> str:
    # Whether a request changes and whether it gains are two questions; only the answers to one add up to 100 %.
    gained, lost, even = whole_shares([result.gained_requests, result.lost_requests, result.even_requests])
    return (
        f"Of the requests, {gained} would have less to prefill, {lost} more and {even} as much as today;"
        f" {result.untouched_requests / result.requests:.0%} would be left exactly as they are."
    )
