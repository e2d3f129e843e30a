"""Conversations in front of a question: earlier turns with passages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_tools.quality.questions import EarlierTurn, EvidenceQuestion

__all__ = ["Messages", "history_of", "later_turn"]

Messages = list[dict[str, Any]]

_ABOUT_TOPIC = "Which of these passages are about the same topic?"
_ALL = "All of them."


def history_of(question: EvidenceQuestion) -> Messages:
    """Return the earlier turns without their passages."""
    return [message for turn in question.earlier for message in _turn(turn.question, turn.answer)]


def _turn(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _earlier(question: EvidenceQuestion) -> Sequence[EarlierTurn]:
    """Return the earlier turns; without any, one that has the passages of the question."""
    return question.earlier or (EarlierTurn(_ABOUT_TOPIC, _ALL, question.passages),)


def later_turn(refers: bool) -> Callable[[EvidenceQuestion, str], Messages]:
    """Return a function that puts each turn's passages in front of its question.

    Passages of earlier turns return as references, or in full again. All passages have labels in both cases.
    """

    def make(question: EvidenceQuestion, system: str) -> Messages:
        history: Messages = [{"role": "system", "content": system}]
        planner = ContextPlanner()
        turns = [*_earlier(question), EarlierTurn(question.question, "", question.passages)]
        for turn in turns:
            shown = history if refers else history[:1]
            blocks = [ContextBlock(text) for text in turn.passages]
            with planner.planning(
                blocks, placement="tail", history=shown, order_locked=True, annotate="labels"
            ) as plan:
                history.append(messages_for(plan, turn.question, shown)[-1])
            history.append({"role": "assistant", "content": turn.answer})
        return history[:-1]

    return make
