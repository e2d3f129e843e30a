"""SGLang's radix tree under its priority policy, against hits recorded from SGLang's own cache."""

from __future__ import annotations

import pytest
from tests.tools.caches.radix_workloads import RECORDED, Workload, random_workload, recorded_hits, tokens_of

from warmprefix_tools.caches import MarkedPrompt, RadixTreeCache, serve

A, B, C = ([name * 1_000 + place for place in range(100)] for name in (1, 2, 3))


def hits_of_tree(workload: Workload) -> list[int]:
    cache = RadixTreeCache(workload["capacity"])
    return [
        serve(
            cache,
            MarkedPrompt(tokens_of(each["pieces"]), each["salt"], priority=each["priority"]),
            answer=[7] * each["answer_tokens"],
        ).read
        for each in workload["requests"]
    ]


def test_hits_are_those_of_sglangs_own_cache() -> None:
    recorded = [*recorded_hits()]
    assert len(recorded) == RECORDED
    for seed, expected in enumerate(recorded):
        assert hits_of_tree(random_workload(seed)) == expected, seed


def reads(cache: RadixTreeCache, *requests: tuple[list[int], int | None]) -> list[int]:
    return [serve(cache, MarkedPrompt(prompt, priority=priority)).read for prompt, priority in requests]


def test_lowest_priority_leaves_first_and_none_counts_as_0() -> None:
    assert reads(RadixTreeCache(250), (A, 1), (B, None), (C, 1), (A, 1)) == [0, 0, 0, 99]
    assert reads(RadixTreeCache(250), (A, -1), (B, None), (C, 1), (B, 1)) == [0, 0, 0, 99]


def test_priority_never_falls_but_a_growing_clock_outlives_it() -> None:
    assert reads(RadixTreeCache(250), (A, 9), (A, 0), (B, 5), (C, 5), (A, 0)) == [0, 99, 0, 0, 99]
    assert reads(RadixTreeCache(250), (A, 9), (B, 10), (C, 11), (A, 12)) == [0, 0, 0, 0]


def test_new_tail_takes_the_priority_of_its_request() -> None:
    cache = RadixTreeCache(350)
    assert reads(cache, (A, 9), ([*A, *B], 9), (C, 5), ([*C[:50], *A], 6)) == [0, 100, 0, 50]
    assert reads(cache, ([*A, *B, 1], 9)) == [200]


def test_prompts_in_use_stay_and_refused_ones_change_nothing() -> None:
    cache = RadixTreeCache(250)
    first = cache.admit(MarkedPrompt(A, priority=0), room_for=20)
    assert first is not None
    first.store(0.0)
    assert cache.admit(MarkedPrompt(B, priority=9), room_for=31) is None
    second = cache.admit(MarkedPrompt(B, priority=9), room_for=30)
    assert second is not None
    second.free()  # cancelled while it is computed: nothing of it stays
    assert not cache.reset()
    for token in range(20):
        first.append(token)
    assert cache.usage == 120 / 250
    first.free()
    assert (cache.usage, cache.num_sequences) == (0, 0)
    assert reads(cache, (B, 9), (A, 0)) == [0, 99]
    assert cache.reset()
    assert reads(cache, (A, 0)) == [0]


def test_salts_share_nothing() -> None:
    cache = RadixTreeCache(1_000)
    found = [serve(cache, MarkedPrompt(A, salt)).read for salt in ("one", "two", None, "one")]
    assert found == [0, 0, 0, 99]


def test_capacity_must_be_a_token_or_more() -> None:
    with pytest.raises(ValueError, match="capacity_tokens must be 1 or more, got 0"):
        RadixTreeCache(0)
