"""Distances on CUDA, from sums of pairs of equal blocks by atomics."""

# pyright: reportOperatorIssue=false
# Triton annotates its functions' return values for its compiler, differently in each version.

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from warmprefix_kernels._contexts import Contexts
from warmprefix_kernels._postings import pairs_of, postings_of
from warmprefix_kernels._tiles import tiles
from warmprefix_kernels._triton import entry_of, search_steps, size_class, tuned
from warmprefix_kernels.context_distance._packing import Packing, condensed_before

__all__ = ["context_distance_tiles"]


@tuned([256, 512, 1024], reset_to_zero=["sums"])
@triton.jit(do_not_specialize=["n", "first", "entries", "steps", "begin", "end", "cells_before", "size"])
def accumulate(
    sums,
    starts,
    shifts,
    rows,
    members,
    positions,
    positions_of_members,
    n,
    first,
    entries,
    steps,
    begin,
    end,
    cells_before,
    size,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the pairs `begin` up to `end` to their sums; one lane per pair."""
    pair = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = pair < end
    entry = entry_of(starts, first, entries, steps, tl.where(live, pair, begin))
    member = tl.load(shifts + entry, mask=live, other=0) + pair
    row = tl.load(rows + entry, mask=live, other=0).to(tl.int64)
    column = tl.load(members + member, mask=live, other=0)
    gap = tl.load(positions + entry, mask=live, other=0) - tl.load(positions_of_members + member, mask=live, other=0)
    packed = (tl.abs(gap).to(tl.int64) + UNIT).to(sums.dtype.element_ty)
    cell = row * n - ((row * (row + 1)) >> 1) + column - row - 1 - cells_before
    tl.atomic_add(sums + cell, packed, mask=live, sem="relaxed")


@tuned([512, 1024, 2048])
@triton.jit(do_not_specialize=["n", "first_row", "cells_before", "size"])
def finish(distances, sums, lengths, alphas, n, first_row, cells_before, size, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute Eq. 1 from the sums.

    In float64, so that all devices round in the same way. One program per row and `BLOCK` columns.
    """
    row = first_row + tl.program_id(0)
    column = row + 1 + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < n
    long_row = row.to(tl.int64)
    cell = long_row * n - ((long_row * (long_row + 1)) >> 1) + column - row - 1 - cells_before
    packed = tl.load(sums + cell, mask=live, other=0)
    count = (packed // UNIT).to(tl.float64)
    gaps = (packed % UNIT).to(tl.float64)
    longer = tl.maximum(tl.load(lengths + row), tl.load(lengths + column, mask=live, other=1)).to(tl.float64)
    some = tl.maximum(count, 1.0)
    alpha = tl.load(alphas)  # passed by value, it would be a float32
    distance = tl.where(count > 0, 1.0 - count / tl.maximum(longer, 1.0) + alpha * gaps / some, 1.0)
    tl.store(distances + cell, distance.to(tl.float32), mask=live)


def context_distance_tiles(
    contexts: Contexts, packing: Packing, alpha: float, device: torch.device, tile_bytes: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute the distances in tiles; see `context_distance_tiles` of the package.

    Runs on the CPU only if Triton interprets its kernels.
    """
    n = contexts.count
    postings = postings_of(contexts, device)
    pairs = pairs_of(postings.places + 1, postings.ends, contexts.offsets)  # later contexts only
    positions = torch.from_numpy(contexts.positions).to(device)
    positions_of_members = positions[postings.entries]
    lengths = torch.from_numpy(contexts.lengths).to(device)
    alphas = torch.tensor([alpha], dtype=torch.float64, device=device)
    before = condensed_before(n)

    def compute(start: int, stop: int) -> torch.Tensor:
        cells = int(before[stop] - before[start])
        distances = torch.empty(cells, dtype=torch.float32, device=device)
        if cells == 0:
            return distances
        sums = torch.zeros(cells, dtype=torch.int64 if packing.wide else torch.int32, device=device)
        begin, end = int(pairs.before[start]), int(pairs.before[stop])
        first, last = int(pairs.offsets[start]), int(pairs.offsets[stop])
        entries = last - first
        common = {"cells_before": int(before[start]), "size": size_class(n), "UNIT": 1 << packing.bits}
        with torch.cuda.device_of(sums):
            if end > begin:
                accumulate[lambda meta: (triton.cdiv(end - begin, meta["BLOCK"]),)](
                    sums,
                    pairs.starts,
                    pairs.shifts,
                    postings.rows,
                    postings.members,
                    positions,
                    positions_of_members,
                    n,
                    first=first,
                    entries=entries,
                    steps=search_steps(entries),
                    begin=begin,
                    end=end,
                    **common,
                )
            finish[lambda meta: (stop - start, triton.cdiv(n - start - 1, meta["BLOCK"]))](
                distances, sums, lengths, alphas, n, first_row=start, **common
            )
        return distances

    needed = before * (4 + (8 if packing.wide else 4))
    needed[1:] += torch.arange(1, n + 1).numpy()  # the last row has no cells, but bytes must ascend
    yield from tiles(needed, tile_bytes, compute)
