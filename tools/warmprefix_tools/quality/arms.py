"""The arms of a comparison: the same question and evidence, arranged in different ways. Pure, and deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.openai import messages_for
from warmprefix_tools.quality.questions import EvidenceQuestion

__all__ = ["ARMS", "BASELINES", "ArmPrompt", "prompts_of"]

SYSTEM = (
    "Answer the question from the context, in as few words as possible. If the context does not hold the answer, "
    "reply: unanswerable."
)
_EARLIER = "Which of these passages are about the same topic?"
_EARLIER_ANSWER = "All of them."

Messages = list[dict[str, Any]]


class ArmPrompt(NamedTuple):
    """What a model is asked in one arm."""

    question: EvidenceQuestion
    arm: str
    messages: Messages
    is_changed: bool
    """False if the prompt is the baseline's."""


def prompts_of(arms: Sequence[str], questions: Sequence[EvidenceQuestion], seed: int) -> Iterator[ArmPrompt]:
    """Yield the prompts of all arms for each question.

    Arms that plan do so with one planner over the questions in their order, as an application that answers them one
    after another. O(tokens of all prompts).
    """
    makers = {arm: ARMS[arm](seed) for arm in dict.fromkeys([*arms, *[BASELINES[arm] for arm in arms]])}
    for question in questions:
        made = {arm: maker(question) for arm, maker in makers.items()}
        for arm, messages in made.items():
            yield ArmPrompt(question, arm, messages, messages != made[BASELINES[arm]])


Maker = Callable[[EvidenceQuestion], Messages]


def _fixed(order: Callable[[EvidenceQuestion, random.Random], Sequence[str]]) -> Callable[[int], Maker]:
    """Return an arm with an order that no planner chooses."""

    def new(seed: int) -> Maker:
        planner = ContextPlanner(annotate="none")

        def make(question: EvidenceQuestion) -> Messages:
            rng = random.Random(f"{seed} {question.id}")  # noqa: S311
            blocks = [ContextBlock(text) for text in order(question, rng)]
            plan = planner.plan(blocks, order_locked=True)
            planner.abandon(plan)
            return messages_for(plan, question.question, preamble=SYSTEM)

        return make

    return new


def _planned(annotate: Annotate) -> Callable[[int], Maker]:
    def new(seed: int) -> Maker:
        planner = ContextPlanner(annotate=annotate)

        def make(question: EvidenceQuestion) -> Messages:
            with planner.planning(_blocks(question), preamble=SYSTEM) as plan:
                return messages_for(plan, question.question, preamble=SYSTEM)

        return make

    return new


def _later_turn(refers: bool) -> Callable[[int], Maker]:
    """Return an arm whose question follows a turn with the same passages: as references, or in full again."""

    def new(seed: int) -> Maker:
        def make(question: EvidenceQuestion) -> Messages:
            planner = ContextPlanner()
            with planner.planning(_blocks(question), placement="tail", history=[]) as first:
                opening = messages_for(first, _EARLIER, preamble=SYSTEM)
            history = [*opening, {"role": "assistant", "content": _EARLIER_ANSWER}]
            if refers:
                with planner.planning(_blocks(question), placement="tail", history=history) as plan:
                    return messages_for(plan, question.question, history)
            again = opening[-1]["content"].removesuffix(_EARLIER)
            return [*history, {"role": "user", "content": again + question.question}]

        return make

    return new


def _blocks(question: EvidenceQuestion) -> list[ContextBlock]:
    return [ContextBlock(text) for text in question.passages]


def _shuffled(question: EvidenceQuestion, rng: random.Random) -> Sequence[str]:
    return rng.sample(question.passages, len(question.passages))


def _gold_at(share: float) -> Callable[[EvidenceQuestion, random.Random], Sequence[str]]:
    def order(question: EvidenceQuestion, rng: random.Random) -> Sequence[str]:
        gold = [text for at, text in enumerate(question.passages) if at in question.gold]
        others = [text for at, text in enumerate(question.passages) if at not in question.gold]
        place = round(share * len(others))
        return [*others[:place], *gold, *others[place:]]

    return order


ARMS: Mapping[str, Callable[[int], Maker]] = {
    "relevance": _fixed(lambda question, rng: question.passages),
    "planned": _planned("none"),
    "note": _planned("note"),
    "labels": _planned("labels"),
    "both": _planned("both"),
    "shuffled": _fixed(_shuffled),
    "gold-first": _fixed(_gold_at(0.0)),
    "gold-middle": _fixed(_gold_at(0.5)),
    "gold-last": _fixed(_gold_at(1.0)),
    "full-again": _later_turn(refers=False),
    "references": _later_turn(refers=True),
}
"""By name: relevance order; planned order with no note, with a note, with labels, with both; a random order; the
passage with the answer first, in the middle, last; a later turn that has the passages in full again, or as references.
"""

BASELINES: Mapping[str, str] = dict.fromkeys(ARMS, "relevance") | {
    "references": "full-again",
    "full-again": "full-again",
}
"""The arm that each one is compared with."""
