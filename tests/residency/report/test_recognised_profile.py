"""A planner recognises engines that keep checkpoints by their reports, and no other engine."""

from __future__ import annotations

import random

import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import as_profile
from warmprefix_tools.caches import MarkedPrompt, SimulatedCache, UnitTokens, serve, simulated_cache

PREAMBLE_TOKENS = 100


def serve_requests(cache: SimulatedCache, planner: ContextPlanner, count: int) -> None:
    """Plan, serve and commit requests whose contexts overlap."""
    chance, units = random.Random(4), UnitTokens()
    topics = [[ContextBlock(f"block {topic} {n}", tokens=200) for n in range(10)] for topic in range(6)]
    for number in range(count):
        blocks = chance.sample(topics[chance.randrange(6)], 6)
        plan = planner.plan(blocks)
        parts = [("preamble", PREAMBLE_TOKENS), *[(each.block.text, 200) for each in plan.blocks], (number, 50)]
        tokens = units.encode(parts)
        use = serve(cache, MarkedPrompt(tokens))
        ends = [(PREAMBLE_TOKENS + 200 * place) / len(tokens) for place in range(1, 7)]
        planner.commit(plan, report=EngineReport(use.read, len(tokens), block_ends=ends))


@pytest.mark.parametrize(("window", "block"), [(512, 128), (None, 256)])
def test_checkpoints_are_recognised(window: int | None, block: int) -> None:
    cache = simulated_cache(as_profile(f"vllm-checkpoints({block})"), kv_blocks=20_000, window=window)
    planner = ContextPlanner()
    serve_requests(cache, planner, 300)
    assert planner.stats().profile_source == "reports"
    checkpoints = planner.profile.checkpoints
    assert checkpoints is not None
    assert checkpoints.block % block == 0


def test_capacity_learned_under_a_refuted_profile_is_dropped() -> None:
    """Second visits that find nothing looked like a small cache."""
    with_size, without_size = ContextPlanner(), ContextPlanner()
    with_size.commit(with_size.plan(["text"]), report=EngineReport(capacity_tokens=300_000))
    for planner in (with_size, without_size):
        cache = simulated_cache(as_profile("vllm-checkpoints(128)"), kv_blocks=20_000, window=512)
        serve_requests(cache, planner, 300)
        assert planner.stats().profile_source == "reports"
    assert (with_size.stats().capacity_tokens, with_size.stats().capacity_source) == (300_000, "metrics")
    assert (without_size.stats().capacity_tokens, without_size.stats().capacity_source) == (500_000, "default")


@pytest.mark.parametrize("kv_blocks", [200, 600, 20_000])
@pytest.mark.parametrize("block_size", [16, 64])
def test_full_attention_is_not_taken_for_checkpoints(kv_blocks: int, block_size: int) -> None:
    cache = simulated_cache(as_profile("full-attention"), kv_blocks=kv_blocks, block_size=block_size)
    planner = ContextPlanner()
    for _ in range(10):
        serve_requests(cache, planner, 30)
        assert planner.profile.name == "full-attention"


def test_a_mistake_is_corrected() -> None:
    planner = ContextPlanner()
    serve_requests(simulated_cache(as_profile("vllm-checkpoints(128)"), kv_blocks=20_000, window=512), planner, 300)
    assert planner.profile.checkpoints is not None
    full = simulated_cache(as_profile("full-attention"), kv_blocks=20_000)
    for topic in range(40):
        blocks = [ContextBlock(f"other {topic} {n}", tokens=200) for n in range(3)]
        for repeat in range(2):
            plan = planner.plan(blocks)
            tokens = [*range(topic * 700, topic * 700 + 700), 10**6 + 2 * topic + repeat]
            use = serve(full, MarkedPrompt(tokens))
            ends = [(100 + 200 * place) / len(tokens) for place in (1, 2, 3)]
            planner.commit(plan, report=EngineReport(use.read, len(tokens), block_ends=ends))
    assert (planner.profile.name, planner.stats().profile_source) == ("full-attention", "default")
