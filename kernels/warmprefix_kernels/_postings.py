"""An inverted index over contexts: all pairs of equal blocks, as a range of numbers that can be cut anywhere.

Both kernels sum something over the blocks that two contexts share. Walking, for each block of each context, the list of
contexts that hold the block (its members) visits every such pair once, and no pair of contexts that shares nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from warmprefix_kernels._contexts import Contexts

__all__ = ["Pairs", "Postings", "expanded", "pairs_of", "postings_of"]


class Postings(NamedTuple):
    """For each entry, that is each block of each context, who else holds the block. E entries."""

    rows: torch.Tensor
    """Whose the entry is, int32 (E)."""
    members: torch.Tensor
    """Contexts by block, and ascending within a block, int32 (E)."""
    entries: torch.Tensor
    """Which entry each of `members` is, int64 (E)."""
    places: torch.Tensor
    """Where each entry is among `members`, int64 (E)."""
    begins: torch.Tensor
    """Where the members of the entry's block begin, int64 (E)."""
    ends: torch.Tensor
    """Where they end, int64 (E)."""


class Pairs(NamedTuple):
    """Pairs of an entry and a member of its block, numbered by entry and then by member."""

    starts: torch.Tensor
    """Pairs before each entry, int64 (E + 1)."""
    shifts: torch.Tensor
    """What to add to a pair's number for the index of its member, by entry, int64 (E)."""
    offsets: npt.NDArray[np.int64]
    """Entries before each context, int64 (contexts + 1), in the computer's own memory."""
    before: npt.NDArray[np.int64]
    """Pairs before each context, likewise."""


def postings_of(contexts: Contexts, device: torch.device) -> Postings:
    """The inverted index. O(E * log(E)), on the device."""
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
    """The pairs of each entry with the members from its `begins` up to its `ends`."""
    starts = torch.zeros(len(begins) + 1, dtype=torch.int64, device=begins.device)
    torch.cumsum(ends - begins, 0, out=starts[1:])
    before = starts[torch.from_numpy(offsets).to(starts.device)]
    return Pairs(starts, begins - starts[:-1], offsets, before.cpu().numpy())


def expanded(pairs: Pairs, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of contexts `start` up to `stop`: the entry of each, and the index of its member, both int64."""
    first, last = int(pairs.offsets[start]), int(pairs.offsets[stop])
    begin, end = int(pairs.before[start]), int(pairs.before[stop])
    changes = (
        pairs.starts[first + 1 : last] - begin
    )  # the pairs at which a next entry begins, or several, if some have none
    entry = torch.zeros(end - begin + 1, dtype=torch.int64, device=pairs.starts.device)
    entry = entry.scatter_add_(0, changes, torch.ones_like(changes))[:-1].cumsum_(0).add_(first)
    member = pairs.shifts.index_select(0, entry).add_(torch.arange(begin, end, device=entry.device))
    return entry, member
