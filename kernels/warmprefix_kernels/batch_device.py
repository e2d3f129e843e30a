"""The choice between the CPU and a CUDA device for distances and overlaps."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, get_args

from warmprefix_kernels._missing import missing_extra

__all__ = ["DISTANCES_PAY_FROM", "OVERLAPS_PAY_FROM", "Device", "use_cuda"]

Device = Literal["auto", "cpu", "cuda"]
"""Where distances and overlaps are computed; `auto` takes a CUDA device if it pays."""

# Below these the CPU finishes while torch is imported and CUDA starts: an estimate of a few seconds, not measured.
DISTANCES_PAY_FROM = 8_000
"""Contexts from which "auto" computes distances on a CUDA device."""
OVERLAPS_PAY_FROM = 20_000
"""Contexts from which "auto" computes overlaps on a CUDA device."""


def use_cuda(device: Device, contexts: int, pays_from: int) -> bool:
    """Return True if the computation runs on a CUDA device.

    Args:
        device: "cpu": never. "cuda": always. "auto": if torch finds a CUDA device and there are enough contexts; for
            fewer, torch is not imported.
        contexts: Number of contexts in the batch.
        pays_from: Number of contexts from which a device pays.

    Raises:
        MissingExtraError: "cuda" without torch.
        ValueError: "cuda" without a CUDA device, or an unknown device.
    """
    if device not in get_args(Device):
        raise ValueError(f"device must be one of {', '.join(get_args(Device))}, got {device!r}")
    if device == "cpu" or (device == "auto" and contexts < pays_from):
        return False
    try:
        torch: Any = import_module("torch")  # absent where the core alone is type-checked
    except ImportError as exc:
        if device == "auto":
            return False
        raise missing_extra("torch") from exc
    if torch.cuda.is_available():
        return True
    if device == "cuda":
        raise ValueError("device must be auto or cpu on this machine, got 'cuda': torch finds no CUDA device")
    return False
