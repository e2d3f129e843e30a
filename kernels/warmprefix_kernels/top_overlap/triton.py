"""Overlaps on CUDA: atomics sum pairs of equal blocks, then programs select."""

# pyright: reportOperatorIssue=false
# Triton annotates its functions' return values for its compiler, differently in each version.

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from warmprefix_kernels._contexts import Contexts
from warmprefix_kernels._postings import pairs_of, postings_of
from warmprefix_kernels._tiles import tiles
from warmprefix_kernels._triton import entry_of, search_steps, size_class, tuned

__all__ = ["top_overlap"]


@tuned([256, 512, 1024], reset_to_zero=["sums"])
@triton.jit(do_not_specialize=["first", "entries", "steps", "begin", "end", "first_row", "size"])
def accumulate(
    sums,
    starts,
    shifts,
    rows,
    members,
    weights,
    stride,
    first,
    entries,
    steps,
    begin,
    end,
    first_row,
    size,
    BLOCK: tl.constexpr,
):
    """Add the tokens of pairs `begin` up to `end` to their sums; one lane per pair."""
    pair = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = pair < end
    entry = entry_of(starts, first, entries, steps, tl.where(live, pair, begin))
    member = tl.load(shifts + entry, mask=live, other=0) + pair
    row = tl.load(rows + entry, mask=live, other=0)
    column = tl.load(members + member, mask=live, other=0)
    weight = tl.load(weights + entry, mask=live, other=0)
    cell = (row - first_row).to(tl.int64) * stride + column
    tl.atomic_add(sums + cell, weight, mask=live & (column != row), sem="relaxed")


@tuned([1024, 2048, 4096])
@triton.jit(do_not_specialize=["first_row", "n", "m", "bits", "size"])
def select(partners, overlaps, sums, stride, first_row, n, m, bits, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the `m` largest sums of a row, largest first. One program per row.

    Candidates are ranked by sum * 2**bits + (n - 1 - column), so no two are equal, and of equal sums the lower column
    wins. The best so far stay in registers. Columns ascend, so a block of columns matters only if its largest sum
    exceeds the least kept sum; each larger one then replaces the least.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH).to(tl.int64)
    nothing = tl.full([], -1 - WIDTH, tl.int64)
    kept = tl.where(lane < m, -1 - lane, 0x7FFFFFFFFFFFFFFF)  # negative: empty, and lanes past m are never the least
    least = tl.min(kept, axis=0)
    for start in range(0, stride, BLOCK):
        column = start + tl.arange(0, BLOCK)
        shared = tl.load(sums + row * stride + column, mask=column < stride, other=0).to(tl.int64)
        if tl.max(shared, axis=0) > (tl.maximum(least, 0) >> bits):
            key = tl.where(shared > 0, (shared << bits) + (n - 1 - column), nothing)
            best = tl.max(key, axis=0)
            while best > least:
                kept = tl.where(kept == least, best, kept)
                least = tl.min(kept, axis=0)
                key = tl.where(key < best, key, nothing)
                best = tl.max(key, axis=0)
    kept = tl.where(lane < m, kept, nothing)
    out = (first_row + row) * m
    for place in range(m):
        best = tl.max(kept, axis=0)
        found = best >= 0
        column_of_best = n - 1 - (best & ((tl.full([], 1, tl.int64) << bits) - 1))
        tl.store(partners + out + place, tl.where(found, column_of_best, -1).to(tl.int32))
        tl.store(overlaps + out + place, tl.where(found, best >> bits, 0))
        kept = tl.where(kept == best, nothing, kept)


def top_overlap(
    contexts: Contexts, tokens: npt.NDArray[np.int64], m: int, device: torch.device, tile_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best partners; see `warmprefix_kernels.top_overlap`.

    Runs on the CPU only if Triton interprets its kernels.
    """
    n = contexts.count
    partners = torch.empty((n, m), dtype=torch.int32, device=device)
    overlaps = torch.empty((n, m), dtype=torch.int64, device=device)
    postings = postings_of(contexts, device)
    pairs = pairs_of(postings.begins, postings.ends, contexts.offsets)
    lengths = tokens[contexts.ids]
    most = int(np.diff(np.concatenate([[0], np.cumsum(lengths)])[contexts.offsets]).max(initial=0))
    sum_type, bytes_per_sum = (torch.int32, 4) if most < 2**31 else (torch.int64, 8)
    weights = torch.from_numpy(lengths).to(device, sum_type)
    width = max(triton.next_power_of_2(m), 16)
    stride = -(-n // 16) * 16  # aligned rows are read in vectors
    size = size_class(n)

    def compute(start: int, stop: int) -> None:
        sums = torch.zeros((stop - start) * stride, dtype=sum_type, device=device)
        begin, end = int(pairs.before[start]), int(pairs.before[stop])
        first, last = int(pairs.offsets[start]), int(pairs.offsets[stop])
        with torch.cuda.device_of(sums):
            if end > begin:
                accumulate[lambda meta: (triton.cdiv(end - begin, meta["BLOCK"]),)](
                    sums,
                    pairs.starts,
                    pairs.shifts,
                    postings.rows,
                    postings.members,
                    weights,
                    stride,
                    first=first,
                    entries=last - first,
                    steps=search_steps(last - first),
                    begin=begin,
                    end=end,
                    first_row=start,
                    size=size,
                )
            select[(stop - start,)](
                partners,
                overlaps,
                sums,
                stride,
                first_row=start,
                n=n,
                m=m,
                bits=max(n - 1, 1).bit_length(),
                size=size,
                WIDTH=width,
            )

    needed = np.arange(n + 1, dtype=np.int64) * (stride * bytes_per_sum)
    for _ in tiles(needed, tile_bytes, compute):
        pass
    return partners, overlaps
