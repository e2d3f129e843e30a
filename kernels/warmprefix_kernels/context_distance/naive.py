"""The reference: Eq. 1 for one context against all after it, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Contexts
from warmprefix_kernels._tiles import tiles
from warmprefix_kernels.context_distance._packing import condensed_before

__all__ = ["context_distance", "context_distance_tiles"]


def context_distance(contexts: Contexts, alpha: float) -> npt.NDArray[np.float64]:
    """Compute all pairs, condensed, in float64. O(contexts * blocks of all contexts)."""
    rows = _Rows(contexts, alpha)
    return np.concatenate([np.zeros(0), *(rows.distances(i) for i in range(contexts.count))])


def context_distance_tiles(
    contexts: Contexts, alpha: float, tile_bytes: int
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
    """Compute the distances, rounded to float32, in tiles."""
    rows = _Rows(contexts, alpha)

    def compute(start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.concatenate([rows.distances(i).astype(np.float32) for i in range(start, stop)])

    return tiles(condensed_before(contexts.count) * 8 + np.arange(contexts.count + 1), tile_bytes, compute)


class _Rows:
    """The distances of one context to all after it, with arrays that are made once."""

    def __init__(self, contexts: Contexts, alpha: float) -> None:
        self._contexts, self._alpha = contexts, alpha
        self._lengths = contexts.lengths
        self._blocks = contexts.blocks
        self._place = np.full(int(self._blocks.max(initial=-1)) + 1, -1, np.int64)

    def distances(self, i: int) -> npt.NDArray[np.float64]:
        offsets, positions = self._contexts.offsets, self._contexts.positions
        own, after = slice(offsets[i], offsets[i + 1]), slice(offsets[i + 1], None)
        self._place[self._blocks[own]] = positions[own]
        place = self._place[self._blocks[after]]
        self._place[self._blocks[own]] = -1
        shared = place >= 0
        ends = offsets[i + 1 :] - offsets[i + 1]
        count = _sum_between(ends, shared)
        gaps = _sum_between(ends, np.where(shared, np.abs(place - positions[after]), 0))
        longer = np.maximum(self._lengths[i], self._lengths[i + 1 :])
        with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is shared
            return np.where(count > 0, 1 - count / longer + self._alpha * gaps / count, 1.0)


def _sum_between(ends: npt.NDArray[np.int64], values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return np.diff(before[ends])
