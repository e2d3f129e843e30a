"""The steps before and after planning: requests, planners, device, and results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.plan import BatchRequest, PlannedRequest, SharedWording
from warmprefix.batch.planners import BatchPlanner, Device, RelevancePlanner
from warmprefix.batch.scope_plan import ScopePlan
from warmprefix.blocks import ContextBlock
from warmprefix.extensions import extension, extension_names
from warmprefix_kernels.batch_device import DISTANCES_PAY_FROM, OVERLAPS_PAY_FROM, use_cuda

__all__ = ["BATCH_PLANNERS", "Requests", "as_requests", "device_for", "planned_requests", "planners_for"]

