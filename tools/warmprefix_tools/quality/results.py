"""What the answers of a run show, arm by arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_tools.quality.answer_store import AnswerStore, GivenAnswer
from warmprefix_tools.quality.arms import arm_number
from warmprefix_tools.quality.paired import Comparison, compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import JUDGE, AnswerScores, normalized, score, scorer_named

__all__ = [
    "ArmResult",
    "NoAnswersError",
    "OrderEffect",
    "QualityResults",
    "compare_runs",
    "remarks",
    "results_of",
    "verdict",
]


_ANNOTATE = {"planned": "none", "note": "note", "labels": "labels", "both": "both"}
"""The value of `annotate` that each arm tries out."""


class NoAnswersError(WarmprefixError):
    """A run has no answers to report on yet."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The scores of one arm, and their comparison with its baseline."""

    arm: str
    baseline: str
    answers: int
    failed: int
    """Questions without an answer in this arm; they count in no comparison."""
    truncated: int
    scores: AnswerScores
    """Means."""
    score: float | None
    """Mean of the measure; None if a judge compared the arm with its baseline."""
    unjudged: int
    """Questions that count in no comparison because the judge was not asked, or returned no judgement."""
    changed: int
    """Questions whose prompt differs from the baseline's."""
    comparison: Comparison | None
    """Over all questions with an answer in both arms; None for a baseline."""
    noise: float | None
    """Share of questions whose repeated calls have different scores; None without repeats."""
    prompt_tokens: int
    cached_tokens: int | None
    """None if no answer reported any, not even 0."""
    citations: int
    """Labels that the answers name."""
    right_citations: int
    """Those of passages that the answer follows from."""


@dataclass(frozen=True, slots=True)
class OrderEffect:
    """What several random orders of the same passages do."""

    orders: int
    deviation: float
    """Mean over the questions of the standard deviation of the scores."""
    affected: float
    """Share of questions that have different scores in different orders."""


@dataclass(frozen=True, slots=True)
class QualityResults:
    """The results of a run."""

    settings: Mapping[str, Any]
    questions: int
    measure: str
    margin: float
    """1 point is 0.01."""
    arms: tuple[ArmResult, ...]
    positions: Mapping[int, float]
    """Mean score by the place of the passage with the answer, from 1 on; empty if no arm moved it."""
    orders: OrderEffect | None
    """None if there were fewer than two random orders."""

    @property
    def annotate(self) -> str | None:
        """The `annotate` of a `ContextPlanner` whose arm has the best score of those that are not worse.

        None if no arm with another order is shown to be not worse.
        """
        shown = [
            arm
            for arm in self.arms
            if arm.arm in _ANNOTATE and arm.comparison is not None and arm.comparison.is_not_worse(self.margin)
        ]
        if not shown:
            return None
        return _ANNOTATE[max(shown, key=lambda arm: arm.comparison.difference if arm.comparison else 0.0).arm]

    def as_json(self) -> dict[str, Any]:
        """Return all fields, with `annotate`, and with `differs` and `is_not_worse` for each comparison."""
        fields = {**asdict(self), "annotate": self.annotate}
        for arm, made in zip(self.arms, fields["arms"], strict=True):
            made["scores"] = arm.scores._asdict()
            if arm.comparison is not None:
                made["comparison"] |= {
                    "differs": arm.comparison.differs,
                    "is_not_worse": arm.comparison.is_not_worse(self.margin),
                }
        return fields


