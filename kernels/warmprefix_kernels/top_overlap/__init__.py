"""The contexts that share most tokens with each context."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from warmprefix_kernels._contexts import Ints, checked_contexts, checked_integers
from warmprefix_kernels._device import choose_device
from warmprefix_kernels._tiles import bytes_of_tile
from warmprefix_kernels.top_overlap import naive

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_PARTNERS", "top_overlap"]

MOST_PARTNERS = 1_024
"""Most partners per context."""


@overload
def top_overlap(
    offsets: Ints, ids: Ints, tokens: Ints, m: int, *, device: object = ..., tile_bytes: int | None = ...
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...


@overload
def top_overlap(
    offsets: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    m: int,
    *,
    device: object = ...,
    tile_bytes: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def top_overlap(
    offsets: Any, ids: Any, tokens: Any, m: int, *, device: object = "auto", tile_bytes: int | None = None
) -> tuple[Any, Any]:
    """Find for each context the `m` others that share most tokens with it.

    The result is exact, and the same on all devices.

    >>> partners, overlaps = top_overlap([0, 2, 4, 5], [0, 1, 1, 2, 3], tokens=[100, 50, 70, 10], m=1, device="numpy")
    >>> partners.tolist(), overlaps.tolist()
    ([[1], [0], [-1]], [[50], [50], [0]])

    Args:
        offsets: Context i holds `ids[offsets[i]:offsets[i + 1]]`; of shape (contexts + 1), from 0 to the number of ids.
        ids: Block ids from 0 to 2**31 - 1, distinct within a context, in any order.
        tokens: The length of every block, by id, 0 or more.
        m: Partners per context, 1 to 1,024.
        device: See `choose_device`.
        tile_bytes: Memory for the rows that are computed together; None for the device's default. It is halved while
            allocations fail, down to a single row: 4 or 8 bytes per context on a CUDA device.

    Returns:
        Partners, int32 of shape (contexts, m), and the tokens shared with them, int64 of the same shape: most tokens
        first, ties by the lower index. A partner is another context that shares at least one token; places without a
        partner hold -1 and 0. Numpy arrays, or tensors on the device if `ids` is a tensor.

    Raises:
        ImportError: torch is needed and not installed.
        TypeError: An array holds values that are not integers, or `m` is not an integer.
        ValueError: An argument is out of range, or the tokens of a context, times the number of contexts rounded up to
            a power of two, reach 2**63: sum and index are ranked as one integer.
    """
    contexts = checked_contexts(offsets, ids)
    lengths = checked_integers("tokens", tokens, 0, 2**63 - 1).astype(np.int64)
    largest_id = int(contexts.ids.max(initial=-1))
    if len(lengths) <= largest_id:
        raise ValueError(f"tokens must hold the length of every id up to {largest_id}, got {len(lengths)} lengths")
    try:
        m = index(m)
    except TypeError:
        raise TypeError(f"m must be an integer, got {type(m).__name__}") from None
    if not 1 <= m <= MOST_PARTNERS:
        raise ValueError(f"m must be 1 to {MOST_PARTNERS}, got {m}")
    _check_sums(lengths[contexts.ids], contexts.offsets)
    where = choose_device(device)
    tile_bytes = bytes_of_tile(where.name, tile_bytes)
    as_tensors = hasattr(ids, "detach")
    if where.implementation == "naive":
        partners, overlaps = naive.top_overlap(contexts, lengths, m)
        if not as_tensors:
            return partners, overlaps
        torch: Any = import_module("torch")
        return torch.from_numpy(partners), torch.from_numpy(overlaps)
    on_device = import_module(f"{__name__}.{where.implementation}").top_overlap
    found = on_device(contexts, lengths, m, import_module("torch").device(where.name), tile_bytes)
    return found if as_tensors else (found[0].cpu().numpy(), found[1].cpu().numpy())


def _check_sums(lengths: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
    limit = 2**63 >> max(len(offsets) - 2, 1).bit_length()
    if int(lengths.max(initial=0)) * int(np.diff(offsets).max(initial=0)) < limit:
        return
    for row, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if (total := sum(lengths[start:stop].tolist())) >= limit:  # as Python integers, which do not overflow
            raise ValueError(
                f"tokens of a context must sum to less than {limit} for {len(offsets) - 1} contexts, got {total} in "
                f"context {row}"
            )
