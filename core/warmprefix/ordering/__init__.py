"""Ordering policies, and the names that `ContextPlanner(policy=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from warmprefix.ordering.coaccess import CoAccessPolicy
from warmprefix.ordering.policies import (
    BlockView,
    OrderingPolicy,
    PrefixView,
    RelevancePolicy,
    ServedBlock,
    SortedPolicy,
    StatelessPolicy,
    by_rank,
    is_resident,
    then_the_rest,
)
from warmprefix.ordering.runs import runs_of

__all__ = [
    "POLICIES",
    "BlockView",
    "CoAccessPolicy",
    "OrderingPolicy",
    "PrefixView",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
    "StatelessPolicy",
    "by_rank",
    "is_resident",
    "runs_of",
    "then_the_rest",
]

POLICIES: Mapping[str, Callable[[], OrderingPolicy]] = MappingProxyType(
    {"relevance": RelevancePolicy, "sorted": SortedPolicy, "coaccess": CoAccessPolicy}
)
"""The policies of this package, by name. Other packages bring policies by entry points of `warmprefix.policies`."""
