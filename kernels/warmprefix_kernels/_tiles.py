"""Working through rows in tiles that fit into memory."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["bytes_of_tile", "tiles"]

T = TypeVar("T")

_log = logging.getLogger("warmprefix_kernels")


def bytes_of_tile(device: str, asked: int | None) -> int:
    """Bytes of a tile: what was asked for, or what keeps a CUDA device busy, or a CPU's caches warm."""
    if asked is None:
        return 1 << 30 if device.startswith("cuda") else 1 << 24
    if asked < 1:
        raise ValueError(f"tile_bytes must be 1 or more, or None, got {asked}")
    return asked


def tiles(
    bytes_before: npt.NDArray[np.int64], tile_bytes: int, compute: Callable[[int, int], T]
) -> Iterator[tuple[int, int, T]]:
    """The results of `compute(start, stop)` for consecutive ranges of rows, each as (start, stop, result).

    Where memory does not suffice for a tile, its rows are computed again in tiles of half its bytes, and so are those
    after it, down to one row.

    Args:
        bytes_before: What the rows before each one need, of shape (rows + 1); it rises with every row.
        tile_bytes: A tile has as many rows as this suffices for, at least one.
        compute: Keeps nothing that the caller could see of a range that it fails on.

    Raises:
        MemoryError, RuntimeError: What `compute` raised for a single row.
    """
    start, rows = 0, len(bytes_before) - 1
    while start < rows:
        fits = int(np.searchsorted(bytes_before, bytes_before[start] + tile_bytes, side="right")) - 1
        stop = max(fits, start + 1)
        try:
            result = compute(start, stop)
        except (MemoryError, RuntimeError) as error:
            if stop - start == 1 or not _out_of_memory(error):
                raise
        else:
            yield start, stop, result
            start = stop
            continue
        # Past the handler: the exception and the frames that it held are gone, and with them the tile's memory.
        _release()
        tile_bytes = int(bytes_before[stop] - bytes_before[start]) // 2
        _log.warning("no memory for a tile of %d rows; going on with tiles of %d bytes", stop - start, tile_bytes)


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. torch's allocator for the CPU raises nothing more telling than RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "DefaultCPUAllocator" in str(error) or "bad_alloc" in str(error)


def _release() -> None:
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # cached pieces of the failed tile may be too small, or in the way
