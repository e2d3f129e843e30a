"""Prompts as the engine receives them, and its prefix cache of whole blocks.

A prompt is a sequence of pieces, each with a number. Two prompts share the numbers that they begin with. With placement
`head` a prompt is the context in planned order; the rest of the prompt cannot be shared, so it is left out. With `tail`
it is the conversation so far and this turn's context and question. Then only the first turn's context can be shared
with other conversations, since a question follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

from warmprefix.plan import Placement
from warmprefix.prefix import PrefixTree
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.workload import ReplayRequest, Workload

__all__ = ["CacheModel", "CachedTokens", "PromptLayout", "ReplayPrompt", "prompt_layout"]


class ReplayPrompt(NamedTuple):
    """One request's prompt, behind the preamble."""

    keys: Sequence[int]
    """Pieces that the cache holds after the answer: those of the prompt, and the answer."""
    tokens: Sequence[int]
    """Tokens of each piece."""
    total_tokens: int
    """Tokens of the prompt, without the answer."""
    private_tokens: int
    """Tokens of this turn's question and references, which are new to every cache."""


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
        keys, tokens = request.keys, request.tokens
        return ReplayPrompt([keys[i] for i in order.order], [tokens[i] for i in order.order], request.context_tokens, 0)


class _TailLayout:
    def __init__(self, workload: Workload, answer_tokens: int) -> None:
        self._answer_tokens = answer_tokens
        self._private = count(workload.keys)
        self._histories: dict[tuple[str | None, str], _History] = {}

    def lay_out(self, request: ReplayRequest, order: ContextOrder) -> ReplayPrompt:
        history = self._history(request)
        opens_prompt = not history.keys
        notes = dict(order.references)
        for i in order.order:
            # Behind a question, no other prompt has the same prefix. A note names this conversation's own labels.
            history.keys.append(request.keys[i] if opens_prompt and i not in notes else next(self._private))
            history.tokens.append(notes.get(i, request.tokens[i]))
        history.keys.append(next(self._private))
        history.tokens.append(request.source.query_tokens)
        total = sum(history.tokens)
        if self._answer_tokens:
            history.keys.append(next(self._private))
            history.tokens.append(self._answer_tokens)
        return ReplayPrompt(history.keys, history.tokens, total, sum(notes.values()) + request.source.query_tokens)

    def _history(self, request: ReplayRequest) -> _History:
        if request.conversation is None:
            return _History([], [])
        return self._histories.setdefault((request.source.scope, request.conversation), _History([], []))


class _History(NamedTuple):
    keys: list[int]
    tokens: list[int]


class CachedTokens(NamedTuple):
    """Tokens of a prompt that a cache holds."""

    now: int
    ever: int
    """Tokens that a cache which never evicts would hold."""


class CacheModel:
    """A prefix cache that serves one prompt after another; no planner reads it.

    The state is a `PrefixTree`, as in the planner's own mirror, but it receives the prompts of all scopes, while the
    mirror receives the commits of one. If it is full, it evicts the least recently used paths from their tails. A
    second tree without a bound separates evicted tokens from those that were never held.
    """

    def __init__(self, capacity_tokens: int | None, requests: int) -> None:
        """Make room for `capacity_tokens`, or without a bound for None, and `requests`."""
        max_nodes = 2 * requests + 1
        self._held = PrefixTree[int](capacity_tokens, max_nodes)
        self._ever = None if capacity_tokens is None else PrefixTree[int](None, max_nodes)

    def serve(self, keys: Sequence[int], tokens: Sequence[int]) -> CachedTokens:
        """Return the cached tokens of a prompt, then hold all of it. O(len(keys))."""
        now = self._held.insert(keys, tokens).tokens
        return CachedTokens(now, now if self._ever is None else self._ever.insert(keys, tokens).tokens)
