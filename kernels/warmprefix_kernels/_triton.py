"""Shared parts of the Triton kernels: tuning, and the search for a pair's entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
import triton.testing

__all__ = ["INTERPRETED", "entry_of", "search_steps", "size_class", "tuned"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets kernels on the CPU, where nothing is tuned. Triton reads it when it defines kernels."""


@triton.jit
def entry_of(starts, first, count, steps, pair):
    """Return for each pair the last entry that begins at or before it.

    `count` entries from `first` on are searched, in `steps` = `search_steps(count)` rounds. The lanes of a program have
    adjacent pairs, so most rounds read one word.
    """
    entry = tl.zeros_like(pair).to(tl.int32)
    for step in range(steps):
        candidate = entry + (1 << (steps - 1 - step))
        begins = tl.load(starts + first + candidate, mask=candidate < count, other=0x7FFFFFFFFFFFFFFF)
        entry = tl.where(begins <= pair, candidate, entry)
    return entry + first


def search_steps(count: int) -> int:
    """Return the rounds in which `entry_of` finds one of `count` entries."""
    return max(count - 1, 0).bit_length()


def tuned(blocks: list[int], reset_to_zero: list[str] | None = None) -> Callable[[Any], Any]:
    """Autotune a kernel over BLOCK and warps.

    This happens once per type of arguments and class of sizes.

    Args:
        blocks: The values of BLOCK to try.
        reset_to_zero: Arguments that the kernel adds to: tuning runs it many times.
    """
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in blocks for warps in (4, 8)]
    tuning: Callable[[Any], Any] = triton.autotune(
        configs[:1] if INTERPRETED else configs,
        key=["size"],
        reset_to_zero=reset_to_zero,
        do_bench=partial(triton.testing.do_bench, warmup=5, rep=20),  # milliseconds: the user waits for the tuning
    )
    return tuning


def size_class(contexts: int) -> int:
    """Return the size class of a number of contexts: one per factor of 16."""
    return contexts.bit_length() // 4
