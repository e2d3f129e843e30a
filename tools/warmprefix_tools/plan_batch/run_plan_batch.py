"""The command `warmprefix plan-batch`: plans a trace as one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from warmprefix import ContextPlanner
from warmprefix.annotate import has_labels
from warmprefix.batch import BatchPlan, BatchRequest, BoundKind, PlannedPrime, shards_of
from warmprefix.blocks import ContextBlock
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError, WarmprefixError
