"""ContextPilot's distance (Eq. 1) between all pairs of contexts, as arrays.

The kernels and torch are imported only to compute on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from warmprefix_kernels._missing import missing_extra
from warmprefix_kernels.batch_device import DISTANCES_PAY_FROM, Device, use_cuda

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as exc:
    raise missing_extra("numpy", "batch") from exc

__all__ = ["Ragged", "best_overlaps_on_cuda", "condensed_distances", "ragged"]

_CELLS_AT_ONCE = 1 << 20
"""Most pairs of contexts, and most pairs of equal blocks, processed together; a single row may hold more."""


def _ignore(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


class Ragged(NamedTuple):
    """Contexts in compressed rows: context i is `offsets[i]` up to `offsets[i + 1]`."""

    offsets: npt.NDArray[np.int64]
    """Shape (contexts + 1)."""
    ids: npt.NDArray[np.int32]
    """Shape (blocks of all contexts): block numbers, ascending within a context."""
    positions: npt.NDArray[np.int32]
    """Shape (blocks of all contexts): the position of each of `ids` in its context, from 0 on."""


def ragged(contexts: Sequence[Sequence[int]]) -> Ragged:
    """Return the contexts as arrays. O(blocks * log(blocks)).

    >>> ragged([[7, 3], [], [5]])._asdict()
    {'offsets': array([0, 2, 2, 3]), 'ids': array([3, 7, 5], dtype=int32), 'positions': array([1, 0, 0], dtype=int32)}
    """
    lengths = np.fromiter(map(len, contexts), np.int64, len(contexts))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids = np.fromiter(chain.from_iterable(contexts), np.int32, int(offsets[-1]))
    row = np.repeat(np.arange(len(contexts)), lengths)
    by_id = np.lexsort((ids, row))
    return Ragged(offsets, ids[by_id], (by_id - offsets[row]).astype(np.int32))


def best_overlaps_on_cuda(contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """Compute for each context the most tokens that another shares with it."""
    from warmprefix_kernels import top_overlap

    rows = ragged(contexts)
    _, overlaps = top_overlap(rows.offsets, rows.ids, np.asarray(tokens, np.int64), 1, device="cuda")
    return [int(most) for most in overlaps[:, 0]]


def condensed_distances(
    contexts: Ragged,
    alpha: float = 0.001,
    device: Device = "auto",
    progress: Callable[[str, int, int], object] = _ignore,
) -> npt.NDArray[np.float32]:
    """Compute Eq. 1 for all pairs i < j, row by row, in the order of `pdist`.

    The result is float32 of shape (n * (n - 1) / 2): `warmprefix_baselines.context_index.context_distance`, rounded. On
    the CPU only pairs that share a block are computed, by an inverted index: O(n² / 2 + pairs of equal blocks).

    Args:
        contexts: Distinct blocks each.
        alpha: Weight of the positions.
        device: "cpu", "cuda", or "auto": a CUDA device if there is one and the batch is large enough.
        progress: Receives the number of contexts done.
    """
    count = len(contexts.offsets) - 1
    if use_cuda(device, count, DISTANCES_PAY_FROM):
        from warmprefix_kernels import context_distance

        found = context_distance(*contexts, alpha, device="cuda")
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
    """Yield ranges of rows, their pairs of equal blocks, and the position gaps.

    For rows `begin` up to `end`, a pair of equal blocks in contexts i < j is `(i - begin) * n + j`.
    """
    offsets, ids, positions = contexts
    count = len(offsets) - 1
    row = np.repeat(np.arange(count), np.diff(offsets))
    # Postings: all entries by block, and within a block by context, so later contexts come after earlier ones.
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
