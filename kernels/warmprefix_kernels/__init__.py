"""Sums over all pairs of contexts on any device, and the hot loops of batch planning; plain arrays in and out.

>>> from warmprefix_kernels import top_overlap
>>> partners, overlaps = top_overlap([0, 2, 4], [7, 8, 8, 9], tokens=[100] * 10, m=1, device="numpy")
>>> overlaps.tolist()
[[100], [100]]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from warmprefix_kernels._device import Device, choose_device
from warmprefix_kernels._missing import missing_extra

if TYPE_CHECKING:
    from warmprefix_kernels.context_distance import context_distance, context_distance_tiles
    from warmprefix_kernels.top_overlap import top_overlap

__all__ = ["Device", "choose_device", "context_distance", "context_distance_tiles", "top_overlap"]

_HOMES = {
    "context_distance": "context_distance",
    "context_distance_tiles": "context_distance",
    "top_overlap": "top_overlap",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the kernels need numpy, and the loops of batch planning do without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import numpy as _  # noqa: F401
    except ImportError as error:
        raise missing_extra("numpy") from error
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
