"""The predicted cache of one agent, for one tenant."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["AgentCache", "HeldBlock"]


class HeldBlock:
    """A block from when it enters a cache until it leaves; when it returns, a new object stands for it."""

    __slots__ = ("pending", "read", "tokens", "used")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.used = 0
        """Number of its last use."""
        self.read = 0
        """Number of the last use that the engine has certainly read; 0 if there was none."""
        self.pending = 0
        """Number of uses that may still be read or taken back."""


class AgentCache:
    """The blocks that an engine is predicted to hold right behind the preamble, for one tenant.

    Bounded in tokens and in number; the least recently used block leaves first, as in the engine.

    >>> cache = AgentCache(capacity_tokens=100)
    >>> for key, tokens in ((b"A", 60), (b"B", 30), (b"C", 40)):
    ...     block, evicted = cache.use(key, tokens)
    ...     print(block.used, evicted)
    1 []
    2 []
    3 [b'A']
    """

    def __init__(self, capacity_tokens: int | None = None, max_blocks: int = 16_384) -> None:
        self._capacity = math.inf if capacity_tokens is None else capacity_tokens
        self._max_blocks = max_blocks
        self.blocks: OrderedDict[bytes, HeldBlock] = OrderedDict()
        """By fingerprint, least recently used first; to be read only."""
        self.tokens = 0
        """Tokens of all blocks held."""
        self._number = 0

    def use(self, key: bytes, tokens: int) -> tuple[HeldBlock, Sequence[bytes]]:
        """Record that the engine computes or reads a block. O(1), amortised over the evicted blocks.

        Returns:
            The block, whose `used` is the number of this use, counted from 1; and the blocks evicted for it. A block
            longer than the capacity is evicted at once, after all others.
        """
        self._number += 1
        block = self.blocks.get(key)
        if block is not None:
            block.used = self._number
            self.blocks.move_to_end(key)
            return block, ()
        block = self.blocks[key] = HeldBlock(tokens)
        block.used = self._number
        self.tokens += tokens
        evicted: list[bytes] = []
        while len(self.blocks) > self._max_blocks or self.tokens > self._capacity:
            oldest, gone = self.blocks.popitem(last=False)
            self.tokens -= gone.tokens
            evicted.append(oldest)
        return block, evicted

    def drop(self, key: bytes) -> bool:
        """Record that the engine lacks a block. True if the block counted as held."""
        block = self.blocks.pop(key, None)
        if block is None:
            return False
        self.tokens -= block.tokens
        return True

    def drop_before(self, number: int) -> list[bytes]:
        """Drop and return all blocks whose last use was before this one."""
        dropped: list[bytes] = []
        while self.blocks:
            oldest = next(iter(self.blocks))
            if self.blocks[oldest].used >= number:
                break
            self.drop(oldest)
            dropped.append(oldest)
        return dropped
