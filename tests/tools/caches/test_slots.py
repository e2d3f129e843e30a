"""llama.cpp's slots: each keeps one prompt."""

from __future__ import annotations

import pytest

from warmprefix.cache_profiles import PROFILES, as_profile
from warmprefix_tools.caches import MarkedPrompt, SimulatedCache, SlotCache, UnitTokens, serve, simulated_cache

ONE, TWO, THREE = ([name * 1_000 + place for place in range(100)] for name in (1, 2, 3))


def reads(cache: SimulatedCache, *prompts: list[int]) -> list[int]:
    return [serve(cache, MarkedPrompt(prompt)).read for prompt in prompts]


def test_slot_keeps_the_last_prompt_only() -> None:
    assert reads(SlotCache(1), ONE, ONE, [*ONE[:60], 7], TWO, ONE) == [0, 99, 60, 0, 0]


def test_request_takes_the_slot_with_most_in_common_else_the_oldest() -> None:
    assert reads(SlotCache(2), ONE, TWO, ONE, THREE, ONE, TWO) == [0, 0, 99, 0, 99, 0]


def test_answer_stays_in_the_slot() -> None:
    cache = SlotCache(1)
    serve(cache, MarkedPrompt(ONE), answer=[5, 6, 7])
    assert reads(cache, [*ONE, 5, 6, 7, 8]) == [102]  # the answer's last token was not fed back


def test_busy_slots_are_not_shared() -> None:
    cache = SlotCache(1)
    admission = cache.admit(MarkedPrompt(ONE))
    assert admission is not None
    assert (cache.admit(MarkedPrompt(ONE)), cache.usage, cache.reset()) == (None, 1.0, False)
    admission.store(0.0)
    admission.free()
    assert reads(cache, ONE) == [99]
    assert cache.reset()
    assert reads(cache, ONE) == [0]


@pytest.mark.parametrize("name", [*PROFILES, "vllm-checkpoints(128)", "vllm-checkpoints(528,16)", "llama.cpp(2)"])
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
