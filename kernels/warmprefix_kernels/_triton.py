"""What the Triton kernels share: tuning, and the search for the entry that a pair belongs to."""

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
"""Whether Triton runs kernels in Python, on the CPU, with nothing to measure; it decides that when it defines them."""


@triton.jit
def entry_of(starts, first, count, steps, pair):
    """Of the `count` entries from `first` on, the last one that begins at or before each pair.

    Binary search in `steps` = `search_steps(count)` rounds. All lanes of a program look at pairs next to each other, so
    that most rounds read one word.
    """
    entry = tl.zeros_like(pair).to(tl.int32)
    for step in range(steps):
        candidate = entry + (1 << (steps - 1 - step))
        begins = tl.load(starts + first + candidate, mask=candidate < count, other=0x7FFFFFFFFFFFFFFF)
        entry = tl.where(begins <= pair, candidate, entry)
    return entry + first


def search_steps(count: int) -> int:
    """Rounds in which `entry_of` finds one of `count` entries."""
    return max(count - 1, 0).bit_length()


def tuned(blocks: list[int], reset_to_zero: list[str] | None = None) -> Callable[[Any], Any]:
    """Autotune a kernel over BLOCK and warps, once for each type of arguments and each class of sizes.

    Args:
        blocks: What BLOCK may be.
        reset_to_zero: Arguments that the kernel adds to, since tuning runs it often.
    """
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in blocks for warps in (4, 8)]
    tuning: Callable[[Any], Any] = triton.autotune(
        configs[:1] if INTERPRETED else configs,
        key=["size"],
        reset_to_zero=reset_to_zero,
        do_bench=partial(triton.testing.do_bench, warmup=5, rep=20),  # milliseconds; the user waits for this
    )
    return tuning


def size_class(contexts: int) -> int:
    """What a kernel is tuned for anew: each sixteenfold number of contexts."""
    return contexts.bit_length() // 4