def results_of(store: AnswerStore, measure: str, margin: float) -> QualityResults:
    """Return the results of a run, finished or not. O(answers).

    Repeated calls count as one answer with their mean score.

    Raises:
        StoreFileError: The file holds no run.
        NoAnswersError: It has no answer yet, or no judgement.
        ScoreError: The measure is unknown, or its function returned no score.
    """
    settings = store.settings()
    questions = {question.id: question for question in store.questions()}
    if measure == JUDGE and store.judge() is None:
        raise NoAnswersError(f"{store.path} has no judgements yet: see warmprefix quality judge")
    scored = _ScoredAnswers(store.answers(), questions, "f1" if measure == JUDGE else measure)
    arms = {arm: of for arm, of in settings["arms"].items() if arm in scored.calls or arm in scored.failed}
    if not arms:
        raise NoAnswersError(f"{store.path} has no answers yet")
    made: list[ArmResult] = []
    for arm, baseline in arms.items():
        mine, others = scored.values(arm), scored.values(baseline)
        both = [question for question in questions if question in mine and question in others]
        differences = [mine[each] - others[each] for each in both]
        if measure == JUDGE:
            judged = _preferences(store, arm)
            equal = [each for each in both if scored.first_text(arm, each) == scored.first_text(baseline, each)]
            found = [0.0 if each in equal else judged.get(each) for each in both]
            differences = [each for each in found if each is not None]
        given = [answer for answer in scored.answers if answer.key.arm == arm]
        cached = [answer.cached_tokens for answer in given if answer.cached_tokens is not None]
        repeated = [[value for _, value in calls] for calls in scored.calls[arm].values() if len(calls) > 1]
        made.append(
            ArmResult(
                arm,
                baseline,
                len(mine),
                len(scored.failed[arm]),
                sum(answer.problem == "truncated" for answer in given),
                scored.means(arm),
                None if measure == JUDGE else fmean(mine.values()) if mine else 0.0,
                len(both) - len(differences) if measure == JUDGE and arm != baseline else 0,
                len({answer.key.question for answer in given if answer.is_changed}),
                compare_pairs(differences) if arm != baseline and differences else None,
                fmean(len(set(values)) > 1 for values in repeated) if repeated else None,
                sum(answer.prompt_tokens or 0 for answer in given),
                sum(cached) if cached else None,
                sum(answer.citations or 0 for answer in given),
                sum(answer.right_citations or 0 for answer in given),
            )
        )
    by_place = {place: arm for arm in made if (place := arm_number(arm.arm, "gold")) is not None}
    positions = {place: by_place[place].score or 0.0 for place in sorted(by_place)} if measure != JUDGE else {}
    shuffled = [arm for arm in arms if arm_number(arm, "shuffled") is not None and measure != JUDGE]
    orders = [scored.values(arm) for arm in shuffled]
    return QualityResults(settings, len(questions), measure, margin, tuple(made), positions, _order_effect(orders))


def _order_effect(orders: Sequence[Mapping[str, float]]) -> OrderEffect | None:
    if len(orders) < 2:
        return None
    common = set(orders[0]).intersection(*orders[1:])
    values = [[order[id] for order in orders] for id in sorted(common)]
    if not values:
        return None
    return OrderEffect(len(orders), fmean(map(pstdev, values)), fmean(len(set(each)) > 1 for each in values))


def _preferences(store: AnswerStore, arm: str) -> Mapping[str, float | None]:
    """Return 1 for each question whose answer in this arm is preferred to the baseline's, -1 for the opposite.

    0 if the judge finds both equal, or changes its mind with the order; None if it answered something else.
    """
    values = {"arm": 1, "neither": 0, "baseline": -1}
    judged: dict[str, list[str | None]] = {}
    for judgement in store.judgements():
        if judgement.arm == arm:
            judged.setdefault(judgement.question, []).append(judgement.preferred)
    found: dict[str, float | None] = {}
    for id, verdicts in judged.items():
        both = [values[each] for each in verdicts if each is not None]
        if len(both) < 2:
            found[id] = None
        else:
            found[id] = float(both[0]) if both[0] == both[1] else 0.0
    return found


