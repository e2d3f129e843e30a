"""Ordering policies, and the names that `ContextPlanner(policy=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from warmprefix.ordering.coaccess import CoAccessPolicy
from warmprefix.ordering.context_index import ContextIndexPolicy
from warmprefix.ordering.policies import (
    BlockView,
    FrequencyPolicy,
    GreedyPolicy,
    OraclePolicy,
    OrderingPolicy,
    PrefixView,
    RecencyPolicy,
    RelevancePolicy,
    ServedBlock,
    SortedPolicy,
)

__all__ = [
    "POLICIES",
    "BlockView",
    "CoAccessPolicy",
    "ContextIndexPolicy",
    "FrequencyPolicy",
    "GreedyPolicy",
    "OraclePolicy",
    "OrderingPolicy",
    "PrefixView",
    "RecencyPolicy",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
]

POLICIES: Mapping[str, Callable[[], OrderingPolicy]] = MappingProxyType(
    {
        "relevance": RelevancePolicy,
        "sorted": SortedPolicy,
        "frequency": FrequencyPolicy,
        "greedy": GreedyPolicy,
        "recency": RecencyPolicy,
        "oracle": OraclePolicy,
        "context-index": ContextIndexPolicy,
        "coaccess": CoAccessPolicy,
    }
)
"""The shipped policies, by the name that `ContextPlanner` accepts."""
