"""What the engine is sent: prompts as sequences of pieces, each of which the cache knows by a number.

Equal numbers behind equal numbers are what prompts share. With placement `head` a prompt is the context in planned
order, and what follows it can't be shared, so it is left out. With `tail` it is the conversation so far and this
turn's context and question; only the first turn's context can be shared with other conversations, since a question
stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

from warmprefix.plan import Placement
from warmprefix_tools.replay.arrange import Arranged
from warmprefix_tools.replay.workload import Request, Workload

__all__ = ["Prompt", "Prompts", "prompts_for"]


class Prompt(NamedTuple):
    """One request's prompt, behind the preamble."""

    keys: Sequence[int]
    """What the cache holds once the model has answered: the prompt's pieces, and its answer."""
    tokens: Sequence[int]
    total_tokens: int
    """Of the prompt."""
    private_tokens: int
    """Of this turn's question and references: new to every cache."""


class Prompts(Protocol):
    """Lays out the prompts of one run, in order."""

    def lay_out(self, request: Request, arranged: Arranged) -> Prompt:
        """The request's prompt; it becomes history of its conversation, where there is one that stays."""
        ...


def prompts_for(workload: Workload, placement: Placement, answer_tokens: int) -> Prompts:
    """The layout of a placement, for one run."""
    return _Head() if placement == "head" else _Tail(workload, answer_tokens)


class _Head:
    def lay_out(self, request: Request, arranged: Arranged) -> Prompt:
        keys, tokens = request.keys, request.tokens
        order = arranged.order
        return Prompt([keys[i] for i in order], [tokens[i] for i in order], request.context_tokens, 0)


class _Tail:
    def __init__(self, workload: Workload, answer_tokens: int) -> None:
        self._answer_tokens = answer_tokens
        self._private = count(workload.keys)
        self._histories: dict[tuple[str | None, str], _History] = {}

    def lay_out(self, request: Request, arranged: Arranged) -> Prompt:
        history = self._history(request)
        opens_prompt = not history.keys
        spared = dict(arranged.references)
        for i in arranged.order:
            # Behind a question nobody else's blocks can be hit, nor can a note that names another conversation's.
            history.keys.append(request.keys[i] if opens_prompt and i not in spared else next(self._private))
            history.tokens.append(spared.get(i, request.tokens[i]))
        history.keys.append(next(self._private))
        history.tokens.append(request.source.query_tokens)
        total = sum(history.tokens)
        if self._answer_tokens:
            history.keys.append(next(self._private))
            history.tokens.append(self._answer_tokens)
        return Prompt(history.keys, history.tokens, total, sum(spared.values()) + request.source.query_tokens)

    def _history(self, request: Request) -> _History:
        if request.conversation is None:
            return _History([], [])
        return self._histories.setdefault((request.source.scope, request.conversation), _History([], []))


class _History(NamedTuple):
    keys: list[int]
    tokens: list[int]
