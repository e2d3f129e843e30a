"""Ordering policies, and the names that `ContextPlanner(policy=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from warmprefix.ordering.choosing import Exposure, choose_candidates
from warmprefix.ordering.coaccess import AccessWindow, CoAccessPolicy
from warmprefix.ordering.policies import (
    BlockView,
    OrderingPolicy,
    PrefixView,
    RelevancePolicy,
    ServedBlock,
    SortedPolicy,
    StatelessPolicy,
    places_of_runs,
    runs_of,
)
from warmprefix.ordering.positions import PositionProfile

__all__ = [
    "POLICIES",
    "AccessWindow",
    "BlockView",
    "CoAccessPolicy",
    "Exposure",
    "OrderingPolicy",
    "PositionProfile",
    "PrefixView",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
    "StatelessPolicy",
    "choose_candidates",
    "places_of_runs",
    "runs_of",
]

POLICIES: Mapping[str, Callable[[], OrderingPolicy]] = MappingProxyType(
    {"relevance": RelevancePolicy, "sorted": SortedPolicy, "coaccess": CoAccessPolicy}
)
"""The policies of this package, by name. Other packages bring policies by entry points of `warmprefix.policies`."""
