"""ContextPilot's distance (Eq. 1) between every two contexts of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import warmprefix.batch.device as on_device
from warmprefix.batch.base import Progress, no_progress
from warmprefix.batch.device import Device
from warmprefix.batch.ragged import Ragged
from warmprefix.errors import MissingExtraError

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as exc:
    raise MissingExtraError("batch", "numpy") from exc

__all__ = ["condensed_distances"]

_CELLS_AT_ONCE = 1 << 20
"""Most pairs of contexts, and most pairs of equal blocks, that are looked at together; a single row may hold more."""


def condensed_distances(
    contexts: Ragged, alpha: float = 0.001, device: Device = "auto", progress: Progress = no_progress
) -> npt.NDArray[np.float32]:
    """Eq. 1 for all pairs i < j, row by row, as `scipy.spatial.distance.pdist` lays them out: shape (n * (n - 1) / 2).

    See `warmprefix.ordering.context_index.context_distance` for one pair; this is its value, rounded to float32. On the
    CPU only pairs that share a block are computed, with an inverted index: O(n² / 2 + pairs of equal blocks).

    Args:
        contexts: Distinct blocks each.
        alpha: Weight of the positions.
        device: "cpu", "cuda", or "auto": a CUDA device if there is one and the batch is large enough.
        progress: Is told of contexts done.
    """
    count = len(contexts.offsets) - 1
    if on_device.use_cuda(device, count, on_device.DISTANCES_PAY_FROM):
        found = on_device.context_distance(*contexts, alpha, "cuda")
        progress("distances", count, count)
        return found
    distances = np.ones(count * (count - 1) // 2, np.float32)
    lengths = np.diff(contexts.offsets)
    for begin, end, pair, gap in _pairs_of_equal_blocks(contexts):
        shared = np.bincount(pair, minlength=(end - begin) * count)
        gaps = np.bincount(pair, gap, minlength=(end - begin) * count)
        overlapping = np.flatnonzero(shared)
        row, j = np.divmod(overlapping, count)
        i = row + begin
        s = shared[overlapping]
        distances[i * (2 * count - i - 1) // 2 + j - i - 1] = (
            1.0 - s / np.maximum(lengths[i], lengths[j]) + alpha * gaps[overlapping] / s
        )
        progress("distances", end, count)
    return distances


def _pairs_of_equal_blocks(
    contexts: Ragged,
) -> Iterator[tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """For rows `begin` up to `end`: each pair of equal blocks in contexts i < j, as (i - begin) * n + j, and the gap
    between their positions.
    """
    offsets, ids, positions = contexts
    count = len(offsets) - 1
    row = np.repeat(np.arange(count), np.diff(offsets))
    # Postings: all entries by block, and within a block by context, so that later contexts stand behind.
    posting = np.argsort(ids, kind="stable")
    place = np.empty(len(ids), np.int64)
    place[posting] = np.arange(len(ids))
    later = np.searchsorted(ids[posting], ids, side="right") - place - 1  # entries of the same block in later contexts
    equal_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(later)])[offsets]  # pairs before each row
    rows_at_once = max(_CELLS_AT_ONCE // max(count, 1), 1)
    begin = 0
    while begin < count:
        enough = int(np.searchsorted(equal_before, equal_before[begin] + _CELLS_AT_ONCE, side="right")) - 1
        end = max(min(enough, begin + rows_at_once, count), begin + 1)
        entries = np.arange(offsets[begin], offsets[end])
        entry = np.repeat(entries, later[entries])
        steps = np.arange(len(entry)) - np.repeat(np.cumsum(later[entries]) - later[entries], later[entries])
        other = posting[place[entry] + 1 + steps]
        yield begin, end, (row[entry] - begin) * count + row[other], np.abs(positions[entry] - positions[other])
        begin = end
