"""The engine's prefix cache as replay models it: whole blocks, least recently used paths evicted from their tails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from warmprefix.prefix.tree import PrefixTree

__all__ = ["CacheModel", "Found"]


class Found(NamedTuple):
    """Tokens of a prompt that the cache held."""

    now: int
    ever: int
    """What a cache that never evicts would hold of it."""


class CacheModel:
    """Serves prompts, one after the other; no planner looks into it.

    The state is a `PrefixTree`, as in the planner's own mirror, but fed with what was sent of all scopes, not with
    what one scope of the planner committed. A second tree, without a bound, tells evicted from never held.
    """

    def __init__(self, capacity_tokens: int | None, requests: int) -> None:
        """Room for `capacity_tokens`, None for no bound, and for the nodes of so many requests."""
        most_nodes = 2 * requests + 1
        self._held = PrefixTree[int](capacity_tokens, most_nodes)
        self._ever = None if capacity_tokens is None else PrefixTree[int](None, most_nodes)

    def serve(self, keys: Sequence[int], tokens: Sequence[int]) -> Found:
        """What is held of a prompt, which is held as a whole from then on. O(len(keys))."""
        now = self._held.insert(keys, tokens).tokens
        return Found(now, now if self._ever is None else self._ever.insert(keys, tokens).tokens)