class _ScoredAnswers:
    """The answers of a run with their scores."""

    def __init__(self, answers: Iterable[GivenAnswer], questions: Mapping[str, EvidenceQuestion], measure: str) -> None:
        scorer = scorer_named(measure)
        self.answers = list(answers)
        self.calls: dict[str, dict[str, list[tuple[AnswerScores, float]]]] = defaultdict(lambda: defaultdict(list))
        """For each arm and question, all scores and the measure of its calls."""
        self.failed: dict[str, set[str]] = defaultdict(set)
        """For each arm, the questions of which a call failed."""
        self._texts: dict[tuple[str, str], str] = {}
        for answer in self.answers:
            id, arm, repeat = answer.key
            if answer.text is None:
                self.failed[arm].add(id)
                continue
            expected = questions[id].answers
            self.calls[arm][id].append((score(answer.text, expected), scorer(answer.text, expected)))
            if repeat == 0:
                self._texts[arm, id] = normalized(answer.text)

    def first_text(self, arm: str, question: str) -> str | None:
        """Return the first answer without case and punctuation."""
        return self._texts.get((arm, question))

    def values(self, arm: str) -> dict[str, float]:
        """Return for each question the mean of the measure, unless one of its calls failed."""
        return {id: fmean(value for _, value in calls) for id, calls in self._complete(arm)}

    def means(self, arm: str) -> AnswerScores:
        """Return the means of all scores."""
        by_question = [
            AnswerScores(*map(fmean, zip(*[scores for scores, _ in calls], strict=True)))
            for _, calls in self._complete(arm)
        ]
        if not by_question:
            return AnswerScores(0.0, 0.0, 0.0, 0.0)
        return AnswerScores(*map(fmean, zip(*by_question, strict=True)))

    def _complete(self, arm: str) -> list[tuple[str, list[tuple[AnswerScores, float]]]]:
        return [(id, calls) for id, calls in self.calls.get(arm, {}).items() if id not in self.failed.get(arm, ())]


def compare_runs(earlier: AnswerStore, later: AnswerStore, measure: str) -> dict[str, Comparison]:
    """Compare each arm of a run with the same arm of an earlier one, of another model perhaps. O(answers).

    Raises:
        StoreFileError: A file holds no run.
        NoAnswersError: The runs have other questions, or no arm in common with an answer to the same question.
        ScoreError: The measure is unknown, or its function returned no score.
    """
    questions = {question.id: question for question in later.questions()}
    if earlier.questions() != list(questions.values()):
        raise NoAnswersError(f"{earlier.path} and {later.path} have different questions")
    arms = later.settings()["arms"]
    before, after = (_ScoredAnswers(store.answers(), questions, measure) for store in (earlier, later))
    found: dict[str, Comparison] = {}
    for arm in arms:
        old, new = before.values(arm), after.values(arm)
        differences = [new[id] - old[id] for id in questions if id in new and id in old]
        if differences:
            found[arm] = compare_pairs(differences)
    if not found:
        raise NoAnswersError(f"{earlier.path} and {later.path} have no answers in common")
    return found


def verdict(arm: ArmResult, margin: float) -> str:
    """Return in a word or two how an arm compares with its baseline."""
    compared = arm.comparison
    if compared is None:
        return "baseline"
    if compared.differs and compared.difference > 0:
        return "better"
    if compared.is_not_worse(margin):
        return "not worse"
    return "worse" if compared.differs else "open"


def remarks(results: QualityResults) -> list[str]:
    """Return what a reader should consider."""
    found: list[str] = []
    allowed = "a loss of 1 point" if results.margin == 0.01 else f"a loss of {100 * results.margin:g} points"
    verdicts = {verdict(arm, results.margin) for arm in results.arms}
    if "not worse" in verdicts:
        found.append(f"Not worse: {allowed} or more is refuted.")
    if "open" in verdicts:
        found.append(f"Open: {allowed} is neither shown nor refuted; ask more questions.")
    if results.annotate is not None:
        found.append(f'For this model, ContextPlanner(annotate="{results.annotate}") is the best that is not worse.')
    elif {verdict(arm, results.margin) for arm in results.arms if arm.arm in _ANNOTATE} == {"worse"}:
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
        if arm.failed:
            found.append(f"{arm.arm}: {arm.failed} questions have no answer and count in no comparison.")
        if arm.truncated:
            found.append(f"{arm.arm}: {arm.truncated} answers were cut; raise --max-tokens.")
        if arm.comparison is not None and arm.changed < arm.answers:
            found.append(f"{arm.arm}: {arm.changed} of {arm.answers} prompts differ from {arm.baseline}.")
        if arm.unjudged:
            found.append(f"{arm.arm}: {arm.unjudged} questions have no judgement and count in no comparison.")
        if arm.citations:
            share = 100 * arm.right_citations / arm.citations
            found.append(f"{arm.arm}: {share:.1f}% of {arm.citations:,} cited labels are those of the evidence.")
        if arm.noise is not None:
            found.append(f"{arm.arm}: repeated calls have another score at {100 * arm.noise:.1f}% of the questions.")
    return found
