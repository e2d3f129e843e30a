"""A planner finds what explains its engine's reports: a surprise is no small cache if something else explains it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import as_profile, llama_cpp
from warmprefix.residency.capacity import DEFAULT_CAPACITY
from warmprefix_tools.caches import MarkedPrompt, SimulatedCache, UnitTokens, serve, simulated_cache

PREAMBLE_TOKENS = 100


def requests(count: int) -> list[list[ContextBlock]]:
    """Return requests whose contexts overlap."""
    chance = random.Random(4)
    topics = [[ContextBlock(f"block {topic} {n}", tokens=200) for n in range(10)] for topic in range(6)]
    return [chance.sample(topics[chance.randrange(6)], 6) for _ in range(count)]


def serve_requests(
    caches: SimulatedCache | Sequence[SimulatedCache] | None,
    planner: ContextPlanner,
    count: int,
    capacity: int | None = None,
    *,
    separately: bool = False,
) -> int:
    """Plan, serve, commit and report requests; return the tokens that the engine computed.

    Of several caches a random one serves each request. None caches nothing. `capacity` is what the metrics show.
    """
    chance, units, computed = random.Random(5), UnitTokens(), 0
    for number, blocks in enumerate(requests(count)):
        plan = planner.plan(blocks)
        parts = [("preamble", PREAMBLE_TOKENS), *[(each.block.text, 200) for each in plan.blocks], (number, 50)]
        tokens = units.encode(parts)
        cache = chance.choice(caches) if isinstance(caches, Sequence) else caches
        read = 0 if cache is None else serve(cache, MarkedPrompt(tokens)).read
        computed += len(tokens) - read
        ends = [(PREAMBLE_TOKENS + 200 * place) / len(tokens) for place in range(1, 7)]
        report = EngineReport(read, len(tokens), block_ends=ends, capacity_tokens=capacity)
        if separately:
            planner.commit(plan)
            planner.report(plan, report)
        else:
            planner.commit(plan, report=report)
    return computed


def model_of(planner: ContextPlanner) -> tuple[str, str, int | None, str]:
    stats = planner.stats()
    return stats.engine_model, stats.profile, stats.capacity_tokens, stats.capacity_source


def sliding_windows() -> SimulatedCache:
    return simulated_cache(as_profile("vllm-checkpoints(128)"), kv_blocks=20_000, window=512)


def full_attention(kv_blocks: int = 20_000) -> SimulatedCache:
    return simulated_cache(as_profile("full-attention"), kv_blocks=kv_blocks)


STATED = 300_000
"""The capacity in the metrics."""


def test_sliding_windows_save_as_much_by_reports_as_by_name() -> None:
    recognised, named = ContextPlanner(), ContextPlanner(profile="vllm-checkpoints(128)")
    computed = [serve_requests(sliding_windows(), planner, 200, STATED) for planner in (recognised, named)]
    assert model_of(recognised) == ("checkpoints", "vllm-checkpoints(128)", STATED, "metrics")
    assert computed[0] <= 1.02 * computed[1]
    assert computed[1] < serve_requests(sliding_windows(), ContextPlanner(policy="relevance"), 200)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("capacity", [STATED, None])
def test_misses_of_several_replicas_shrink_no_capacity(replicas: int, capacity: int | None) -> None:
    planner, given = ContextPlanner(), ContextPlanner(capacity_tokens=STATED)
    computed = [
        serve_requests([full_attention() for _ in range(replicas)], each, 200, capacity) for each in (planner, given)
    ]
    assert model_of(planner)[:3] == ("replicas", "full-attention", capacity or DEFAULT_CAPACITY)
    assert computed[0] == computed[1]


@pytest.mark.parametrize("slots", [1, 4])
def test_forks_of_kept_prompts_shrink_no_capacity(slots: int) -> None:
    planner = ContextPlanner()
    serve_requests(simulated_cache(llama_cpp(slots)), planner, 200)
    assert model_of(planner) == ("leaves", "llama.cpp(4)", DEFAULT_CAPACITY, "default")
    confidence = planner.stats().residency_confidence
    assert confidence is not None
    assert confidence > 0.93  # the explanation knows nothing of the copies that the server keeps of idle slots' prompts


def test_a_small_cache_is_one() -> None:
    for capacity in (None, 60_000):
        planner = ContextPlanner()
        serve_requests(full_attention(600), planner, 300, capacity)
        assert model_of(planner)[0] == "small cache"
        assert planner.stats().capacity_tokens == pytest.approx(9_600, rel=0.25)


def test_a_cache_that_reports_nothing_is_off() -> None:
    planner = ContextPlanner()
    serve_requests(None, planner, 200, STATED)
    assert model_of(planner) == ("off", "full-attention", STATED, "metrics")
    assert planner.stats().disabled_scopes == 1


def test_a_large_prefix_tree_is_one() -> None:
    planner = ContextPlanner()
    serve_requests(full_attention(), planner, 200, STATED)
    assert model_of(planner) == ("prefix tree", "full-attention", STATED, "metrics")


@pytest.mark.parametrize(
    "name", ["full-attention", "vllm-checkpoints(128)", "llama.cpp(4)", "small", "replicas", "off"]
)
def test_report_after_the_commit_learns_the_same(name: str) -> None:
    learned = []
    for separately in (False, True):
        caches: SimulatedCache | Sequence[SimulatedCache] | None
        if name == "off":
            caches = None
        elif name == "replicas":
            caches = [full_attention() for _ in range(3)]
        else:
            caches = full_attention(600) if name == "small" else simulated_cache(as_profile(name), kv_blocks=20_000)
        planner = ContextPlanner()
        computed = serve_requests(caches, planner, 150, STATED, separately=separately)
        learned.append((computed, *model_of(planner)))
    at_once, later = learned
    assert (at_once[1:3], at_once[4]) == (later[1:3], later[4])
    assert [later[0], later[3]] == pytest.approx([at_once[0], at_once[3]], rel=0.01)


@pytest.mark.parametrize(("window", "block"), [(512, 128), (None, 256)])
def test_checkpoints_are_recognised(window: int | None, block: int) -> None:
    cache = simulated_cache(as_profile(f"vllm-checkpoints({block})"), kv_blocks=20_000, window=window)
    planner = ContextPlanner()
    serve_requests(cache, planner, 300)
    assert planner.stats().profile_source == "reports"
    checkpoints = planner.profile.checkpoints
    assert checkpoints is not None
    assert checkpoints.block % block == 0


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
    assert planner.stats().engine_model == "prefix tree"


def test_checkpoints_at_a_multiple_of_the_real_block_are_noticed() -> None:
    planner, served = ContextPlanner(), Counter[tuple[str, ...]]()

    def ask(number: int, shared: int) -> None:
        topic = number % 4
        texts = [f"{shared} {topic} {place}" for place in range(shared)] + [f"{number} {place}" for place in range(2)]
        plan = planner.plan([ContextBlock(text, tokens=600) for text in texts])
        order = [each.block.text for each in plan.blocks]
        paths = [tuple(order[:length]) for length in range(1, len(order) + 1)]
        held = max([len(path) for path in paths if served[path] > 1], default=0)
        served.update(paths)
        ends = [(place + 1) / len(order) for place in range(len(order))]
        planner.commit(plan, report=EngineReport(600 * held // 528 * 528, 600 * len(order), block_ends=ends))

    for number in range(60):
        ask(number, shared=2)
    assert planner.profile.name == "vllm-checkpoints(1056)"
    for number in range(60, 90):
        ask(number, shared=1)
    assert planner.profile.name != "vllm-checkpoints(1056)"
    for number in range(90, 200):
        ask(number, shared=1 + number // 4 % 3)
    assert planner.profile.name == "vllm-checkpoints(528)"
