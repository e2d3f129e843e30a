"""llama.cpp's slots: each keeps one prompt."""

from __future__ import annotations

import pytest

from warmprefix.cache_profiles import PROFILES, as_profile
from warmprefix_tools.caches import MarkedPrompt, SimulatedCache, SlotCache, UnitTokens, serve, simulated_cache

ONE, TWO, THREE = ([name * 1_000 + place for place in range(100)] for name in (1, 2, 3))


def reads(cache: SimulatedCache, *prompts: list[int]) -> list[int]:
    return [serve(cache, MarkedPrompt(prompt)).read for prompt in prompts]


def test_slot_keeps_the_last_prompt_only() -> None:
    assert reads(SlotCache(1, host_memory=False), ONE, ONE, [*ONE[:60], 7], TWO, ONE) == [0, 99, 60, 0, 0]


def test_request_takes_the_slot_with_most_in_common_else_the_oldest() -> None:
    assert reads(SlotCache(2, host_memory=False), ONE, TWO, ONE, THREE, ONE, TWO) == [0, 0, 99, 0, 99, 0]


def test_answer_stays_in_the_slot() -> None:
    cache = SlotCache(1, host_memory=False)
    serve(cache, MarkedPrompt(ONE), answer=[5, 6, 7])
    assert reads(cache, [*ONE, 5, 6, 7, 8]) == [102]  # the answer's last token was not fed back


def test_prompts_in_host_memory_are_taken_if_a_quarter_of_them_is_shared() -> None:
    """As a server does, for prompts A and B of 1,000 tokens and C, which begins as A does."""
    a, b = [*range(1_000)], [*range(1_000, 2_000)]
    for shared in (50, 200, 249, 250, 300, 600, 900):
        c = [*a[:shared], *range(5_000, 6_000 - shared)]
        found = reads(SlotCache(1, host_memory=True), a, b, c, b, a)
        kept = 999 if shared < 250 else shared  # taking the prompt moves it
        assert found == [0, 0, 0 if shared < 250 else shared, 999, kept]
    assert reads(SlotCache(1, host_memory=True), a, b, [*a[:200], *range(5_000, 5_050)]) == [0, 0, 0]


def test_slot_prompt_stays_in_host_memory_if_less_than_half_of_it_is_kept() -> None:
    for shared in (40, 49, 50, 80):
        found = reads(SlotCache(1, host_memory=True), ONE, [*ONE[:shared], *range(7_000, 7_100 - shared)], ONE)
        assert found == [0, shared, 99 if shared < 50 else shared]


def test_prompt_in_host_memory_is_taken_by_one_slot() -> None:
    cache = SlotCache(2, host_memory=True)
    assert reads(cache, ONE, TWO, THREE) == [0, 0, 0]  # ONE has left its slot
    first = cache.admit(MarkedPrompt([*ONE, 1]))
    second = cache.admit(MarkedPrompt([*ONE, 2]))
    assert first is not None
    assert second is not None
    assert (first.use.read, second.use.read) == (100, 0)
    for each in (first, second):
        each.store(0.0)
        each.free()
    assert cache.reset()
    assert reads(cache, ONE) == [0]


def test_busy_slots_are_not_shared() -> None:
    cache = SlotCache(1, host_memory=False)
    admission = cache.admit(MarkedPrompt(ONE))
    assert admission is not None
    assert (cache.admit(MarkedPrompt(ONE)), cache.usage, cache.reset()) == (None, 1.0, False)
    admission.store(0.0)
    admission.free()
    assert reads(cache, ONE) == [99]
    assert cache.reset()
    assert reads(cache, ONE) == [0]


@pytest.mark.parametrize(
    "name", [*PROFILES, "vllm-checkpoints(128)", "vllm-checkpoints(528,16)", "llama.cpp(2)", "llama.cpp(2,0)"]
)
def test_each_profile_has_a_cache_that_conserves_tokens(name: str) -> None:
    cache = simulated_cache(as_profile(name))
    tokens = UnitTokens().encode([("system", 1_500), ("question", 200)])
    prompt = MarkedPrompt(tokens, part_ends=(1_500, 1_700), message_ends=(1,))
    uses = [serve(cache, prompt) for _ in range(3)]
    assert {use.tokens for use in uses} == {1_700}
    assert (uses[-1].read > 0) == (name not in ("anthropic", "bedrock"))  # they cache at marks only
    assert (cache.num_sequences, cache.usage) == (0, 0)


def test_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt must fit into the cache, got one of 100 tokens"):
        serve(simulated_cache(as_profile("full-attention"), kv_blocks=4), MarkedPrompt(ONE))
