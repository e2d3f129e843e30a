"""Distances on any torch device: pairs of equal blocks, summed in tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from warmprefix_kernels._contexts import Contexts
from warmprefix_kernels._postings import expanded, pairs_of, postings_of
from warmprefix_kernels._tiles import tiles
from warmprefix_kernels.context_distance._packing import Packing, condensed_before

__all__ = ["context_distance_tiles"]

_BYTES_PER_PAIR = 11 * 8


def context_distance_tiles(
    contexts: Contexts, packing: Packing, alpha: float, device: torch.device, tile_bytes: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute the distances in tiles; see `context_distance_tiles` of the package.

    O(contexts**2 / 2 + pairs of equal blocks), besides the index. Only distances of contexts that share a block are
    computed; a pair that shares several blocks is computed once per block, each time with the same value.
    """
    postings = postings_of(contexts, device)
    pairs = pairs_of(postings.places + 1, postings.ends, contexts.offsets)  # later contexts only
    rows, members = postings.rows.long(), postings.members.long()
    positions = torch.from_numpy(contexts.positions).to(device).long()
    positions_of_members = positions[postings.entries]
    lengths = torch.from_numpy(contexts.lengths).to(device)
    before = condensed_before(contexts.count)
    # The cell of (row, column) is origins[row] + column.
    origins = torch.from_numpy(before[:-1]).to(device) - torch.arange(1, contexts.count + 1, device=device)
    sum_type = torch.int64 if packing.wide else torch.int32

    def compute(start: int, stop: int) -> torch.Tensor:
        begin, end = int(before[start]), int(before[stop])
        distances = torch.ones(end - begin, dtype=torch.float32, device=device)
        sums = torch.zeros(end - begin, dtype=sum_type, device=device)
        entry, member = expanded(pairs, start, stop)
        row, column = rows.index_select(0, entry), members.index_select(0, member)
        gap = positions.index_select(0, entry).sub_(positions_of_members.index_select(0, member)).abs_()
        del entry, member
        cell = origins.index_select(0, row).add_(column).sub_(begin)
        sums.scatter_add_(0, cell, gap.add_(1 << packing.bits).to(sum_type))
        packed = sums.index_select(0, cell)
        count, gaps = (packed >> packing.bits).double(), (packed & ((1 << packing.bits) - 1)).double()
        longer = torch.maximum(lengths.index_select(0, row), lengths.index_select(0, column))
        # In float64, so that all devices round in the same way.
        distances.scatter_(0, cell, (1 - count / longer + alpha * gaps / count).float())
        return distances

    needed = before * (4 + (8 if packing.wide else 4)) + pairs.before * _BYTES_PER_PAIR
    needed[1:] += torch.arange(1, contexts.count + 1).numpy()  # the last row has no cells, but bytes must ascend
    yield from tiles(needed, tile_bytes, compute)
