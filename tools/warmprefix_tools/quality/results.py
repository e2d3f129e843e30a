"""What the answers of a run show, arm by arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_tools.fork_safe_property import ForkSafeProperty
from warmprefix_tools.quality.answer_store import AnswerStore, GivenAnswer
from warmprefix_tools.quality.arms import arm_number
from warmprefix_tools.quality.paired import Comparison, compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import JUDGE, AnswerScores, Scorer, normalized, score, scorer_named

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
    settings, questions = store.settings(), store.questions()
    judged = measure == JUDGE
    if judged and store.judge() is None:
        raise NoAnswersError(f"{store.path} has no judgements yet: see warmprefix quality judge")
    scored = _scored_arms(store, questions, "f1" if judged else measure)
    baselines = {arm: of for arm, of in settings["arms"].items() if arm in scored}
    if not baselines:
        raise NoAnswersError(f"{store.path} has no answers yet")
    preferences = _preferences(store) if judged else {}
    arms = tuple([_result(scored, arm, of, preferences if judged else None) for arm, of in baselines.items()])
    places = {place: arm.score for arm in arms if (place := arm_number(arm.arm, "gold")) and arm.score is not None}
    orders = [scored[arm].values for arm in baselines if arm_number(arm, "shuffled") and not judged]
    positions = dict(sorted(places.items()))
    return QualityResults(settings, len(questions), measure, margin, arms, positions, _order_effect(orders))


def _result(
    scored: Mapping[str, _ScoredArm],
    arm: str,
    baseline: str,
    preferences: Mapping[tuple[str, str], float | None] | None,
) -> ArmResult:
    """Return the result of an arm, compared by the measure; or by preferences, of arm and question, if there are."""
    mine, others = scored[arm], scored.get(baseline, _ScoredArm())
    both = [id for id in mine.values if id in others.values]
    differences = [mine.values[id] - others.values[id] for id in both]
    if preferences is not None:
        equal = {id: 0.0 for id in both if mine.first_texts.get(id) == others.first_texts.get(id)}
        found = [equal[id] if id in equal else preferences.get((arm, id)) for id in both]
        differences = [each for each in found if each is not None]
    given = mine.answers
    cached = [answer.cached_tokens for answer in given if answer.cached_tokens is not None]
    repeated = [len(set(values)) > 1 for values in mine.calls.values() if len(values) > 1]
    return ArmResult(
        arm,
        baseline,
        len(mine.values),
        len(mine.failed),
        sum(answer.problem == "truncated" for answer in given),
        mine.means(),
        fmean(mine.values.values() or [0.0]) if preferences is None else None,
        0 if arm == baseline else len(both) - len(differences),
        len({answer.key.question for answer in given if answer.is_changed}),
        compare_pairs(differences) if arm != baseline and differences else None,
        fmean(repeated) if repeated else None,
        sum(answer.prompt_tokens or 0 for answer in given),
        sum(cached) if cached else None,
        sum(answer.citations or 0 for answer in given),
        sum(answer.right_citations or 0 for answer in given),
    )


def _order_effect(orders: Sequence[Mapping[str, float]]) -> OrderEffect | None:
    common = set(orders[0]).intersection(*orders[1:]) if len(orders) > 1 else set()
    values = [[order[id] for order in orders] for id in sorted(common)]
    if not values:
        return None
    return OrderEffect(len(orders), fmean(map(pstdev, values)), fmean(len(set(each)) > 1 for each in values))


def _preferences(store: AnswerStore) -> dict[tuple[str, str], float | None]:
    """Return by arm and question 1 if the arm's answer is preferred to the baseline's, -1 for the opposite.

    0 if the judge finds both equal, or changes its mind with the order; None if it answered something else.
    """
    values = {"arm": 1.0, "neither": 0.0, "baseline": -1.0}
    judged: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for each in store.judgements():
        judged[each.arm, each.question].append(values.get(each.preferred or ""))
    return {
        key: None if len(both) < 2 or None in both else both[0] if both[0] == both[1] else 0.0
        for key, both in judged.items()
    }


class _ScoredArm:
    """The answers of one arm with their scores."""

    def __init__(self) -> None:
        self.answers: list[GivenAnswer] = []
        self.failed: set[str] = set()
        """Questions of which a call failed."""
        self.calls: defaultdict[str, list[float]] = defaultdict(list)
        """The measure of each call, by question."""
        self.first_texts: dict[str, str] = {}
        """First answers without case and punctuation, by question."""
        self._scores: defaultdict[str, list[AnswerScores]] = defaultdict(list)

    def add(self, answer: GivenAnswer, expected: Sequence[str], scorer: Scorer) -> None:
        """Add an answer."""
        id = answer.key.question
        self.answers.append(answer)
        if answer.text is None:
            self.failed.add(id)
            return
        self.calls[id].append(scorer(answer.text, expected))
        self._scores[id].append(score(answer.text, expected))
        if answer.key.repeat == 0:
            self.first_texts[id] = normalized(answer.text)

    @ForkSafeProperty
    def values(self) -> dict[str, float]:
        """The mean of the measure by question, without those of which a call failed."""
        return {id: fmean(values) for id, values in self.calls.items() if id not in self.failed}

    def means(self) -> AnswerScores:
        """Return the means of all scores."""
        means = [AnswerScores(*map(fmean, zip(*self._scores[id], strict=True))) for id in self.values]
        return AnswerScores(*map(fmean, zip(*(means or [AnswerScores(0.0, 0.0, 0.0, 0.0)]), strict=True)))


def _scored_arms(store: AnswerStore, questions: Sequence[EvidenceQuestion], measure: str) -> dict[str, _ScoredArm]:
    scorer = scorer_named(measure)
    expected = {question.id: question.answers for question in questions}
    arms: defaultdict[str, _ScoredArm] = defaultdict(_ScoredArm)
    for answer in store.answers():
        arms[answer.key.arm].add(answer, expected[answer.key.question], scorer)
    return dict(arms)


def compare_runs(earlier: AnswerStore, later: AnswerStore, measure: str) -> dict[str, Comparison]:
    """Compare each arm of a run with the same arm of an earlier one, of another model perhaps. O(answers).

    Raises:
        StoreFileError: A file holds no run.
        NoAnswersError: The runs have other questions, or no arm in common with an answer to the same question.
        ScoreError: The measure is unknown, or its function returned no score.
    """
    arms, questions = later.settings()["arms"], later.questions()
    if earlier.settings() and earlier.questions() != questions:
        raise NoAnswersError(f"{earlier.path} and {later.path} have different questions")
    before, after = (_scored_arms(store, questions, measure) for store in (earlier, later))
    found: dict[str, Comparison] = {}
    for arm in arms:
        if arm in before and arm in after:
            old, new = before[arm].values, after[arm].values
            if differences := [new[id] - old[id] for id in new if id in old]:
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
