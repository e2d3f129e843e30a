"""Two sums in one integer: how many blocks a pair of contexts shares, and by how much their positions differ."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Contexts

__all__ = ["MOST_BLOCKS", "Packing", "condensed_before", "packing_for"]

MOST_BLOCKS = 2**21
"""Most blocks of a context, and the positions end below it: count and gaps then fit into 63 bits."""


class Packing(NamedTuple):
    """Sums are kept as count * 2**bits + gaps."""

    bits: int
    wide: bool
    """Whether that takes int64 rather than int32."""


def packing_for(contexts: Contexts) -> Packing:
    """The narrowest that can't overflow: int32 up to 1,024 blocks, as 1,024 gaps below 1,024 stay below 2**20.

    Raises:
        ValueError: A context is too long, or a position too large.
    """
    longest = int(contexts.lengths.max(initial=0))
    if longest > MOST_BLOCKS:
        raise ValueError(f"a context must hold at most {MOST_BLOCKS} ids, got one of {longest} by offsets")
    last = int(contexts.positions.max(initial=0))
    if last >= MOST_BLOCKS:
        raise ValueError(f"positions must be 0 to {MOST_BLOCKS - 1}, got {last}")
    return Packing(20, wide=False) if longest <= 1_024 and last < 1_024 else Packing(42, wide=True)


def condensed_before(count: int) -> npt.NDArray[np.int64]:
    """Of each of `count` contexts, how many pairs stand before its own in condensed order; then how many there are."""
    row = np.arange(count + 1, dtype=np.int64)
    return row * (2 * count - row - 1) // 2
