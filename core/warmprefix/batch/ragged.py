"""Contexts of different lengths as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from warmprefix.errors import MissingExtraError

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as exc:
    raise MissingExtraError("batch", "numpy") from exc

__all__ = ["Ragged", "ragged"]


class Ragged(NamedTuple):
    """Contexts in compressed rows: context i is what stands from `offsets[i]` up to `offsets[i + 1]`."""

    offsets: npt.NDArray[np.int64]
    """Of shape (contexts + 1)."""
    ids: npt.NDArray[np.int32]
    """Block numbers, ascending within a context."""
    positions: npt.NDArray[np.int32]
    """Of each of `ids`, where it stands in its context, from 0 on."""


def ragged(contexts: Sequence[Sequence[int]]) -> Ragged:
    """The contexts as arrays. O(blocks * log(blocks)).

    >>> ragged([[7, 3], [], [5]])._asdict()
    {'offsets': array([0, 2, 2, 3]), 'ids': array([3, 7, 5], dtype=int32), 'positions': array([1, 0, 0], dtype=int32)}
    """
    lengths = np.fromiter(map(len, contexts), np.int64, len(contexts))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids = np.fromiter(chain.from_iterable(contexts), np.int32, int(offsets[-1]))
    row = np.repeat(np.arange(len(contexts)), lengths)
    by_id = np.lexsort((ids, row))
    return Ragged(offsets, ids[by_id], (by_id - offsets[row]).astype(np.int32))
