"""CacheWeaver's recency baseline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView

__all__ = ["RecencyPolicy"]


class RecencyPolicy:
    """Most recently served blocks first, in the order in which that request served them; new ones by relevance."""

    def __init__(self, max_blocks: int = 65_536) -> None:
        """Remember at most `max_blocks` blocks, dropping the least recently served."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be 1 or more, got {max_blocks}")
        self._served: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_blocks = max_blocks
        self._requests = 0

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        never = (1, 0)
        return sorted(range(len(blocks)), key=lambda i: self._served.get(blocks[i].fingerprint, never))

    def observe(self, served: Sequence[BlockView]) -> None:
        self._requests += 1
        for position, block in enumerate(served):
            self._served[block.fingerprint] = (-self._requests, position)
            self._served.move_to_end(block.fingerprint)
        while len(self._served) > self._max_blocks:
            self._served.popitem(last=False)
