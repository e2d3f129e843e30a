"""ContextPilot's distance between all pairs of contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Contexts, Ints, checked_contexts
from warmprefix_kernels._device import Device, choose_device
from warmprefix_kernels._tiles import bytes_of_tile
from warmprefix_kernels.context_distance import naive
from warmprefix_kernels.context_distance._packing import condensed_before, packing_for

if TYPE_CHECKING:
    import torch

__all__ = ["context_distance", "context_distance_tiles"]


@overload
def context_distance(
    offsets: Ints, ids: Ints, positions: Ints, alpha: float = ..., *, device: object = ..., tile_bytes: int | None = ...
) -> npt.NDArray[np.float32]: ...


@overload
def context_distance(
    offsets: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    alpha: float = ...,
    *,
    device: object = ...,
    tile_bytes: int | None = ...,
) -> torch.Tensor: ...


def context_distance(
    offsets: Any,
    ids: Any,
    positions: Any,
    alpha: float = 0.001,
    *,
    device: object = "auto",
    tile_bytes: int | None = None,
) -> Any:
    """Compute Eq. 1 of ContextPilot for all pairs i < j, in the order of `pdist`.

    d = 1 - |S| / max(|Ci|, |Cj|) + alpha * mean of |p_i - p_j| over S, the blocks that both hold; 1 if S is empty.

    >>> context_distance([0, 3, 6, 6], [1, 2, 3, 1, 2, 3], [0, 1, 2, 2, 1, 0], device="numpy").round(4)
    array([0.0013, 1.    , 1.    ], dtype=float32)

    Args:
        offsets: Context i holds `ids[offsets[i]:offsets[i + 1]]`; of shape (contexts + 1), from 0 to the number of ids.
        ids: Block ids from 0 to 2**31 - 1, distinct within a context, in any order.
        positions: The place of each of `ids` in its context's relevance order, from 0 to 2**21 - 1. Contexts of at most
            1,024 blocks with places below 1,024 take half the memory of others, which may have up to 2**21 blocks.
        alpha: Weight of the positions, 0.001 to 0.01.
        device: See `choose_device`.
        tile_bytes: Memory for the rows that are computed together; None for the device's default. It is halved while
            allocations fail, down to a single row.

    Returns:
        float32 of shape (contexts * (contexts - 1) / 2). A numpy array, or a tensor on the device if `ids` is a tensor.

    Raises:
        ImportError: torch is needed and not installed.
        TypeError: An array holds values that are not integers.
        ValueError: An argument is out of range.
    """
    contexts, where = _checked(offsets, ids, positions, alpha, device)
    pairs = int(condensed_before(contexts.count)[-1])
    condensed: Any = np.empty(pairs, np.float32)
    if as_tensors := hasattr(ids, "detach"):
        torch: Any = import_module("torch")
        condensed = torch.empty(pairs, dtype=torch.float32, device=where.of_tensors)
    begin = 0
    for _, _, tile in _tiles(contexts, where, alpha, tile_bytes, as_tensors):
        condensed[begin : begin + len(tile)] = tile
        begin += len(tile)
    return condensed


@overload
def context_distance_tiles(
    offsets: Ints, ids: Ints, positions: Ints, alpha: float = ..., *, device: object = ..., tile_bytes: int | None = ...
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]: ...


@overload
def context_distance_tiles(
    offsets: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    alpha: float = ...,
    *,
    device: object = ...,
    tile_bytes: int | None = ...,
) -> Iterator[tuple[int, int, torch.Tensor]]: ...


def context_distance_tiles(
    offsets: Any,
    ids: Any,
    positions: Any,
    alpha: float = 0.001,
    *,
    device: object = "auto",
    tile_bytes: int | None = None,
) -> Iterator[tuple[int, int, Any]]:
    """Compute the same distances in tiles of rows, never all in memory at once.

    Arguments and errors are those of `context_distance`; they are checked at the call, not at the first tile.

    Returns:
        (start, stop, distances) for consecutive ranges of contexts: the distances of contexts `start` up to `stop` to
        all contexts after each. The concatenation of all tiles is the result of `context_distance`.
    """
    contexts, where = _checked(offsets, ids, positions, alpha, device)
    return _tiles(contexts, where, alpha, tile_bytes, as_tensors=hasattr(ids, "detach"))


def _checked(offsets: Any, ids: Any, positions: Any, alpha: float, device: object) -> tuple[Contexts, Device]:
    contexts = checked_contexts(offsets, ids, positions)
    if not 0.001 <= alpha <= 0.01:
        raise ValueError(f"alpha must be 0.001 to 0.01, got {alpha}")
    return contexts, choose_device(device)


def _tiles(
    contexts: Contexts, where: Device, alpha: float, tile_bytes: int | None, as_tensors: bool
) -> Iterator[tuple[int, int, Any]]:
    packing = packing_for(contexts)
    tile_bytes = bytes_of_tile(where.name, tile_bytes)
    if where.implementation == "naive":
        found = naive.context_distance_tiles(contexts, alpha, tile_bytes)
        return _each(found, import_module("torch").from_numpy) if as_tensors else found
    device = import_module("torch").device(where.name)
    found = import_module(f"{__name__}.{where.implementation}").context_distance_tiles(
        contexts, packing, float(alpha), device, tile_bytes
    )
    return found if as_tensors else _each(found, lambda tile: tile.cpu().numpy())


def _each(found: Iterator[tuple[int, int, Any]], change: Callable[[Any], Any]) -> Iterator[tuple[int, int, Any]]:
    return ((start, stop, change(tile)) for start, stop, tile in found)
