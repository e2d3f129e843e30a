"""What the answers of a run show, arm by arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_tools.quality.answer_store import AnswerStore, GivenAnswer
from warmprefix_tools.quality.arms import BASELINES
from warmprefix_tools.quality.paired import Comparison, compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import AnswerScores, Measure, score

__all__ = ["ArmResult", "NoAnswersError", "QualityResults", "compare_runs", "remarks", "results_of", "verdict"]


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
    changed: int
    """Questions whose prompt differs from the baseline's."""
    comparison: Comparison | None
    """Over all questions with an answer in both arms; None for a baseline."""
    noise: float | None
    """Share of questions whose repeated calls have different scores; None without repeats."""
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class QualityResults:
    """The results of a run."""

    settings: Mapping[str, Any]
    questions: int
    measure: Measure
    margin: float
    """1 point is 0.01."""
    arms: tuple[ArmResult, ...]

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
        return _ANNOTATE[max(shown, key=lambda arm: getattr(arm.scores, self.measure)).arm]

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


def results_of(store: AnswerStore, measure: Measure, margin: float) -> QualityResults:
    """Return the results of a run, finished or not. O(answers).

    Repeated calls count as one answer with their mean score.

    Raises:
        StoreFileError: The file holds no run.
        NoAnswersError: It has no answer yet.
    """
    settings = store.settings()
    questions = {question.id: question for question in store.questions()}
    answers = list(store.answers())
    scores, failed = _scored(answers, questions)
    changed: dict[str, set[str]] = defaultdict(set)
    truncated: dict[str, int] = defaultdict(int)
    tokens: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for answer in answers:
        question, arm, _ = answer.key
        tokens[arm][0] += answer.prompt_tokens or 0
        tokens[arm][1] += answer.cached_tokens or 0
        truncated[arm] += answer.problem == "truncated"
        if answer.is_changed:
            changed[arm].add(question)
    arms = [arm for arm in BASELINES if arm in scores or arm in failed]
    if not arms:
        raise NoAnswersError(f"{store.path} has no answers yet")
    means = {arm: _means(scores[arm], failed[arm]) for arm in arms}
    made: list[ArmResult] = []
    for arm in arms:
        mine, baseline = means[arm], BASELINES[arm]
        both = [question for question in questions if question in mine and question in means.get(baseline, {})]
        differences = [getattr(mine[each], measure) - getattr(means[baseline][each], measure) for each in both]
        repeated = [each for each in scores[arm].values() if len(each) > 1]
        made.append(
            ArmResult(
                arm,
                baseline,
                len(mine),
                len(failed[arm]),
                truncated[arm],
                AnswerScores(*[sum(values) / max(len(mine), 1) for values in zip(*mine.values(), strict=True)])
                if mine
                else AnswerScores(0.0, 0.0, 0.0, 0.0),
                len(changed[arm]),
                compare_pairs(differences) if arm != baseline and differences else None,
                sum(len({getattr(each, measure) for each in calls}) > 1 for calls in repeated) / len(repeated)
                if repeated
                else None,
                *tokens[arm],
            )
        )
    return QualityResults(settings, len(questions), measure, margin, tuple(made))


_Scores = Mapping[str, Mapping[str, list[AnswerScores]]]
"""For each arm and question, the scores of its calls."""


def _scored(
    answers: Iterable[GivenAnswer], questions: Mapping[str, EvidenceQuestion]
) -> tuple[_Scores, Mapping[str, Collection[str]]]:
    """Return the scores of answers, and for each arm the questions of which a call failed."""
    scores: dict[str, dict[str, list[AnswerScores]]] = defaultdict(lambda: defaultdict(list))
    failed: dict[str, set[str]] = defaultdict(set)
    for answer in answers:
        question, arm, _ = answer.key
        if answer.text is None:
            failed[arm].add(question)
        else:
            scores[arm][question].append(score(answer.text, questions[question].answers))
    return scores, failed


def _means(scores: Mapping[str, list[AnswerScores]], failed: Collection[str]) -> dict[str, AnswerScores]:
    """Return for each question the mean scores of its calls, unless one of them failed."""
    return {
        question: AnswerScores(*[sum(values) / len(values) for values in zip(*each, strict=True)])
        for question, each in scores.items()
        if question not in failed
    }


def compare_runs(earlier: AnswerStore, later: AnswerStore, measure: Measure) -> dict[str, Comparison]:
    """Compare each arm of a run with the same arm of an earlier one, of another model perhaps. O(answers).

    Raises:
        StoreFileError: A file holds no run.
        NoAnswersError: The runs have other questions, or no arm in common with an answer to the same question.
    """
    questions = {question.id: question for question in later.questions()}
    if earlier.questions() != list(questions.values()):
        raise NoAnswersError(f"{earlier.path} and {later.path} have different questions")
    means: list[dict[str, dict[str, AnswerScores]]] = []
    for store in (earlier, later):
        store.settings()
        scores, failed = _scored(store.answers(), questions)
        means.append({arm: _means(scores[arm], failed[arm]) for arm in BASELINES if arm in scores})
    before, after = means
    found: dict[str, Comparison] = {}
    for arm in after:
        both = [id for id in questions if id in after[arm] and id in before.get(arm, {})]
        if both:
            pairs = [(getattr(after[arm][id], measure), getattr(before[arm][id], measure)) for id in both]
            found[arm] = compare_pairs([new - old for new, old in pairs])
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
    for arm in results.arms:
        if arm.failed:
            found.append(f"{arm.arm}: {arm.failed} questions have no answer and count in no comparison.")
        if arm.truncated:
            found.append(f"{arm.arm}: {arm.truncated} answers were cut; raise --max-tokens.")
        if arm.comparison is not None and arm.changed < arm.answers:
            found.append(f"{arm.arm}: {arm.changed} of {arm.answers} prompts differ from {arm.baseline}.")
        if arm.noise is not None:
            found.append(f"{arm.arm}: repeated calls have another score at {100 * arm.noise:.1f}% of the questions.")
    return found
