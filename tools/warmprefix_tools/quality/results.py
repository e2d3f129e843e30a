"""What the answers of a run show, arm by arm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_tools.fork_safe_property import ForkSafeProperty
from warmprefix_tools.quality.answer_store import AnswerStore, GivenAnswer
from warmprefix_tools.quality.arms import arm_number
from warmprefix_tools.quality.cache_probe import PREFILL_PROBLEMS
from warmprefix_tools.quality.paired import Comparison, compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import JUDGE, MEASURES, AnswerScores, Scorer, normalized, score, scorer_named

__all__ = [
    "ANNOTATE",
    "ArmResult",
    "NoAnswersError",
    "OrderEffect",
    "QualityResults",
    "compare_runs",
    "results_of",
    "verdict",
]


_ERROR_RATE = 0.05
"""Share of models without a place that they read better, of which one is reported."""

ANNOTATE = {"planned": "none", "note": "note", "labels": "labels", "both": "both"}
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
    other_evidence: int
    """Questions of which a choice fed other candidates than the passages."""
    comparison: Comparison | None
    """Over all questions with an answer in both arms; None for a baseline. The verdict is read from it."""
    comparisons: Mapping[str, Comparison]
    """The same by each measure of `MEASURES`; empty for a baseline."""
    noise: float | None
    """Share of questions whose repeated calls have different scores; None without repeats."""
    prompt_tokens: int
    cached_tokens: int | None
    """None if they are not measured: see `QualityResults.prefill_problem`."""
    saved: float | None
    """Share of the baseline's computed prompt tokens that this arm does not compute, over the questions of both arms.

    None for a baseline, or if it is not measured.
    """
    citations: int
    """Labels that the answers name."""
    right_citations: int
    """Those of passages that the answer follows from."""
    same_text: float
    """Share of the questions with the arm's most frequent answer."""


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
    stops: bool
    """True if the run may stop for what its answers show; then all intervals hold at any time."""
    prefill_problem: str | None
    """Why computed tokens are not measured; None if they are."""
    arms: tuple[ArmResult, ...]
    positions: Mapping[int, float]
    """Mean score by the place of the passage with the answer, from 1 on; empty if no arm moved it."""
    orders: OrderEffect | None
    """None if there were fewer than two random orders."""
    chance: float | None
    """Share of guesses that are right; None if it is unknown."""

    @property
    def annotate(self) -> str | None:
        """The `annotate` of a `ContextPlanner` whose arm has the best score of those that are not worse.

        None if no arm with another order is shown to be not worse.
        """
        shown = [
            arm
            for arm in self.arms
            if arm.arm in ANNOTATE and arm.comparison is not None and arm.comparison.is_not_worse(self.margin)
        ]
        if not shown:
            return None
        return ANNOTATE[max(shown, key=lambda arm: arm.comparison.difference if arm.comparison else 0.0).arm]

    @property
    def position_profile(self) -> list[float] | None:
        """The model's right answers in percent, by place; one number if all places are not worse than relevance order.

        None if places are missing, or the run is too small to tell.
        """
        places = len(self.positions)
        compared = [arm.comparison for arm in self.arms if arm_number(arm.arm, "gold") is not None and arm.comparison]
        if places < 2 or [*self.positions] != [*range(1, places + 1)]:
            return None
        right = [round(100 * score, 1) for score in self.positions.values()]
        if min([comparison.p_value for comparison in compared], default=1.0) < _ERROR_RATE / places:
            return right
        return [right[0]] if all(comparison.is_not_worse(self.margin) for comparison in compared) else None

    def as_json(self) -> dict[str, Any]:
        """Return all fields, with `annotate`, and with the `verdict` on each arm."""
        fields = {**asdict(self), "annotate": self.annotate}
        for arm, made in zip(self.arms, fields["arms"], strict=True):
            made |= {"scores": arm.scores._asdict(), "verdict": verdict(arm, self.margin)}
        return fields


def results_of(store: AnswerStore, measure: str, margin: float | None = None) -> QualityResults:
    """Return the results of a run, finished or not. O(answers).

    Repeated calls count as one answer with their mean score. Without a margin, that of the run counts.

    Raises:
        StoreFileError: The file holds no run.
        NoAnswersError: It has no answer yet, or no judgement.
        ScoreError: The measure is unknown, or its function returned no score.
    """
    settings, questions = store.settings(), store.questions()
    judged = measure == JUDGE
    if judged and store.judge() is None:
        raise NoAnswersError(f"{store.path} has no judgements yet: see warmprefix quality judge")
    scored = _scored_arms(store, questions, next(iter(MEASURES)) if judged else measure)
    baselines = {arm: of for arm, of in settings["arms"].items() if arm in scored}
    if not baselines:
        raise NoAnswersError(f"{store.path} has no answers yet")
    stops = bool(settings.get("stop_when_certain"))
    results = _Comparer(
        scored,
        _preferences(store) if judged else None,
        len(questions) if stops else None,
        is_prefill_measured=settings.get("salts") == "kept",
    )
    arms = tuple([results.of(arm, baseline) for arm, baseline in baselines.items()])
    places = {place: arm.score for arm in arms if (place := arm_number(arm.arm, "gold")) and arm.score is not None}
    chances = [question.chance for question in questions if question.chance is not None]
    orders = [scored[arm].values for arm in baselines if arm_number(arm, "shuffled") and not judged]
    return QualityResults(
        settings,
        len(questions),
        measure,
        settings.get("margin", 1.0) / 100 if margin is None else margin,
        stops,
        PREFILL_PROBLEMS.get(settings.get("salts", "unreported")),
        arms,
        dict(sorted(places.items())),
        _order_effect(orders),
        fmean(chances) if len(chances) == len(questions) > 0 else None,
    )


