"""Conversations in front of a question: earlier turns with passages, and calls of a search tool. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_requests import RewriteLevel, rewrite
from warmprefix_tools.quality.questions import EarlierTurn, EvidenceQuestion

__all__ = ["Messages", "history_of", "later_turn", "tool_chat"]

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


def tool_chat(
    second: Literal["part", "more"], level: RewriteLevel | None
) -> Callable[[EvidenceQuestion, str], Messages]:
    """Return a function that gives the passages as results of a search tool, in an earlier turn and in this one.

    Args:
        second: The result in this turn: a `"part"` of the earlier one, half of it if the answer follows from that; or
            `"more"`, all of it behind another first line.
        level: Which parts become references; None for none.
    """

    def make(question: EvidenceQuestion, system: str) -> Messages:
        passages = list(question.passages)
        again = _half(passages, question.gold) if second == "part" else [f"Results for {question.question}", *passages]
        messages: Messages = [
            {"role": "system", "content": system},
            *_searched(_ABOUT_TOPIC, passages, "call_1"),
            {"role": "assistant", "content": _ALL},
            *_searched(question.question, again, "call_2"),
        ]
        return messages if level is None else rewrite("chat", {"messages": messages}, level=level).body["messages"]

    return make


def _half(passages: Sequence[str], gold: Sequence[int]) -> Sequence[str]:
    """Return the shortest run of neighbours with all gold passages that has at least half of all."""
    size = (len(passages) + 1) // 2
    first, last = (min(gold), max(gold)) if gold else (0, 0)
    begin = max(0, min(first, len(passages) - size))
    return passages[begin : max(begin + size, last + 1)]


def _searched(question: str, passages: Sequence[str], call: str) -> Messages:
    function = {"name": "search", "arguments": json.dumps({"query": question}, ensure_ascii=False)}
    return [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call, "content": "\n\n".join(passages)},
    ]
