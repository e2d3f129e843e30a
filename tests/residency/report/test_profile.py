"""What the planner believes of its engine's cache."""

from __future__ import annotations

import pytest

from warmprefix import ContextPlanner
from warmprefix.cache_profiles import vllm_checkpoints
from warmprefix.residency.profile import EngineProfile


def test_a_given_profile_stays() -> None:
    profile = EngineProfile("vllm-checkpoints(528,16)")
    profile.learn(vllm_checkpoints(128))
    assert (profile.current, profile.source) == (vllm_checkpoints(528, 16), "argument")


def test_without_one_the_engine_decides() -> None:
    profile = EngineProfile("auto")
    assert (profile.current.name, profile.source) == ("full-attention", "default")
    profile.learn(vllm_checkpoints(128))
    assert (profile.current, profile.source) == (vllm_checkpoints(128), "engine")


def test_planner_reports_its_profile_and_refuses_unknown_ones() -> None:
    stats = ContextPlanner(profile="anthropic").stats()
    assert (stats.profile, stats.profile_source) == ("anthropic", "argument")
    with pytest.raises(ValueError, match="profile must be one of"):
        ContextPlanner(profile="claude")
