"""What agents' engines are predicted to hold, and which of more candidates than places a tenant's agents read."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix.choice import Candidates
from warmprefix.ordering import Exposure, PrefixView, choose_candidates
from warmprefix.prefix import PrefixTree

__all__ = ["AgentCache", "HeldBlock", "RecentReads"]


@dataclass(eq=False, slots=True)
class HeldBlock:
    """A block from when it enters a cache until it leaves; when it returns, a new object stands for it."""

    tokens: int
    used: int
    """Number of its last use."""
    read: int = 0
    """Number of the last use that the engine has certainly read; 0 if there was none."""
    pending: int = 0
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

    def __init__(self, capacity_tokens: float | None = None, max_blocks: int = 16_384) -> None:
        self.capacity_tokens = math.inf if capacity_tokens is None else capacity_tokens
        self._max_blocks = max_blocks
        self.blocks: OrderedDict[bytes, HeldBlock] = OrderedDict()
        """By fingerprint, least recently used first; to be read only."""
        self.tokens = 0
        self._number = 0

    def use(self, key: bytes, tokens: int) -> tuple[HeldBlock, Sequence[bytes]]:
        """Record that the engine computes or reads a block. O(1), amortised over the evicted blocks.

        Returns the block, whose `used` is the number of this use, counted from 1; and the blocks evicted for it. A
        block longer than the capacity is evicted at once, after all others.
        """
        self._number += 1
        block = self.blocks.get(key)
        if block is not None:
            block.used = self._number
            self.blocks.move_to_end(key)
            return block, ()
        block = self.blocks[key] = HeldBlock(tokens, self._number)
        self.tokens += tokens
        evicted: list[bytes] = []
        while len(self.blocks) > self._max_blocks or self.tokens > self.capacity_tokens:
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


class RecentReads:
    """The blocks that a tenant's choices gave to agents lately, as if nobody else used their engines.

    A prompt with one document is cached as a whole, so each of these blocks is a path of its own. Neither reports nor
    the order of answers change anything here: both show what other tenants do, who may not change what is read.
    """

    def __init__(self, capacity_tokens: float, max_blocks: int) -> None:
        self._cache = AgentCache(capacity_tokens, max_blocks)
        self._exposure = Exposure()

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self._cache.blocks) + self._exposure.passages

    def choose(self, candidates: Candidates) -> list[int]:
        """Return the indices of the candidates to read, ascending, and count them as read."""
        may_enter, may_leave = self._exposure.allowed(candidates)
        keys, beyond, held = [block.fingerprint for block in candidates.blocks], {*may_enter}, self._cache.blocks
        usable = [
            [keys[i] for i in place if keys[i] in held and (p < candidates.k or i in beyond)]
            for p, place in enumerate(candidates.places)
        ]
        view = PrefixView(PrefixTree(), (), [[twins[0] for twins in usable if twins]])
        fed = choose_candidates(candidates, view, may_enter, may_leave)
        self._exposure.add([keys[i] for i in fed], [keys[i] for i in fed if i in beyond])
        for i in fed:
            self._cache.use(keys[i], candidates.blocks[i].tokens)
        return fed
