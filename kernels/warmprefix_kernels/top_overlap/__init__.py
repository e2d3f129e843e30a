"""For each context the others that share most tokens with it."""

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
"""Most partners a context that can be asked for."""


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
    """For each context the `m` others with which it shares most tokens, exactly, whatever computes it.

    >>> partners, overlaps = top_overlap([0, 2, 4, 5], [0, 1, 1, 2, 3], tokens=[100, 50, 70, 10], m=1, device="numpy")
    >>> partners.tolist(), overlaps.tolist()
    ([[1], [0], [-1]], [[50], [50], [0]])

    Args:
        offsets: Context i holds `ids[offsets[i]:offsets[i + 1]]`; of shape (contexts + 1), from 0 to the number of ids.
        ids: Block ids from 0 to 2**31 - 1, distinct within a context; they are sorted here where they are not.
        tokens: The length of every block, by id, so that both contexts of a pair see the same; 0 or more.
        m: Partners wanted a context, 1 to 1,024.
        device: See `choose_device`.
        tile_bytes: Memory for the rows that are worked on together; by default what suits the device. Halved for as
            long as there is less, down to a single row: 4 or 8 bytes a context on a CUDA device.

    Returns:
        Partners, int32 of shape (contexts, m), and the tokens shared with them, int64: most tokens first, of equals the
        lower index first. A context is no partner of itself, nor is one that shares no token; places without a partner
        hold -1 and 0. As numpy arrays, or as tensors on the device if `ids` is a tensor.

    Raises:
        ImportError: torch is needed and not installed.
        TypeError: An array is not of integers, or `m` is none.
        ValueError: An argument is out of range; also where the tokens of a context, times the number of contexts
            rounded up to a power of two, reach 2**63, since sum and index are ranked as one integer.
    """
    contexts = checked_contexts(offsets, ids)
    lengths = checked_integers("tokens", tokens, 0, 2**63 - 1).astype(np.int64)
    largest_id = int(contexts.ids.max(initial=-1))
    if len(lengths) <= largest_id:
        raise ValueError(f"tokens must hold the length of every id up to {largest_id}, got {len(lengths)} lengths")
    m = index(m)
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
        if (total := sum(lengths[start:stop].tolist())) >= limit:  # as Python's integers, which have no end
            raise ValueError(
                f"tokens of a context must be below {limit} in all for so many, got {total} in context {row}"
            )
