"""The reference: one context against all, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Contexts

__all__ = ["top_overlap"]


def top_overlap(
    contexts: Contexts, tokens: npt.NDArray[np.int64], m: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Find the best partners; see `warmprefix_kernels.top_overlap`.

    O(contexts * blocks of all contexts).
    """
    count = contexts.count
    partners = np.full((count, m), -1, np.int32)
    overlaps = np.zeros((count, m), np.int64)
    blocks = contexts.blocks
    lengths = tokens[contexts.ids]
    mine = np.zeros(int(blocks.max(initial=-1)) + 1, bool)
    for i in range(count):
        own = blocks[contexts.offsets[i] : contexts.offsets[i + 1]]
        mine[own] = True
        before = np.concatenate([[0], np.cumsum(np.where(mine[blocks], lengths, 0))])
        mine[own] = False
        overlap = before[contexts.offsets[1:]] - before[contexts.offsets[:-1]]
        overlap[i] = 0
        best = np.argsort(-overlap, kind="stable")[:m]  # ties by the lower index
        best = best[overlap[best] > 0]
        partners[i, : len(best)] = best
        overlaps[i, : len(best)] = overlap[best]
    return partners, overlaps