@dataclass(frozen=True, slots=True)
class _Comparer:
    """Compares the arms of a run with their baselines."""

    scored: Mapping[str, _ScoredArm]
    preferences: Mapping[tuple[str, str], float | None] | None
    """Those of a judge, by arm and question; None if the measure counts."""
    most: int | None
    """As of `compare_pairs`."""
    is_prefill_measured: bool

    def of(self, arm: str, baseline: str) -> ArmResult:
        """Return the result of an arm."""
        mine, others = self.scored[arm], self.scored.get(baseline, _ScoredArm())
        both = [id for id in mine.values if id in others.values] if arm != baseline else []
        differences = [mine.values[id] - others.values[id] for id in both]
        if self.preferences is not None:
            equal = {id: 0.0 for id in both if mine.first_texts.get(id) == others.first_texts.get(id)}
            found = [equal[id] if id in equal else self.preferences.get((arm, id)) for id in both]
            differences = [each for each in found if each is not None]
        given = mine.answers.values()
        repeated = [len(set(values)) > 1 for values in mine.calls.values() if len(values) > 1]
        return ArmResult(
            arm,
            baseline,
            len(mine.values),
            len(mine.failed),
            sum(answer.problem == "truncated" for answer in given),
            mine.mean,
            fmean(mine.values.values() or [0.0]) if self.preferences is None else None,
            len(both) - len(differences),
            len({answer.key.question for answer in given if answer.is_changed}),
            len({answer.key.question for answer in given if answer.has_other_evidence}),
            compare_pairs(differences, self.most) if differences else None,
            {name: self._compared(mine, others, both, name) for name in MEASURES if both},
            fmean(repeated) if repeated else None,
            sum(answer.prompt_tokens or 0 for answer in given),
            sum(answer.cached_tokens or 0 for answer in given) if self.is_prefill_measured else None,
            self._saved(mine, others) if arm != baseline else None,
            sum(answer.citations or 0 for answer in given),
            sum(answer.right_citations or 0 for answer in given),
            max(Counter(mine.first_texts.values()).values(), default=0) / max(1, len(mine.first_texts)),
        )

    def _compared(self, mine: _ScoredArm, others: _ScoredArm, both: Sequence[str], measure: str) -> Comparison:
        return compare_pairs(
            [getattr(mine.scores[id], measure) - getattr(others.scores[id], measure) for id in both], self.most
        )

    def _saved(self, mine: _ScoredArm, others: _ScoredArm) -> float | None:
        """Return the share of computed tokens that an arm saves; an answer that reports no cached tokens has none."""
        pairs = [
            (answer, other)
            for call, answer in mine.answers.items()
            if (other := others.answers.get(call)) and answer.prompt_tokens and other.prompt_tokens
        ]
        if not self.is_prefill_measured or not pairs:
            return None
        computed, before = (
            sum((each.prompt_tokens or 0) - (each.cached_tokens or 0) for each in answers)
            for answers in zip(*pairs, strict=True)
        )
        return 1 - computed / before if before else None


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
        self.answers: dict[tuple[str, int], GivenAnswer] = {}
        """By question and repeat."""
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
        self.answers[id, answer.key.repeat] = answer
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

    @ForkSafeProperty
    def scores(self) -> dict[str, AnswerScores]:
        """The means of all scores, by the same questions."""
        return {id: _mean(self._scores[id]) for id in self.values}

    @property
    def mean(self) -> AnswerScores:
        """The means over the questions."""
        return _mean(list(self.scores.values()) or [AnswerScores(*[0.0] * len(AnswerScores._fields))])


def _mean(scores: Sequence[AnswerScores]) -> AnswerScores:
    return AnswerScores(*map(fmean, zip(*scores, strict=True)))


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
    stops = any(store.settings().get("stop_when_certain") for store in (earlier, later))
    found: dict[str, Comparison] = {}
    for arm in arms:
        if arm in before and arm in after:
            old, new = before[arm].values, after[arm].values
            if differences := [new[id] - old[id] for id in new if id in old]:
                found[arm] = compare_pairs(differences, len(questions) if stops else None)
    if not found:
        raise NoAnswersError(f"{earlier.path} and {later.path} have no answers in common")
    return found


def verdict(arm: ArmResult, margin: float) -> str:
    """Return in a word or two how an arm compares with its baseline."""
    return "baseline" if arm.comparison is None else arm.comparison.verdict(margin)
