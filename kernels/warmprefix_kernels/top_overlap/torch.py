"""Overlaps on any torch device: pairs of equal blocks, summed in tiles of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from warmprefix_kernels._contexts import Contexts
from warmprefix_kernels._postings import Pairs, expanded, pairs_of, postings_of
from warmprefix_kernels._tiles import tiles

__all__ = ["top_overlap"]

_BYTES_PER_COLUMN = 8 + 4  # an accumulator, and the number of a pair
_BYTES_PER_PAIR = 8 * 10


def top_overlap(
    contexts: Contexts, tokens: npt.NDArray[np.int64], m: int, device: torch.device, tile_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best partners; see `warmprefix_kernels.top_overlap`.

    O(pairs of equal blocks), besides the index. Rows are computed in ascending order of their number of pairs. So the
    rows of a tile have similar numbers, and a long context makes only its own tile wide.
    """
    count, width = contexts.count, min(m, contexts.count)
    partners = torch.full((count, m), -1, dtype=torch.int32, device=device)
    overlaps = torch.zeros((count, m), dtype=torch.int64, device=device)
    postings = postings_of(contexts, device)
    in_given_order = pairs_of(postings.begins, postings.ends, contexts.offsets)
    order = np.argsort(np.diff(in_given_order.before), kind="stable")
    entries, offsets = _entries_in(order, contexts)
    entries = entries.to(device)
    pairs = pairs_of(postings.begins[entries], postings.ends[entries], offsets)
    contexts_in_order = torch.from_numpy(order).to(device)
    rank = torch.empty_like(contexts_in_order)
    rank[contexts_in_order] = torch.arange(count, device=device)
    ranks = rank[postings.rows[entries].long()]
    weights = torch.from_numpy(tokens[contexts.ids]).to(device)[entries]
    sums = _Sums(pairs, ranks, weights, postings.members.long(), contexts_in_order, width)

    needed = np.arange(count + 1) * (count * _BYTES_PER_COLUMN) + pairs.before * _BYTES_PER_PAIR
    for start, stop, (best, overlap) in tiles(needed, tile_bytes, sums.best):
        rows = contexts_in_order[start:stop]
        partners[rows, : best.shape[1]] = best
        overlaps[rows, : best.shape[1]] = overlap
    return partners, overlaps


def _entries_in(order: npt.NDArray[np.int64], contexts: Contexts) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Return the entries and offsets with the contexts in another order."""
    lengths = contexts.lengths[order]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    entries = np.repeat(contexts.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(len(contexts.ids))
    return torch.from_numpy(entries), offsets


class _Sums:
    """The accumulators of a tile, one per row and context; zero between tiles."""

    def __init__(
        self,
        pairs: Pairs,
        ranks: torch.Tensor,
        weights: torch.Tensor,
        members: torch.Tensor,
        contexts: torch.Tensor,
        width: int,
    ) -> None:
        self._pairs, self._ranks, self._weights = pairs, ranks, weights
        self._members, self._contexts, self._width = members, contexts, width
        self._count = len(contexts)
        self._bits = max(self._count - 1, 1).bit_length()
        self._clear()

    def _clear(self) -> None:
        device = self._members.device
        self._sums = torch.zeros(0, dtype=torch.int64, device=device)
        self._owner = torch.zeros(0, dtype=torch.int32, device=device)

    def best(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best partners of rows `start` up to `stop` and their overlaps.

        Both have at most `width` columns.
        """
        try:
            return self._best(start, stop)
        except BaseException:
            self._clear()  # sums of the failed tile are not zero
            raise

    def _best(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        count, rows = self._count, stop - start
        if len(self._sums) < rows * count:
            self._clear()
            self._sums = self._sums.new_zeros(rows * count)
            self._owner = self._owner.new_empty(rows * count)
        entry, member = expanded(self._pairs, start, stop)
        row = self._ranks.index_select(0, entry).sub_(start)
        cell = self._members.index_select(0, member).add_(row, alpha=count)
        self._sums.scatter_add_(0, cell, self._weights.index_select(0, entry))
        del entry, member

        # Keep each cell once: any one of its pairs, namely the one whose write to `_owner` remained.
        number = torch.arange(len(cell), dtype=torch.int32, device=cell.device)
        self._owner.scatter_(0, cell, number)
        once = (self._owner.index_select(0, cell) == number).nonzero().squeeze(1)
        cell, row = cell.index_select(0, once), row.index_select(0, once)
        shared = self._sums.index_select(0, cell)
        self._sums.scatter_(0, cell, 0)

        context = torch.sub(cell, row, alpha=count)
        shared.mul_(context != self._contexts[start:stop].index_select(0, row))
        key = (shared << self._bits).add_(count - 1 - context)  # ties: the lower index has the larger key
        touched = torch.bincount(row, minlength=rows)
        columns = int(touched.max())
        place = torch.arange(len(row), device=row.device).sub_((touched.cumsum(0) - touched).index_select(0, row))
        keys = key.new_zeros(rows * columns).scatter_(0, place.add_(row, alpha=columns), key).view(rows, columns)
        best = keys.topk(min(self._width, columns), dim=1).values
        overlap = best >> self._bits
        partner = count - 1 - (best & ((1 << self._bits) - 1))
        return torch.where(overlap > 0, partner, -1).int(), overlap
