"""Sums over all pairs of contexts on any device, and the hot loops of batch planning; plain arrays in and out.

>>> from warmprefix_kernels import top_overlap
>>> partners, overlaps = top_overlap([0, 2, 4], [7, 8, 8, 9], tokens=[100] * 10, m=1, device="numpy")
>>> overlaps.tolist()
[[100], [100]]
"""

from __future__ import annotations

from typing import Any

from warmprefix_kernels._device import Device, choose_device
from warmprefix_kernels._missing import missing_extra

__all__ = ["Device", "choose_device", "context_distance", "context_distance_tiles", "top_overlap"]

try:
    import numpy as _  # noqa: F401
except ImportError as error:
    _missing = missing_extra("numpy")
    _missing.__cause__ = error

    def __getattr__(name: str) -> Any:
        """Raise the error of the kernels, which need numpy; the loops of batch planning do without."""
        raise _missing if name in __all__ else AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    from warmprefix_kernels.context_distance import context_distance, context_distance_tiles
    from warmprefix_kernels.top_overlap import top_overlap
