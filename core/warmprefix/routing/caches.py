"""What an agent's engine is predicted to hold of one tenant: blocks that stand right behind its preamble."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["AgentCache", "HeldBlock"]


class HeldBlock:
    """A block from when it comes to a cache until it leaves; when it comes again, it is another one."""

    __slots__ = ("read", "tokens", "under_way", "used")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.used = 0
        """The number of its last use."""
        self.read = 0
        """The number of the last use of which it is known that the engine did read it; 0 if of none."""
        self.under_way = 0
        """Uses of which that is not known yet."""


class AgentCache:
    """Blocks by their last use, bounded in tokens and in number; the one not used longest goes first, as in the engine.

    >>> cache = AgentCache(capacity_tokens=100)
    >>> for key, tokens in ((b"A", 60), (b"B", 30), (b"C", 40)):
    ...     block, left = cache.use(key, tokens)
    ...     print(block.used, left)
    1 ()
    2 ()
    3 [b'A']
    >>> b"A" in cache, b"B" in cache
    (False, True)
    """

    def __init__(self, capacity_tokens: int | None = None, max_blocks: int = 16_384) -> None:
        self._capacity = capacity_tokens
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._tokens = 0
        self._number = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        """The blocks held, the one not used longest first."""
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tokens(self) -> int:
        """Of all blocks held."""
        return self._tokens

    def get(self, key: bytes) -> HeldBlock | None:
        """The block, if it is held. Not a use of it."""
        return self._blocks.get(key)

    def use(self, key: bytes, tokens: int) -> tuple[HeldBlock, Sequence[bytes]]:
        """The engine computes or reads this block. O(1), amortised over the blocks that leave.

        Returns:
            The block, of which `used` is the number of this use, counted from 1 on; and the blocks that leave for it. A
            block longer than the capacity leaves at once itself, after all others.
        """
        self._number += 1
        block = self._blocks.get(key)
        if block is not None:
            block.used = self._number
            self._blocks.move_to_end(key)
            return block, ()
        block = self._blocks[key] = HeldBlock(tokens)
        block.used = self._number
        self._tokens += tokens
        if not self._over():
            return block, ()
        left: list[bytes] = []
        while self._over():
            oldest, gone = self._blocks.popitem(last=False)
            self._tokens -= gone.tokens
            left.append(oldest)
        return block, left

    def drop(self, key: bytes) -> bool:
        """The engine does not hold this block. Returns whether it was thought to."""
        block = self._blocks.pop(key, None)
        if block is None:
            return False
        self._tokens -= block.tokens
        return True

    def drop_before(self, number: int) -> list[bytes]:
        """The engine holds nothing whose last use was before this one. Returns what it was thought to hold."""
        left: list[bytes] = []
        while self._blocks:
            oldest = next(iter(self._blocks))
            if self._blocks[oldest].used >= number:
                break
            self.drop(oldest)
            left.append(oldest)
        return left

    def compact(self) -> None:
        """Give back the room of blocks that left. O(blocks held)."""
        self._blocks = OrderedDict(self._blocks)

    def _over(self) -> bool:
        if len(self._blocks) > self._max_blocks:
            return True
        return self._capacity is not None and self._tokens > self._capacity
