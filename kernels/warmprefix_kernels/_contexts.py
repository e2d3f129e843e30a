"""Contexts of different lengths as flat arrays, checked before kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["MAX_ID", "Contexts", "Ints", "checked_contexts", "checked_integers"]

Ints: TypeAlias = "npt.NDArray[np.integer[Any]] | Sequence[int]"

MAX_ID = 2**31 - 1
"""Largest block id; also the most contexts and the most blocks in all of them together."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts in compressed rows.

    Context i stands from `offsets[i]` up to `offsets[i + 1]`.
    """

    offsets: npt.NDArray[np.int64]
    """Shape (contexts + 1)."""
    ids: npt.NDArray[np.int32]
    """Shape (blocks of all contexts): block ids, ascending within a context."""
    positions: npt.NDArray[np.int32]
    """The place of each of `ids` in its context's order; shape (0) if the operation does not use positions."""

    @property
    def count(self) -> int:
        """Number of contexts."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of blocks of each context."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The context of each of `ids`."""
        return np.repeat(np.arange(self.count, dtype=np.int32), self.lengths)

    @property
    def blocks(self) -> npt.NDArray[np.int64]:
        """The ids renumbered from 0 on without gaps, for use as an array index."""
        return np.unique(self.ids, return_inverse=True)[1].reshape(-1)


def checked_contexts(offsets: Any, ids: Any, positions: Any = None) -> Contexts:
    """Return the contexts, each sorted by id together with its positions.

    O(blocks * log(blocks)) in the worst case.

    Raises:
        TypeError: An array holds values that are not integers.
        ValueError: The arrays do not fit together, a value is out of range, or a context holds an id twice.
    """
    ids = checked_integers("ids", ids, 0, MAX_ID).astype(np.int32)
    if len(ids) > MAX_ID:
        raise ValueError(f"ids must have at most {MAX_ID} entries, got {len(ids)}")
    offsets = checked_integers("offsets", offsets, 0, len(ids)).astype(np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
        ends = f"{offsets[0]} and {offsets[-1]}" if len(offsets) else "an empty array"
        raise ValueError(f"offsets must begin with 0 and end with the number of ids, {len(ids)}, got {ends}")
    if len(offsets) > MAX_ID:
        raise ValueError(f"offsets must describe at most {MAX_ID - 1} contexts, got {len(offsets) - 1}")
    if np.any(falls := np.diff(offsets) < 0):
        at = int(np.argmax(falls))
        raise ValueError(f"offsets must not fall, got {offsets[at]} before {offsets[at + 1]} at index {at}")
    if positions is None:
        positions = np.zeros(0, np.int32)
    else:
        positions = checked_integers("positions", positions, 0, MAX_ID).astype(np.int32)
        if len(positions) != len(ids):
            raise ValueError(f"positions must have one entry per id, got {len(positions)} positions for {len(ids)} ids")
    return _sorted(Contexts(offsets, ids, positions))


def checked_integers(name: str, given: Any, low: int, high: int) -> npt.NDArray[np.integer[Any]]:
    """Return integers as a flat array, checked to be from `low` to `high`.

    `given` may also be a torch tensor.
    """
    array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.size == 0:
        return array.astype(np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers below 2**63, got {array.dtype}")
    for at in (int(array.argmin()), int(array.argmax())):
        if not low <= array[at] <= high:
            raise ValueError(f"{name} must be {low} to {high}, got {array[at]} at index {at}")
    return array


def _sorted(contexts: Contexts) -> Contexts:
    ids, positions, rows = contexts.ids, contexts.positions, contexts.rows
    same_row = rows[1:] == rows[:-1]
    if np.any(same_row & (ids[1:] < ids[:-1])):
        order = np.lexsort((ids, rows))
        ids = ids[order]
        positions = positions[order] if len(positions) else positions
    if np.any(twice := same_row & (ids[1:] == ids[:-1])):
        at = int(np.argmax(twice))
        raise ValueError(f"ids must be distinct within a context, got {ids[at]} twice in context {rows[at]}")
    return Contexts(contexts.offsets, ids, positions)
