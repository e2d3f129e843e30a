"""The one way from the core to the kernels, taken only when a device is asked for.

Nothing here imports torch or `warmprefix_kernels` before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from warmprefix.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "DISTANCES_PAY_FROM",
    "OVERLAPS_PAY_FROM",
    "Device",
    "best_overlaps_on_cuda",
    "context_distance",
    "top_overlap",
    "use_cuda",
]

Device = Literal["auto", "cpu", "cuda"]

# Below these the CPU is done in the time that importing torch and starting CUDA take: a few seconds, not measured here.
DISTANCES_PAY_FROM = 8_000
"""Contexts from which "auto" computes `context_distance` on a CUDA device."""
OVERLAPS_PAY_FROM = 20_000
"""Contexts from which it computes `top_overlap` there."""


def use_cuda(device: Device, contexts: int, pays_from: int) -> bool:
    """Whether to compute on a CUDA device.

    Args:
        device: "cpu": never. "cuda": always. "auto": if torch finds a CUDA device, and there are enough contexts; torch
            is not imported for fewer.
        contexts: Size of the batch.
        pays_from: Contexts that are enough.

    Raises:
        MissingExtraError: "cuda" without torch.
        ValueError: "cuda" without a CUDA device, or a device of another name.
    """
    if device not in get_args(Device):
        raise ValueError(f"device must be one of {', '.join(get_args(Device))}, got {device!r}")
    if device == "cpu" or (device == "auto" and contexts < pays_from):
        return False
    try:
        torch: Any = import_module("torch")  # not everyone who checks the types has it
    except ImportError as exc:
        if device == "auto":
            return False
        raise MissingExtraError("gpu", "torch") from exc
    if torch.cuda.is_available():
        return True
    if device == "cuda":
        raise ValueError("device must be auto or cpu on this machine, got 'cuda': torch finds no CUDA device")
    return False


def context_distance(
    offsets: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    alpha: float,
    device: str,
) -> npt.NDArray[np.float32]:
    """Eq. 1 for all pairs of contexts, condensed, computed on a torch device; see `warmprefix_kernels`."""
    from warmprefix_kernels import context_distance

    return context_distance(offsets, ids, positions, alpha, device=device)


def top_overlap(
    offsets: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int64],
    m: int,
    device: str,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """For each context the `m` others that share most tokens with it, computed on a torch device.

    Returns:
        The partners and the tokens shared with them, both of shape (contexts, m); see `warmprefix_kernels`.
    """
    from warmprefix_kernels import top_overlap

    return top_overlap(offsets, ids, tokens, m, device=device)


def best_overlaps_on_cuda(contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """For each context the most tokens that another shares with it."""
    import numpy as np

    from warmprefix.batch.ragged import ragged

    rows = ragged(contexts)
    _, overlaps = top_overlap(rows.offsets, rows.ids, np.asarray(tokens, np.int64), 1, "cuda")
    return [int(most) for most in overlaps[:, 0]]
