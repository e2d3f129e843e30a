"""The published policies and batch planners that warmprefix is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from warmprefix.extensions import extension, extension_names
from warmprefix.ordering import POLICIES as CORE_POLICIES
from warmprefix.ordering import OrderingPolicy
from warmprefix_baselines.context_index import ContextIndex, ContextIndexPolicy, context_distance
from warmprefix_baselines.planners import FrequencyPlanner
from warmprefix_baselines.policies import FrequencyPolicy, GreedyPolicy, OraclePolicy, RecencyPolicy

__all__ = [
    "BATCH_PLANNERS",
    "POLICIES",
    "ContextIndex",
    "ContextIndexPolicy",
    "FrequencyPlanner",
    "FrequencyPolicy",
    "GreedyPolicy",
    "OraclePolicy",
    "RecencyPolicy",
    "context_distance",
]

POLICIES: Mapping[str, Callable[[], OrderingPolicy]] = MappingProxyType(
    {
        **CORE_POLICIES,
        **{name: extension("warmprefix.policies", name) for name in extension_names("warmprefix.policies")},
    }
)
"""The policies of warmprefix and of all installed packages, by the name that `ContextPlanner` accepts."""

BATCH_PLANNERS = ("auto", "merge", "context-index", "frequency", "relevance")
"""Names of the planners that `ContextPlanner.plan_batch` accepts, with these."""
