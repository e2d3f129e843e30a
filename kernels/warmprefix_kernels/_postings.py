"""An inverted index over contexts, which numbers all pairs of equal blocks.

Any range of the pairs can be computed. Both kernels compute a sum over the blocks that two contexts share. For each
block of each context, they walk the list of contexts that hold the block (its members). This visits every such pair
once, and no pair of contexts that shares nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from warmprefix_kernels._contexts import Contexts

__all__ = ["Pairs", "Postings", "expanded", "pairs_of", "postings_of"]


class Postings(NamedTuple):
    """For each of E entries (blocks of contexts), the contexts that hold the block."""

    rows: torch.Tensor
    """The context of each entry, int32 (E)."""
    members: torch.Tensor
    """Contexts by block, and ascending within a block, int32 (E)."""
    entries: torch.Tensor
    """The entry of each of `members`, int64 (E)."""
    places: torch.Tensor
    """The index of each entry in `members`, int64 (E)."""
    begins: torch.Tensor
    """The index where the members of the entry's block begin, int64 (E)."""
    ends: torch.Tensor
    """The index where they end, int64 (E)."""


class Pairs(NamedTuple):
    """Pairs of an entry and a member of its block, numbered by entry, then member."""

    starts: torch.Tensor
    """Pairs before each entry, int64 (E + 1)."""
    shifts: torch.Tensor
    """The difference between the index of a pair's member and the pair's number, by entry, int64 (E)."""
    offsets: npt.NDArray[np.int64]
    """Entries before each context, int64 (contexts + 1), in host memory."""
    before: npt.NDArray[np.int64]
    """Pairs before each context, int64 (contexts + 1), in host memory."""


def postings_of(contexts: Contexts, device: torch.device) -> Postings:
    """Build the inverted index on the device. O(E * log(E))."""
    ids = torch.from_numpy(contexts.ids).to(device)
    rows = torch.from_numpy(contexts.rows).to(device)
    sorted_ids, entries = torch.sort(ids, stable=True)
    _, sizes = torch.unique_consecutive(sorted_ids, return_counts=True)
    block_ends = sizes.cumsum(0)
    places = torch.empty_like(entries).scatter_(0, entries, torch.arange(len(entries), device=device))

    def by_entry(of_block: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(of_block, sizes)[places]

    return Postings(rows, rows[entries], entries, places, by_entry(block_ends - sizes), by_entry(block_ends))


def pairs_of(begins: torch.Tensor, ends: torch.Tensor, offsets: npt.NDArray[np.int64]) -> Pairs:
    """Return the number of pairs of each entry with members `begins` up to `ends`."""
    starts = torch.zeros(len(begins) + 1, dtype=torch.int64, device=begins.device)
    torch.cumsum(ends - begins, 0, out=starts[1:])
    before = starts[torch.from_numpy(offsets).to(starts.device)]
    return Pairs(starts, begins - starts[:-1], offsets, before.cpu().numpy())


def expanded(pairs: Pairs, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries and member indices of the pairs of some contexts.

    The contexts are `start` up to `stop`; both results are int64.
    """
    first, last = int(pairs.offsets[start]), int(pairs.offsets[stop])
    begin, end = int(pairs.before[start]), int(pairs.before[stop])
    # The pairs at which the next entry begins; entries without pairs repeat a number.
    changes = pairs.starts[first + 1 : last] - begin
    entry = torch.zeros(end - begin + 1, dtype=torch.int64, device=pairs.starts.device)
    entry = entry.scatter_add_(0, changes, torch.ones_like(changes))[:-1].cumsum_(0).add_(first)
    member = pairs.shifts.index_select(0, entry).add_(torch.arange(begin, end, device=entry.device))
    return entry, member
