"""What an agent's engine is predicted to hold of one tenant: blocks that stand right behind its preamble."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["AgentCache"]


class AgentCache:
    """Blocks by their last use, bounded in tokens and in number; the one not used longest goes first, as in the engine.

    >>> cache = AgentCache(capacity_tokens=100)
    >>> cache.use(b"A", 60), cache.use(b"B", 30)
    ((None, ()), (None, ()))
    >>> cache.use(b"C", 40)
    (None, [b'A'])
    >>> b"A" in cache, b"B" in cache
    (False, True)
    """

    def __init__(self, capacity_tokens: int | None = None, max_blocks: int = 65_536) -> None:
        self._capacity = capacity_tokens
        self._max_blocks = max_blocks
        self._uses: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Tokens, and the number of the last use."""
        self._tokens = 0
        self._number = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[bytes]:
        """The blocks held, the one not used longest first."""
        return iter(self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def tokens(self) -> int:
        """Of all blocks held."""
        return self._tokens

    @property
    def number(self) -> int:
        """Of the last use of any block: uses are counted from 1 on."""
        return self._number

    def last_use(self, key: bytes) -> int | None:
        """The number of its last use; None if it is not held."""
        use = self._uses.get(key)
        return None if use is None else use[1]

    def use(self, key: bytes, tokens: int) -> tuple[int | None, Sequence[bytes]]:
        """The engine computes or reads this block. O(1), amortised over the blocks that leave.

        Returns:
            The number of its use before, None if it was not held; and the blocks that leave for it. A block longer
            than the capacity leaves at once itself.
        """
        self._number += 1
        before = self._uses.get(key)
        if before is not None:
            self._uses[key] = before[0], self._number
            self._uses.move_to_end(key)
            return before[1], ()
        self._uses[key] = tokens, self._number
        self._tokens += tokens
        if not self._over():
            return None, ()
        left: list[bytes] = []
        while self._over():
            oldest, (length, _) = self._uses.popitem(last=False)
            self._tokens -= length
            left.append(oldest)
        return None, left

    def drop(self, key: bytes) -> bool:
        """The engine does not hold this block. Returns whether it was thought to."""
        use = self._uses.pop(key, None)
        if use is None:
            return False
        self._tokens -= use[0]
        return True

    def drop_before(self, number: int) -> list[bytes]:
        """The engine holds nothing whose last use was before this one. Returns what it was thought to hold."""
        left: list[bytes] = []
        while self._uses:
            oldest = next(iter(self._uses))
            if self._uses[oldest][1] >= number:
                break
            self.drop(oldest)
            left.append(oldest)
        return left

    def _over(self) -> bool:
        if len(self._uses) > self._max_blocks:
            return True
        return self._capacity is not None and self._tokens > self._capacity
