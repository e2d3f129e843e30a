"""The engine's prefix cache of whole pieces, with its eviction; it shares no code with the planner's mirror."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["EngineCache"]


class _Piece:
    __slots__ = ("children", "is_held", "key", "parent", "priority", "tokens", "used")

    def __init__(self, key: int, tokens: int, parent: _Piece | None) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Piece] = {}
        self.priority = 0
        self.used = 0
        self.is_held = True

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.priority, self.used


class EngineCache:
    """A prefix cache that evicts the leaf of the lowest priority, and of equal ones the least recently used.

    Without priorities it is LRU. A piece has the greatest priority of the requests that used it, as in SGLang.
    """

    def __init__(self, capacity_tokens: int | None) -> None:
        self._capacity = capacity_tokens
        self._root = _Piece(-1, 0, None)
        self._requests = 0
        self._pushed = 0
        # Ranks of leaves, with a number for equal ones. Entries of pieces that changed since are skipped.
        self._leaves: list[tuple[int, int, int, _Piece]] = []
        self.tokens = 0
        """Tokens of all pieces that it holds."""

    def serve(self, keys: Sequence[int], lengths: Sequence[int], priority: int = 0) -> int:
        """Return how many of a prompt's first pieces are cached, then hold all of them and evict what has no room.

        A piece that is already there keeps its length. O(len(keys)), amortised over the evicted pieces.
        """
        self._requests += 1
        piece, found = self._root, 0
        is_cached = True
        for key, tokens in zip(keys, lengths, strict=True):
            child = piece.children.get(key)
            if child is None:
                is_cached = False
                child = piece.children[key] = _Piece(key, tokens, piece)
                self.tokens += tokens
            found += is_cached
            child.used = self._requests
            child.priority = max(child.priority, priority)
            piece = child
        self._push_leaf(piece)
        while self._capacity is not None and self.tokens > self._capacity:
            self._evict()
        return found

    def _push_leaf(self, piece: _Piece) -> None:
        if piece.parent is not None and not piece.children and self._capacity is not None:
            self._pushed += 1
            heappush(self._leaves, (*piece.rank, self._pushed, piece))

    def _evict(self) -> None:
        *rank, _, leaf = heappop(self._leaves)
        if leaf.is_held and not leaf.children and tuple(rank) == leaf.rank:
            parent = leaf.parent
            assert parent is not None
            leaf.is_held = False
            del parent.children[leaf.key]
            self.tokens -= leaf.tokens
            self._push_leaf(parent)
