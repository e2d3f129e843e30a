"""Two sums in one integer: the shared blocks of two contexts, and their gaps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Contexts

__all__ = ["MOST_BLOCKS", "Packing", "condensed_before", "packing_for"]

MOST_BLOCKS = 2**21
"""Most blocks of a context; positions are below it. Count and gaps then fit in 63 bits."""


class Packing(NamedTuple):
    """The layout of a sum: count * 2**bits + gaps."""

    bits: int
    wide: bool
    """True for int64, False for int32."""


def packing_for(contexts: Contexts) -> Packing:
    """Return the narrowest packing that cannot overflow.

    int32 suffices up to 1,024 blocks, because 1,024 gaps below 1,024 stay below 2**20.

    Raises:
        ValueError: A context is too long, or a position too large.
    """
    longest = int(contexts.lengths.max(initial=0))
    if longest > MOST_BLOCKS:
        raise ValueError(f"offsets must give each context at most {MOST_BLOCKS} ids, got a context of {longest}")
    last = int(contexts.positions.max(initial=0))
    if last >= MOST_BLOCKS:
        raise ValueError(f"positions must be 0 to {MOST_BLOCKS - 1}, got {last}")
    return Packing(20, wide=False) if longest <= 1_024 and last < 1_024 else Packing(42, wide=True)


def condensed_before(count: int) -> npt.NDArray[np.int64]:
    """Return the begin of each context's pairs in condensed order, then the total.

    int64 of shape (count + 1).
    """
    row = np.arange(count + 1, dtype=np.int64)
    return row * (2 * count - row - 1) // 2
