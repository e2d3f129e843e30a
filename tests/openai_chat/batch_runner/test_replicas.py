"""A batch on several replicas, over HTTP: one shard each, and what happens when replicas are lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from warmprefix import BatchPlan, BatchRequest
from warmprefix.errors import BatchError
from warmprefix_openai import BatchResult, BatchRunner, Retries
from warmprefix_openai.shards import shards_of
from warmprefix_tools.emulator import EmulatorConfig

Plan = Callable[..., BatchPlan]
MakeRequests = Callable[..., list[BatchRequest]]
MODEL = EmulatorConfig().model
ONCE = Retries(count=1, longest=0.0)


@pytest.fixture
async def clients_of() -> AsyncIterator[Callable[..., list[AsyncOpenAI]]]:
    """Makes a client for each engine."""
    async with AsyncExitStack() as stack:

        def clients(*engines: Any) -> list[AsyncOpenAI]:
            opened = [AsyncOpenAI(base_url=engine.base_url, api_key="none") for engine in engines]
            for client in opened:
                stack.push_async_callback(client.close)
            return opened

        yield clients


async def collected(run: Any) -> dict[str, BatchResult]:
    return {result.id: result async for result in run}


async def into(results: dict[str, BatchResult], run: Any) -> None:
    """Keep what comes before an error."""
    async for result in run:
        results[result.id] = result


def asked(*engines: Any) -> Counter[str]:
    return sum([Counter(engine.bodies.keys()) for engine in engines], Counter())


async def test_each_replica_gets_its_shard(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any
) -> None:
    engines = [start_engine() for _ in range(3)]
    batch = plan(requests(6, 5))
    results = await collected(BatchRunner(batch).run(clients_of(*engines), MODEL, concurrency=2, max_tokens=4))
    assert list(results) == list(batch.positions)
    assert not [result.error for result in results.values() if result.error]
    for engine, shard in zip(engines, shards_of(batch, 3), strict=True):
        assert set(engine.bodies) == set(shard.positions)
        assert engine.most_at_once <= 2
        cached = sum(results[planned.id].cached_tokens or 0 for planned in shard)
        assert cached >= 0.8 * shard.saved_tokens > 0
    assert sorted(batch.owner.committed) == sorted(planned.plan_id for planned in batch)


async def test_the_rest_of_a_lost_replica_moves_in_whole_groups(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [start_engine() for _ in range(4)]
    batch = plan(requests(24, 5))
    lost = shards_of(batch, 4)[1]
    runner = BatchRunner(batch)
    results: dict[str, BatchResult] = {}
    run = runner.run(clients_of(*engines), MODEL, concurrency=2, retries=ONCE, ordered=False, max_tokens=4)
    async for result in run:
        results[result.id] = result
        if len(engines[1].bodies) >= 10 and not engines[1].is_dead:
            await asyncio.to_thread(engines[1].die)
    assert sorted(results) == sorted(batch.positions)
    assert not [result.error for result in results.values() if result.error]
    (warning,) = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert warning.startswith("Replica 2 of 4 is lost, and its requests go to the others: APIConnectionError")
    again = asked(*engines)
    assert again.total() - len(again) <= 2  # only what was in flight was asked twice
    owner: Any = batch.owner
    assert owner.commits == len(batch)
    assert owner.abandoned == []
    # Requests that share most of their context stay together.
    moved = set(lost.positions) - {id for id in engines[1].bodies if id in results}
    places = [{id for id in moved if id in engine.bodies} for engine in engines]
    split = sum(
        len({i for i, place in enumerate(places) for id in place if id.startswith(f"g{g}m")}) > 1 for g in range(24)
    )
    assert split <= 2


async def test_a_replica_without_a_server_is_lost_at_once(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any, tmp_path: Path
) -> None:
    good, gone = start_engine(), start_engine()
    gone.die()
    batch = plan(requests(4, 4))
    journal = tmp_path / "a.journal"
    run = BatchRunner(batch).run(clients_of(gone, good), MODEL, retries=ONCE, journal=journal, max_tokens=4)
    results = await collected(run)
    assert list(results) == list(batch.positions)
    assert not [result.error for result in results.values() if result.error]
    run = BatchRunner(batch).run(clients_of(gone), MODEL, retries=ONCE, journal=journal, max_tokens=4)
    assert await collected(run) == results  # from the journal


async def test_no_replica_is_left(plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any) -> None:
    engines = [start_engine(), start_engine()]
    for engine in engines:
        engine.die()
    batch = plan(requests(3, 4))
    with pytest.raises(BatchError, match="the run can't begin: APIConnectionError"):
        await collected(BatchRunner(batch).run(clients_of(*engines), MODEL, retries=ONCE))
    owner: Any = batch.owner
    assert not owner.committed
    assert len(owner.abandoned) == len(set(owner.abandoned)) > 0


async def test_all_replicas_are_lost_midway(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any, fault: Any
) -> None:
    engines = [start_engine(), start_engine()]
    batch = plan(requests(6, 8))
    for engine in engines:
        allowed = {planned.id for planned in shards_of(batch, 2)[engines.index(engine)].requests[:3]}
        engine.fault = lambda id, n, allowed=allowed: None if id in allowed else fault("status", status=401)
    results: dict[str, BatchResult] = {}
    run = BatchRunner(batch).run(clients_of(*engines), MODEL, ordered=False, concurrency=1)
    with pytest.raises(
        BatchError, match="the run ends: all 2 replicas are lost, the last one with AuthenticationError"
    ):
        await into(results, run)
    assert sum(result.error is None for result in results.values()) == 6
    owner: Any = batch.owner
    assert len(owner.committed) == 6
    assert not set(owner.committed) & set(owner.abandoned)


async def test_a_request_that_takes_replicas_down_is_given_up(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any, fault: Any
) -> None:
    engines = [start_engine() for _ in range(5)]
    batch = plan(requests(5, 6))
    poison = batch.requests[17].id
    for engine in engines:
        engine.fault = lambda id, n: fault("hang") if id == poison else None
    runner = BatchRunner(batch)

    async def kill() -> None:
        for _ in range(3):
            while not (hit := [engine for engine in engines if poison in engine.bodies and not engine.is_dead]):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(hit[0].die)

    killing = asyncio.create_task(kill())
    run = runner.run(clients_of(*engines), MODEL, concurrency=2, retries=ONCE, max_tokens=4)
    results = await collected(run)
    await killing
    assert {id: result.error for id, result in results.items() if result.error} == {
        poison: "it was in flight at 3 replicas that were lost"
    }
    owner: Any = batch.owner
    assert owner.abandoned == [batch[poison].plan_id]
    assert len(owner.committed) == len(batch) - 1


async def test_leaving_early_ends_all_replicas(
    plan: Plan, requests: MakeRequests, start_engine: Any, clients_of: Any
) -> None:
    engines = [start_engine(), start_engine()]
    batch = plan(requests(6, 8))
    run = BatchRunner(batch).run(clients_of(*engines), MODEL, concurrency=3, ordered=False)
    async with aclosing(run) as results:
        async for _ in results:
            break
    owner: Any = batch.owner
    started = asked(*engines)
    assert len(started) < len(batch)
    assert not set(owner.committed) & set(owner.abandoned)
    assert {batch[id].plan_id for id in started} <= {*owner.committed, *owner.abandoned}


async def test_no_client_is_refused(plan: Plan, requests: MakeRequests) -> None:
    with pytest.raises(ValueError, match="at least one client"):
        BatchRunner(plan(requests(1, 1))).run([], MODEL)
