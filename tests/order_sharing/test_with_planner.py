"""Planners that learn from each other."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from redis_servers import Server, wait_until
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_redis.order_sharing import RedisOrderSharing


@pytest.fixture
def planners(own_server: Server) -> Iterator[list[ContextPlanner]]:
    made = [ContextPlanner(sharing=RedisOrderSharing(own_server.url)) for _ in range(3)]
    yield made
    for planner in made:
        planner.close()


BLOCKS = [ContextBlock(f"passage {number}", tokens=50 + number) for number in range(40)]


def requests(count: int) -> Iterator[list[ContextBlock]]:
    rng = random.Random(0)
    for _ in range(count):
        topic = rng.randrange(4)
        yield rng.sample(BLOCKS[10 * topic : 10 * topic + 10], 5)


def serve(planner: ContextPlanner, blocks: list[ContextBlock], tenant: str | None = None) -> ContextPlan:
    with planner.planning(blocks, tenant=tenant) as plan:
        return plan


def learned(planner: ContextPlanner, count: int) -> None:
    wait_until(lambda: planner.stats().shared_orders == count, f"{count} orders of others are learned")


def test_sharing_workers_plan_like_one_that_sees_everything(planners: list[ContextPlanner]) -> None:
    workers, alone = planners[:2], ContextPlanner()
    for number, blocks in enumerate(requests(60)):
        worker = workers[number % 2]
        if number:
            learned(worker, (number + 1) // 2)
        else:
            worker.abandon(worker.plan([]))
            workers[1].abandon(workers[1].plan([]))
        ours, theirs = serve(worker, blocks), serve(alone, blocks)
        assert (ours.order, ours.resident_tokens) == (theirs.order, theirs.resident_tokens)


def test_late_planner_starts_warm(planners: list[ContextPlanner]) -> None:
    first, late, alone = planners[0], planners[1], ContextPlanner()
    for blocks in requests(60):
        serve(first, blocks)
        serve(alone, blocks)
    wait_until(lambda: first.stats().published_orders == 60, "all are sent")
    late.abandon(late.plan([]))
    learned(late, 60)
    for blocks in requests(10):
        ours, theirs = serve(late, blocks), serve(alone, blocks)
        assert (ours.order, ours.resident_tokens) == (theirs.order, theirs.resident_tokens)
        assert ours.resident_tokens > 0


def test_tenants_learn_nothing_from_each_other(planners: list[ContextPlanner]) -> None:
    acme, other, witness = planners
    for planner, tenant in ((acme, "acme"), (other, "other"), (witness, "acme")):
        planner.abandon(planner.plan([], tenant=tenant))
    for blocks in requests(20):
        serve(acme, blocks, "acme")
    learned(witness, 20)
    serve(other, BLOCKS[20:25], "other")
    wait_until(lambda: other.stats().published_orders == 1, "a whole round of its thread")
    assert other.stats().shared_orders == 0
    blocks = next(requests(1))
    plan = serve(other, blocks, "other")
    assert plan.resident_tokens == 0
    assert not plan.reordered


def test_reset_keeps_shared_orders(planners: list[ContextPlanner]) -> None:
    first, second = planners[:2]
    for blocks in requests(20):
        serve(first, blocks)
    second.abandon(second.plan([]))
    learned(second, 20)
    second.reset()
    assert second.stats().shared_orders == 0
    second.abandon(second.plan([]))
    learned(second, 20)
