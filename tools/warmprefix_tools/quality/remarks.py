"""What a reader of a report should consider, in sentences. Pure."""

from __future__ import annotations

import math

from warmprefix_tools.quality.paired import Comparison, loss_of, questions_needed
from warmprefix_tools.quality.results import ANNOTATE, ArmResult, QualityResults, verdict
from warmprefix_tools.quality.scores import MEASURES
from warmprefix_tools.report.amounts import points

__all__ = ["interval", "measure_cells", "remarks"]

_SIGNS = {1: "better", 0: "not shown to differ", -1: "worse"}
_MINUS = "\u2212"
_SAME = 0.5
"""Share of equal answers that calls for a remark."""
_DEVIATIONS = 2.0
"""Standard errors by which answers must be better than guesses."""
_LONGER = 1.5
"""How much longer answers must be for a remark."""


def remarks(results: QualityResults) -> list[str]:
    """Return what a reader should consider."""
    found: list[str] = []
    allowed = loss_of(results.margin)
    verdicts = {arm.arm: verdict(arm, results.margin) for arm in results.arms}
    if not {"not worse", "worse, within margin"}.isdisjoint(verdicts.values()):
        found.append(f"Not worse, within margin: {allowed} or more is refuted.")
    for arm in results.arms:
        compared = arm.comparison
        if compared is not None and verdicts[arm.arm] == "open":
            changed = (compared.wins + compared.losses) / compared.pairs
            needed = questions_needed(changed, results.margin, stops=results.stops)
            found.append(
                f"{arm.arm}: open; {allowed} is neither shown nor refuted. With {100 * changed:.1f}% of the answers"
                f" changed, refuting it takes about {needed:,} questions if nothing is lost."
            )
        found += _style_remarks(arm, results)
    asked = max([arm.answers + arm.failed for arm in results.arms])
    if results.stops:
        found.append(
            f"{asked:,} of {results.questions:,} questions are asked. The run may stop when it is certain, so its"
            f" intervals are wider: they hold at any time up to {results.questions:,} questions."
        )
    elif asked < results.questions:
        found.append(
            f"{asked:,} of {results.questions:,} questions are asked. These intervals are for the end of the run; a run"
            " that is stopped because of them errs more often. --stop-when-certain makes intervals for that."
        )
    if results.prefill_problem is not None:
        found.append(f"Prefill is not measured: {results.prefill_problem}.")
    if results.annotate is not None:
        found.append(f'For this model, ContextPlanner(annotate="{results.annotate}") is the best that is not worse.')
    elif {word for arm, word in verdicts.items() if arm in ANNOTATE} == {"worse"}:
        found.append("For this model, keep relevance order: plan(..., order_locked=True).")
    if results.positions:
        scores = ", ".join([f"{place}: {100 * value:.1f}" for place, value in results.positions.items()])
        found.append(f"Score by the place of the passage with the answer: {scores}.")
    if results.orders is not None:
        found.append(
            f"{results.orders.orders} random orders: {100 * results.orders.affected:.1f}% of the questions have"
            f" different scores; the mean standard deviation is {100 * results.orders.deviation:.1f} points."
        )
    for arm in results.arms:
        found += _answer_remarks(arm)
        found += _guess_remarks(arm, results.chance)
    return found


def _guess_remarks(arm: ArmResult, chance: float | None) -> list[str]:
    """Return what shows that a model does not read the evidence or the question."""
    found: list[str] = []
    right = arm.scores.contains
    if arm.same_text >= _SAME and right < arm.same_text / 2:
        share = 100 * arm.same_text
        found.append(f"{arm.arm}: {share:.0f}% of the answers are the same text. Does the model ignore the question?")
    if chance is not None and arm.arm == arm.baseline and arm.answers:
        error = math.sqrt(chance * (1 - chance) / arm.answers)
        found.append(
            f"{arm.arm}: a guess among the passages is right in {100 * chance:.1f}% of the questions."
            + (
                " The model is right no more often, so this set can't show what it loses."
                if right < chance + _DEVIATIONS * error
                else ""
            )
        )
    return found


def _answer_remarks(arm: ArmResult) -> list[str]:
    found: list[str] = []
    if arm.failed:
        found.append(f"{arm.arm}: {arm.failed} questions have no answer and count in no comparison.")
    if arm.truncated:
        found.append(f"{arm.arm}: {arm.truncated} answers were cut; raise --max-tokens.")
    if arm.comparison is not None and arm.changed < arm.answers:
        found.append(f"{arm.arm}: {arm.changed} of {arm.answers} prompts differ from {arm.baseline}.")
    if arm.other_evidence:
        found.append(f"{arm.arm}: {arm.other_evidence} of {arm.answers} questions have other evidence.")
    if arm.unjudged:
        found.append(f"{arm.arm}: {arm.unjudged} questions have no judgement and count in no comparison.")
    if arm.citations:
        share = 100 * arm.right_citations / arm.citations
        found.append(f"{arm.arm}: {share:.1f}% of {arm.citations:,} cited labels are those of the evidence.")
    if arm.noise is not None:
        found.append(f"{arm.arm}: repeated calls have another score at {100 * arm.noise:.1f}% of the questions.")
    return found


def _style_remarks(arm: ArmResult, results: QualityResults) -> list[str]:
    """Return where the measures disagree with the one that decides, and what lengths have to do with it."""
    compared, found = arm.comparison, list[str]()
    if compared is None:
        return []
    decided = _sign(compared)
    for measure, other in arm.comparisons.items():
        if measure != results.measure and _sign(other) not in (0, decided):
            found.append(
                f"{arm.arm}: measures disagree. By {measure} it is {_SIGNS[_sign(other)]}, {_shown(other)};"
                f" by {results.measure}, which decides, {_SIGNS[decided]}, {points(compared.difference)}."
            )
    (words,) = [other.scores.words for other in results.arms if other.arm == arm.baseline] or [0.0]
    if found or not words / _LONGER < arm.scores.words < words * _LONGER:
        found.append(
            f"{arm.arm}: its answers have {arm.scores.words:.1f} words, those of {arm.baseline} {words:.1f}. Length"
            " lowers f1 and exact, and may raise contains and span: read some to see whether they list several things."
        )
    return found


def measure_cells(arm: ArmResult) -> list[str]:
    """Return for each measure the mean in percent, and behind it the difference with its 95 % interval."""
    return [
        f"{100 * getattr(arm.scores, measure):.1f}"
        + (f" {_shown(arm.comparisons[measure])}" if measure in arm.comparisons else "")
        for measure in MEASURES
    ]


def interval(compared: Comparison) -> str:
    """Return the ends of the 95 % interval in points; an end that is not 0 is not shown as 0."""
    low, high = (
        points(end) if abs(end) >= 0.0005 or not end else f"{'+' if end > 0 else _MINUS}{100 * abs(end):.1g}"
        for end in (compared.low, compared.high)
    )
    return f"{low} to {high}"


def _shown(compared: Comparison) -> str:
    return f"{points(compared.difference)} ({interval(compared)})"


def _sign(compared: Comparison) -> int:
    """Return whether a difference is shown, and of which sign."""
    return int(compared.low > 0) - int(compared.high < 0)
