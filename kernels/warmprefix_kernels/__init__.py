"""Sums over all pairs of contexts on any device; plain arrays in and out.

>>> from warmprefix_kernels import top_overlap
>>> partners, overlaps = top_overlap([0, 2, 4], [7, 8, 8, 9], tokens=[100] * 10, m=1, device="numpy")
>>> overlaps.tolist()
[[100], [100]]
"""

from warmprefix_kernels._device import Device, choose_device
from warmprefix_kernels._missing import missing_extra

try:
    import numpy as _  # noqa: F401
except ImportError as error:
    raise missing_extra("numpy") from error

from warmprefix_kernels.context_distance import context_distance, context_distance_tiles
from warmprefix_kernels.top_overlap import top_overlap

__all__ = ["Device", "choose_device", "context_distance", "context_distance_tiles", "top_overlap"]
