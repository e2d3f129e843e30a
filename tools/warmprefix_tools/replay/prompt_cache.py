"""Prompts as the engine receives them, and its prefix cache of whole blocks.

A prompt is a sequence of pieces, each with a number. Two prompts share the numbers that they begin with. With placement
`head` a prompt is the context in planned order, each block with its label. A note behind the context counts as
prefilled. The rest of the prompt cannot be shared, so it is left out. With `tail` a prompt is the conversation so far
and this turn's context, notes and question. Then only the first turn's context can be shared with other conversations,
since a question follows it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

from warmprefix.plan import Placement
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.engine_cache import EngineCache
from warmprefix_tools.replay.workload import ReplayRequest, Workload

__all__ = ["CacheModel", "CachedPieces", "PromptLayout", "ReplayPrompt", "prompt_layout"]


class ReplayPrompt(NamedTuple):
    """One request's prompt, behind the preamble.

    Its pieces are those that the cache holds after the answer. Each has tokens that the application sends in any case,
    and tokens that warmprefix writes.
    """

    keys: Sequence[int]
    """Numbers of the pieces: those of the prompt, and the answer."""
    tokens: Sequence[int]
    """The application's tokens of each piece."""
    written: Sequence[int]
    """Tokens of the labels and notes in each piece; empty if there are none."""
    total_tokens: int
    """The application's tokens of the prompt, without the answer."""
    note_tokens: int
    """Tokens of all labels, notes and references in the prompt."""
    question_tokens: int
    """Tokens of this turn's question, which is new to every cache."""

    def lengths(self) -> Sequence[int]:
        """Return all tokens of each piece."""
        return list(map(operator.add, self.tokens, self.written)) if self.written else self.tokens


class PromptLayout(Protocol):
    """Prompts of one run, in order."""

    def lay_out(self, request: ReplayRequest, order: ContextOrder) -> ReplayPrompt:
        """Return a request's prompt, and add it to a history that stays."""
        ...


def prompt_layout(workload: Workload, placement: Placement, answer_tokens: int) -> PromptLayout:
    """Return the layout of a placement, for one run."""
    return _HeadLayout() if placement == "head" else _TailLayout(workload, answer_tokens)


class _HeadLayout:
    def lay_out(self, request: ReplayRequest, order: ContextOrder) -> ReplayPrompt:
        tokens = [request.tokens[i] for i in order.order]
        return ReplayPrompt(
            keys=[request.keys[i] for i in order.order],
            tokens=tokens,
            written=order.label_tokens,
            total_tokens=sum(tokens),
            note_tokens=order.written_tokens,
            question_tokens=0,
        )


class _TailLayout:
    def __init__(self, workload: Workload, answer_tokens: int) -> None:
        self._answer_tokens = answer_tokens
        self._private = count(workload.keys)
        self._histories: dict[tuple[str | None, str], _History] = {}

    def lay_out(self, request: ReplayRequest, order: ContextOrder) -> ReplayPrompt:
        history = self._history(request)
        opens_prompt = not history.keys
        labels = order.label_tokens or (0,) * len(order.order)
        for i, label in zip(order.order, labels, strict=True):
            if i not in order.references:
                # Behind a question, no other prompt has the same prefix.
                history.add(request.keys[i] if opens_prompt else next(self._private), request.tokens[i], label)
        if order.note_tokens:
            history.add(next(self._private), 0, order.note_tokens)
        question_tokens = request.source.query_tokens
        history.add(next(self._private), question_tokens)
        total, note_tokens = sum(history.tokens), sum(history.written)
        if self._answer_tokens:
            history.add(next(self._private), self._answer_tokens)
        return ReplayPrompt(history.keys, history.tokens, history.written, total, note_tokens, question_tokens)

    def _history(self, request: ReplayRequest) -> _History:
        if request.conversation is None:
            return _History([], [], [])
        return self._histories.setdefault((request.source.scope, request.conversation), _History([], [], []))


class _History(NamedTuple):
    keys: list[int]
    tokens: list[int]
    written: list[int]

    def add(self, key: int, tokens: int, written: int = 0) -> None:
        self.keys.append(key)
        self.tokens.append(tokens)
        self.written.append(written)


class CachedPieces(NamedTuple):
    """Number of a prompt's first pieces that a cache holds."""

    now: int
    ever: int
    """Pieces that a cache which never evicts would hold."""


class CacheModel:
    """A prefix cache that serves one prompt after another; it shares no code with the planner's mirror.

    It receives the prompts of all scopes, while the mirror receives the commits of one. A second cache without a bound
    separates evicted tokens from those that were never held.
    """

    def __init__(self, capacity_tokens: int | None) -> None:
        """Make room for `capacity_tokens`, or without a bound for None."""
        self._held = EngineCache(capacity_tokens)
        self._ever = None if capacity_tokens is None else EngineCache(None)

    def serve(self, prompt: ReplayPrompt, priority: int = 0) -> CachedPieces:
        """Return how much of a prompt is cached, then hold all of it. O(len(prompt.keys))."""
        lengths = prompt.lengths()
        now = self._held.serve(prompt.keys, lengths, priority)
        return CachedPieces(now, now if self._ever is None else self._ever.serve(prompt.keys, lengths))

    def touch(self, prompt: ReplayPrompt, pieces: int, priority: int = 0) -> int:
        """Serve the first pieces of an earlier prompt again; return the tokens of them that are cached."""
        lengths = prompt.lengths()[:pieces]
        return sum(lengths[: self._held.serve(prompt.keys[:pieces], lengths, priority)])
