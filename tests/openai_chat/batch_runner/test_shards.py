"""Parts of a batch plan: every request once, equal costs, little computed twice, and a true prediction."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import Choice, ContextBlock, ContextPlanner
from warmprefix.batch import BatchPlan, BatchRequest
from warmprefix.prefix.tree import PrefixTree
from warmprefix_openai import BatchRunner
from warmprefix_openai.shards import shards_of


def topics(requests: int, seed: int, scopes: int = 1) -> list[BatchRequest]:
    """Return requests with blocks of 20 topics."""
    rng = random.Random(seed)
    blocks = [ContextBlock(f"Text {n}.", id=f"b{n}", tokens=rng.randrange(50, 200)) for n in range(200)]
    made: list[BatchRequest] = []
    for number in range(requests):
        topic = rng.randrange(20) * 10
        own = rng.sample(blocks[topic : topic + 10], rng.randrange(1, 6))
        made.append(BatchRequest(number, own, tenant=None if scopes == 1 else f"t{number % scopes}"))
    return made


def computed(plan: BatchPlan) -> int:
    return plan.total_tokens - plan.saved_tokens


def found_tokens(plan: BatchPlan) -> int:
    """Return the tokens that a cache finds if the plan runs one request after the other."""
    caches: dict[Any, PrefixTree[bytes]] = {}
    found = 0
    for planned in plan:
        cache = caches.setdefault(planned.wording.scope, PrefixTree(plan.capacity_tokens))
        blocks = [block.block for block in planned.blocks]
        found += cache.insert([block.fingerprint for block in blocks], [block.tokens for block in blocks]).tokens
    return found


@given(
    st.integers(0, 60), st.integers(1, 12), st.integers(0, 3), st.sampled_from([None, 2_000]), st.sampled_from([1, 3])
)
def test_each_request_is_in_one_part(
    requests: int, replicas: int, seed: int, capacity: int | None, scopes: int
) -> None:
    plan = ContextPlanner().plan_batch(topics(requests, seed, scopes), capacity_tokens=capacity)
    shards = shards_of(plan, replicas)
    assert len(shards) == replicas
    assert [planned.id for shard in shards for planned in shard] == [planned.id for planned in plan]
    assert [planned.order for shard in shards for planned in shard] == [planned.order for planned in plan]
    for shard in shards:
        assert sorted(shard.positions) == sorted(planned.id for planned in shard)
        assert all(shard[planned.id] is planned for planned in shard)
        assert {planned.warmed_by for planned in shard} <= {None, *shard.positions}
        if scopes == 1 or capacity is None:
            assert found_tokens(shard) == shard.saved_tokens


@pytest.mark.parametrize("replicas", [2, 4, 8, 16])
def test_parts_cost_the_same_and_compute_little_twice(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_openai.shards.REQUEST_TOKENS", 0)
    plan = ContextPlanner().plan_batch(topics(4_000, 7))
    shards = shards_of(plan, replicas)
    costs = list(map(computed, shards))
    assert sum(costs) <= computed(plan) * (1 + replicas / 100)
    mean = sum(costs) / replicas
    assert max(abs(cost - mean) for cost in costs) <= 0.1 * mean + 1_000  # one request may be longer


def test_what_a_request_costs_in_addition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [ContextBlock("Text.", id="b", tokens=10_000)]
    requests = [BatchRequest(f"same-{n}", same) for n in range(90)] + [
        BatchRequest(f"own-{n}", [ContextBlock(f"Own {n}.", tokens=1_000)]) for n in range(10)
    ]
    plan = ContextPlanner().plan_batch(requests)
    monkeypatch.setattr("warmprefix_openai.shards.REQUEST_TOKENS", 0)
    assert {len(shard) for shard in shards_of(plan, 2)} != {50}
    monkeypatch.setattr("warmprefix_openai.shards.REQUEST_TOKENS", 100_000)
    assert all(45 <= len(shard) <= 55 for shard in shards_of(plan, 2))


def test_a_large_group_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_openai.shards.REQUEST_TOKENS", 1_000_000)
    same = [ContextBlock("Text.", id="b", tokens=10_000)]
    plan = ContextPlanner().plan_batch([BatchRequest(n, same) for n in range(100)])
    shards = shards_of(plan, 4)
    assert [len(shard) for shard in shards] == [25] * 4
    assert sum(map(computed, shards)) == 4 * computed(plan) == 40_000


def test_equal_contexts_are_shared_out() -> None:
    same = [ContextBlock("Text.", id="b", tokens=1_000)]
    plan = ContextPlanner().plan_batch([BatchRequest(n, same) for n in range(400)])
    assert all(90 <= len(shard) <= 110 for shard in shards_of(plan, 4))


def test_plans_of_parts_can_be_committed() -> None:
    planner = ContextPlanner()
    plan = planner.plan_batch(topics(20, 1))
    for shard in shards_of(plan, 3):
        for planned in shard:
            assert planner.commit(planned.plan)
    assert not planner.commit(plan.requests[0].plan)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0,), ValueError),
        ((2.0,), TypeError),
        ((True,), TypeError),
    ],
)
def test_other_numbers_of_replicas_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="replicas"):
        shards_of(ContextPlanner().plan_batch(topics(3, 0)), *arguments)


def test_chosen_candidates_are_what_the_parts_and_files_hold(tmp_path: Path) -> None:
    requests = [
        BatchRequest(request.id, [replace(block, score=9 - i / 10) for i, block in enumerate(request.blocks)])
        for request in topics(200, 1)
    ]
    plan = ContextPlanner().plan_batch(requests, choose=Choice(2, keep=1, within=2))
    assert any(planned.entered for planned in plan)
    fed = {planned.id: [block.block.text for block in planned.blocks] for planned in plan}
    assert all(len(own) == min(2, len(plan[id].request.blocks)) for id, own in fed.items())
    shards = shards_of(plan, 3)
    assert {planned.id: [block.block.text for block in planned.blocks] for part in shards for planned in part} == fed
    assert sum(part.total_tokens for part in shards) == plan.total_tokens
    (file,) = BatchRunner(plan).write_jsonl(tmp_path / "night.jsonl", "a-model")
    for line in map(json.loads, file.read_text().splitlines()):
        content = line["body"]["messages"][-1]["content"]
        others = {block.text for block in plan[line["custom_id"]].request.blocks} - {*fed[line["custom_id"]]}
        assert all(text in content for text in fed[line["custom_id"]])
        assert not any(f"{text}\n" in f"{content}\n" for text in others)
