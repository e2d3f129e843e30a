"""Watches the answers of a run as they come: how many change, and whether each arm is certain. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from warmprefix_tools.quality.answer_store import GivenAnswer
from warmprefix_tools.quality.paired import PairCounts, loss_of, questions_needed
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import score

__all__ = ["FORECAST_QUESTIONS", "RunWatch"]

FORECAST_QUESTIONS = 50
"""Questions after which the share of changed answers says something."""


class RunWatch:
    """Compares the arms by `contains` while a run goes on, each question when all of its answers are there."""

    def __init__(
        self,
        baselines: Mapping[str, str],
        questions: Sequence[EvidenceQuestion],
        margin: float,
        *,
        repeats: int = 1,
        stops: bool = False,
    ) -> None:
        """Watch a run.

        Args:
            baselines: The baseline of each arm.
            questions: All questions of the run.
            margin: The loss to refute; 1 point is 0.01.
            repeats: Calls per question and arm.
            stops: True if the run stops when every arm is certain.
        """
        self.answered = 0
        """Questions with all of their answers."""
        self._baselines, self._margin, self._stops = baselines, margin, stops
        self._expected = {question.id: question.answers for question in questions}
        self._calls = len(baselines) * repeats
        self._waiting: defaultdict[str, list[tuple[str, float | None]]] = defaultdict(list)
        self._counts = {arm: PairCounts() for arm, baseline in baselines.items() if arm != baseline}

    def add(self, answer: GivenAnswer) -> None:
        """Count an answer; each call counts once."""
        id, text = answer.key.question, answer.text
        found = None if text is None else score(text, self._expected[id]).contains
        self._waiting[id].append((answer.key.arm, found))
        if len(self._waiting[id]) == self._calls:
            self._compare(self._waiting.pop(id))

    def _compare(self, found: Sequence[tuple[str, float | None]]) -> None:
        self.answered += 1
        scores: defaultdict[str, list[float | None]] = defaultdict(list)
        for arm, each in found:
            scores[arm].append(each)
        means = {arm: fmean(rated) for arm, given in scores.items() if len(rated := _known(given)) == len(given)}
        for arm, counts in self._counts.items():
            if arm in means and self._baselines[arm] in means:
                counts.add(means[arm] - means[self._baselines[arm]])

    @property
    def is_certain(self) -> bool:
        """True if the run may stop: every arm is shown to be better, worse, or not worse by the margin."""
        if not self._stops or not self._counts or self.answered < FORECAST_QUESTIONS:
            return False
        return all(counts.is_certain(self._margin, len(self._expected)) for counts in self._counts.values())

    def forecast(self) -> str:
        """Return how many answers change, and how many questions the margin needs."""
        shares = sorted([counts.changed_share for counts in self._counts.values() if counts.pairs])
        if not shares:
            return f"After {self.answered} questions, no arm can be compared."
        needed = [questions_needed(share, self._margin, stops=self._stops) for share in shares]
        changed, questions = (
            f"{few} to {many}" if few != many else few
            for few, many in (
                [f"{100 * shares[end]:.0f}" for end in (0, -1)],
                [f"{needed[end]:,}" for end in (0, -1)],
            )
        )
        return (
            f"After {self.answered} questions, an arm changes {changed}% of the answers from right to wrong or back."
            f" At that rate, refuting {loss_of(self._margin)} takes about {questions} questions if nothing is lost;"
            f" this run has {len(self._expected):,}."
        )


def _known(scores: Sequence[float | None]) -> list[float]:
    return [each for each in scores if each is not None]
