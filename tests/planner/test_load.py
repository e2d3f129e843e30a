"""Many requests and threads: no state grows, and no requests are mixed up. Speed is measured in benchmarks/."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.ordering import POLICIES


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_identical_requests_add_nothing(policy: str) -> None:
    planner = ContextPlanner(policy=policy)
    request = [ContextBlock(f"text {i}") for i in range(15)]
    for _ in range(10_000 if policy == "coaccess" else 1_100):
        with planner.planning(request):
            pass
    assert planner.stats().tree_nodes == 1
    assert planner.stats().policy_errors == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_block_shared_by_thousands_of_requests(policy: str) -> None:
    planner = ContextPlanner(policy=policy, capacity_tokens=None)
    shared = ContextBlock("shared by all")
    for i in range(5_000 if policy in ("coaccess", "context-index") else 1_100):
        with planner.planning([ContextBlock(f"text {i}"), shared]) as plan:
            assert len(plan.blocks) == 2
    assert planner.stats().policy_errors == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_disjoint_contexts(policy: str) -> None:
    planner = ContextPlanner(policy=policy, capacity_tokens=None)
    for i in range(1_100):
        with planner.planning([ContextBlock(f"text {i}-{j}") for j in range(3)]) as plan:
            assert policy == "sorted" or not plan.reordered
    assert planner.stats().tree_nodes == 1_100
    assert planner.stats().policy_errors == 0


def request_of(thread: int, i: int) -> list[ContextBlock]:
    rng = random.Random(thread * 1_000_003 + i)
    return [ContextBlock(f"text {rng.randrange(200)}", id=rng.randrange(50), tokens=20) for _ in range(5)]


@pytest.mark.slow
def test_threads_get_their_own_requests_back() -> None:
    planner = ContextPlanner(capacity_tokens=5_000)
    failures: list[BaseException] = []
    threads, requests = 4, 5_000

    def work(thread: int) -> None:
        try:
            for i in range(requests):
                request = request_of(thread, i)
                chat = f"chat-{thread}-{i // 3}"
                with planner.planning(request, conversation=chat, placement="tail", tenant=str(i % 3)) as plan:
                    assert {planned.block for planned in plan.blocks} == set(request)
                    assert (plan.conversation, plan.scope.tenant, plan.turn) == (chat, str(i % 3), None or plan.turn)
                    labels = [planned.label for planned in plan.blocks if planned.label]
                    assert len(set(labels)) == len(labels)
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stats = planner.stats()
    assert failures == []
    assert (stats.plans, stats.commits, stats.open_plans) == (threads * requests, threads * requests, 0)
    assert (stats.policy_errors, stats.store_errors, stats.conflicts) == (0, 0, 0)


async def test_tasks_get_their_own_requests_back() -> None:
    planner = ContextPlanner(annotate="both")  # references need labels, which on so short blocks may not pay

    async def chat(number: int) -> None:
        sent: set[ContextBlock] = set()
        for turn in range(1, 6):
            request = request_of(number, turn)
            async with planner.planning(request, conversation=str(number), placement="tail") as plan:
                await asyncio.sleep(0)
                assert plan.turn == turn
                for planned in plan.blocks:
                    assert (planned.reference is not None) == (planned.block in sent)
            sent.update(request)

    await asyncio.gather(*(chat(number) for number in range(200)))
    assert planner.stats().conflicts == 0
