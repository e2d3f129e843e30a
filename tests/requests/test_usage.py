"""Token counts are read in every vocabulary, and never become more, or less sure, than what was reported."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_requests.usage import TokenUsage, reported_usage, token_usage

NAMES = (
    *("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "input", "prompt_eval_count"),
    *("cache_read_input_tokens", "cache_creation_input_tokens", "cacheReadInputTokens", "cachedContentTokenCount"),
    *("prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cached_tokens", "input_cached_tokens", "total_tokens"),
    *("completion_tokens", "output_tokens", "gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens"),
)
HOLDERS = ("prompt_tokens_details", "input_tokens_details", "cache_creation", "timings", "input_token_details")
INNER = ("cached_tokens", "cache_write_tokens", "cache_read", "cache_n", "prompt_n", "ephemeral_5m_input_tokens")
COUNTS = st.one_of(
    st.integers(-5, 3_000),
    st.sampled_from(
        [None, True, False, 12.0, 12.5, "12", "12.0", "x", "", float("nan"), float("inf"), 10**30, "9" * 99]
    ),
)
USAGES = st.dictionaries(st.sampled_from(NAMES), COUNTS, max_size=6).flatmap(
    lambda flat: st.dictionaries(
        st.sampled_from(HOLDERS), st.one_of(COUNTS, st.dictionaries(st.sampled_from(INNER), COUNTS)), max_size=2
    ).map(lambda nested: {**flat, **nested})
)


@given(USAGES)
def test_no_share_is_above_the_whole(usage: dict[str, Any]) -> None:
    tokens = token_usage(usage)
    assert all(count is None or (type(count) is int and count >= 0) for count in tokens)
    if tokens.cached_tokens is not None:
        assert tokens.prompt_tokens is not None
        assert tokens.cached_tokens + (tokens.written_tokens or 0) <= tokens.prompt_tokens
        assert tokens.uncached_tokens is not None
        assert tokens.uncached_tokens >= 0


FAMILIES = (
    ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation"),
    ("promptTokenCount", "candidatesTokenCount", "cachedContentTokenCount"),
    ("prompt_tokens", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens"),
)


def events_of(names: tuple[str, ...]) -> st.SearchStrategy[list[dict[str, Any]]]:
    details = st.one_of(COUNTS, st.dictionaries(st.sampled_from(INNER), COUNTS))
    fields = {name: details if name in HOLDERS else COUNTS for name in names}
    return st.lists(st.fixed_dictionaries({}, optional=fields), max_size=4)


@given(st.sampled_from(FAMILIES).flatmap(events_of))
def test_a_count_is_never_forgotten(usages: list[dict[str, Any]]) -> None:
    usage: dict[str, Any] = {}
    for each in usages:
        before = token_usage(usage)
        usage = reported_usage({"usage": each}, usage)
        after = token_usage(usage)
        assert all(new is not None for old, new in zip(before, after, strict=True) if old is not None)


@pytest.mark.parametrize("value", [None, 7, "text", [], [{}], {"usage": 5}, {"usage": []}, {"choices": 3}])
def test_what_holds_no_usage_reports_nothing(value: Any) -> None:
    assert token_usage(value) == TokenUsage()
    assert token_usage(reported_usage(value)) == TokenUsage()


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *((12, 12), (12.0, 12), ("12", 12), ("12.0", 12), (0, 0), (12.5, None), (True, None), (-1, None), ("", None)),
        *((float("nan"), None), (float("inf"), None), (2**31, None), ("1e400", None), ("9" * 100_000, None)),
    ],
)
def test_a_count_is_a_whole_number_in_any_spelling(value: Any, count: int | None) -> None:
    assert token_usage({"prompt_tokens": value}).prompt_tokens == count


def test_unreported_is_not_zero() -> None:
    reported = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    assert token_usage(reported)[:2] == (9, 0)
    for name, value in (("prompt_tokens_details", None), ("prompt_tokens_details", {}), ("cached_tokens", None)):
        assert token_usage({"prompt_tokens": 9, name: value})[:2] == (9, None)
    assert token_usage({"input_tokens": 9, "cache_read_input_tokens": None})[:2] == (9, None)
    assert token_usage({"prompt_tokens": 9}).uncached_tokens is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        # An API that counts cached tokens within the prompt has none above it.
        ({"prompt_tokens": 1_000, "prompt_tokens_details": {"cached_tokens": 1_500}}, (1_000, 1_000)),
        # One that mixes Anthropic's names with OpenAI's counts them apart, if there are more of them.
        ({"prompt_tokens": 10, "cache_read_input_tokens": 1_500}, (1_510, 1_500)),
        ({"prompt_tokens": 1_600, "cache_read_input_tokens": 1_500}, (1_600, 1_500)),
        # The total shows what the prompt's count includes.
        (
            {
                "prompt_tokens": 1_600,
                "completion_tokens": 5,
                "total_tokens": 3_105,
                "prompt_tokens_details": {"cached_tokens": 1_500},
            },
            (3_100, 1_500),
        ),
        ({"input": 2_000, "input_cached_tokens": 1_500, "output": 5, "total": 2_005}, (2_000, 1_500)),
        ({"input": 500, "input_cached_tokens": 1_500, "output": 5, "total": 2_005}, (2_000, 1_500)),
    ],
)
def test_counts_above_the_prompt_are_those_of_a_prompt_without_them(
    usage: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert token_usage(usage)[:2] == expected


def test_the_order_of_names_is_irrelevant() -> None:
    usage = {"prompt_tokens": 10, "input_tokens": 0, "cache_read_input_tokens": 0, "cached_tokens": 4}
    assert {token_usage(dict(items))[:2] for items in itertools.permutations(usage.items())} == {(10, 4)}


FULL = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 80}}
START = {"input_tokens": 3, "cache_read_input_tokens": 1_000, "cache_creation_input_tokens": 7}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([FULL, {"prompt_tokens": 100}], (100, 80, None)),
        ([FULL, {"prompt_tokens": 100, "prompt_tokens_details": None}], (100, 80, None)),
        ([FULL, {"prompt_tokens": 100, "prompt_tokens_details": {}}], (100, 80, None)),
        ([FULL, {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": None}}], (100, 80, None)),
        ([FULL, {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}], (100, 80, None)),
        ([{"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}, FULL], (100, 80, None)),
        ([{"prompt_tokens": 100}, FULL], (100, 80, None)),
        ([START, {"output_tokens": 5}], (1_010, 1_000, 7)),
        ([START, {"input_tokens": 3, "output_tokens": 5}], (1_010, 1_000, 7)),
        ([START, {**START, "output_tokens": 5}], (1_010, 1_000, 7)),
        ([START, {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 5}], (1_010, 1_000, 7)),
        ([{"input_tokens": 0, "output_tokens": 1}, START], (1_010, 1_000, 7)),
        ([{"input_tokens": 1_010}, {"input_tokens": 10, "cache_read_input_tokens": 1_000}], (1_010, 1_000, None)),
    ],
)
def test_later_events_of_a_stream_add_to_earlier_ones(
    events: list[dict[str, Any]], expected: tuple[int | None, ...]
) -> None:
    usage: dict[str, Any] = {}
    for event in events:
        usage = reported_usage(json.loads(json.dumps({"usage": event})), usage)
    assert token_usage(usage)[:3] == expected


def test_a_prompt_of_which_all_is_cached_keeps_its_length() -> None:
    assert token_usage({"input_tokens": 0, "cache_read_input_tokens": 50})[:2] == (50, 50)
