"""Computation of rows in tiles that fit in memory."""

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


def bytes_of_tile(device: str, requested: int | None) -> int:
    """Return the bytes of a tile: as requested, or the default of the device.

    The default keeps a CUDA device busy, or fits in the caches of a CPU.
    """
    if requested is None:
        return 1 << 30 if device.startswith("cuda") else 1 << 24
    if requested < 1:
        raise ValueError(f"tile_bytes must be 1 or more, or None, got {requested}")
    return requested


def tiles(
    bytes_before: npt.NDArray[np.int64], tile_bytes: int, compute: Callable[[int, int], T]
) -> Iterator[tuple[int, int, T]]:
    """Yield (start, stop, `compute(start, stop)`) for consecutive ranges of rows.

    If a tile does not fit in memory, its rows and those after it are computed in tiles of half its bytes, down to a
    single row.

    Args:
        bytes_before: The bytes that the rows before each one need, int64 of shape (rows + 1), strictly ascending.
        tile_bytes: The most bytes of a tile, which has at least one row.
        compute: Must leave no trace of a range that it fails on.

    Raises:
        MemoryError, RuntimeError: `compute` raised it for a single row.
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
        # After the handler: the exception and its frames are gone, and with them the tile's memory.
        _release()
        tile_bytes = int(bytes_before[stop] - bytes_before[start]) // 2
        _log.warning("no memory for a tile of %d rows; continuing with tiles of %d bytes", stop - start, tile_bytes)


def _out_of_memory(error: Exception) -> bool:
    """Return True if an allocation failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch raises a plain RuntimeError for the CPU
    return "DefaultCPUAllocator" in str(error) or "bad_alloc" in str(error)


def _release() -> None:
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # cached pieces of the failed tile may be too small to reuse
