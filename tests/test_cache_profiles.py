"""Cache profiles: the built-in facts, their names, and fields that contradict each other."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from warmprefix.cache_profiles import (
    PROFILES,
    CacheProfile,
    Checkpoints,
    MarkRules,
    as_profile,
    blend,
    llama_cpp,
    vllm_checkpoints,
)

ALL = [
    *PROFILES.values(),
    vllm_checkpoints(528),
    vllm_checkpoints(1056, 16),
    llama_cpp(4),
    llama_cpp(1, host_memory=False),
    blend("<|sep|>"),
    blend("(a)\n"),
]


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_each_built_in_profile_has_a_dated_source_and_a_name_that_leads_back_to_it(profile: CacheProfile) -> None:
    assert as_profile(profile.name) == as_profile(profile) == profile
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", profile.as_of)
    assert profile.source


def test_a_field_can_be_overridden() -> None:
    cheap = replace(PROFILES["anthropic"], minimum_tokens=4096)
    assert cheap.minimum_tokens == 4096
    assert cheap.marks == PROFILES["anthropic"].marks


def test_writes_break_even_as_the_vendors_state() -> None:
    """A write pays once it is read more than (w - 1) / (1 - r) times."""
    anthropic, before = PROFILES["anthropic"], PROFILES["openai-before-5.6"]
    needed = [(price - 1) / (1 - anthropic.read_price) for price in anthropic.write_prices]
    assert needed == pytest.approx([0.278, 1.111], abs=0.001)
    assert before.write_prices == (1.0,)  # so each read is a gain


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: as_profile("claude"), "profile must be one of full-attention, .*, got 'claude'"),
        (lambda: as_profile("llama.cpp(2,3)"), "profile must be one of"),
        (lambda: as_profile("vllm-checkpoints(0)"), "block must be 1 or more"),
        (lambda: as_profile("vllm-checkpoints(528,10)"), "block must be a multiple of unit, got 528 and 10"),
        (lambda: as_profile("blend()"), "separator must have at least one character, got ''"),
        (lambda: CacheProfile("x", read_price=-0.1), "read_price must be finite and 0 or more, got -0.1"),
        (lambda: CacheProfile("x", write_prices=(float("nan"),)), "write_prices must be finite"),
        (lambda: CacheProfile("x", write_prices=(1.0, 2.0)), "write_prices must have 1 values, got 2"),
        (lambda: CacheProfile("x", marks=MarkRules(), slots=1), "at most one of .*, got marks and slots"),
        (lambda: CacheProfile("x", lifetime=0), "lifetime must be above 0"),
        (lambda: MarkRules(lifetimes=(3600.0, 300.0)), "lifetimes must be positive and rise"),
        (lambda: MarkRules(lifetimes=()), "lifetimes must be positive and rise"),
        (lambda: MarkRules(most=0), "most must be 1 or more"),
        (lambda: Checkpoints(0), "block must be 1 or more"),
    ],
)
def test_contradictions_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize("wrong", [None, 3, b"openai"])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="profile must be a CacheProfile or a str"):
        as_profile(wrong)


def test_a_price_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="read_price must be numbers"):
        CacheProfile("x", read_price="0.1")  # type: ignore[arg-type]
