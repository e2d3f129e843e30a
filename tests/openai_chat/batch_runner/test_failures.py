"""Runs against an engine that fails, over HTTP."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import aclosing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from warmprefix import BatchPlan, BatchRequest
from warmprefix.errors import BatchError
from warmprefix_openai import BatchResult, BatchRunner, Retries
from warmprefix_tools.emulator import EmulatorConfig

Plan = Callable[..., BatchPlan]
MakeRequests = Callable[..., list[BatchRequest]]
MODEL = EmulatorConfig().model
AT_ONCE = Retries(count=3, longest=0.0)


async def collected(run: Any) -> dict[str, BatchResult]:
    return {result.id: result async for result in run}


async def into(results: list[BatchResult], run: Any) -> None:
    """Keep what comes before an error."""
    async for result in run:
        results.append(result)  # noqa: PERF401


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"kind": "status", "status": 500}, "InternalServerError: "),
        ({"kind": "status", "status": 503}, "InternalServerError: "),
        ({"kind": "status", "status": 429}, "RateLimitError: "),
        ({"kind": "status", "status": 408}, "APIStatusError: "),
        ({"kind": "break", "chunks": 0}, "BrokenStreamError: the stream broke: "),
        ({"kind": "break", "chunks": 3}, "BrokenStreamError: the stream broke: "),
        ({"kind": "cut", "chunks": 0}, "BrokenStreamError: the stream ended before the answer did"),
        ({"kind": "cut", "chunks": 3}, "BrokenStreamError: the stream ended before the answer did"),
        ({"kind": "garble"}, "BrokenStreamError: the stream broke: JSONDecodeError: "),
        ({"kind": "report", "status": 500}, "EngineFailedError: engine died"),
        ({"kind": "body", "body": "data: 5\n\n"}, "BrokenStreamError: the stream ended before the answer did"),
        ({"kind": "body", "body": 'data: {"error": {"message": "no", "code": [1]}}\n\n'}, "EngineFailedError: no"),
        ({"kind": "body", "body": ""}, "BrokenStreamError: the stream ended before the answer did"),
        ({"kind": "hang"}, ""),
    ],
)
async def test_failures_that_may_pass_are_retried(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, trouble: dict[str, Any], message: str
) -> None:
    troubled = {"g0m0": 2, "g1m1": 99}
    engine.fault = lambda id, n: fault(**trouble) if n <= troubled.get(id, 0) else None
    batch = plan(requests(2, 3))
    timeout = 2.0 if trouble["kind"] == "hang" else None
    results = await collected(BatchRunner(batch).run(client, MODEL, retries=AT_ONCE, timeout=timeout, max_tokens=8))
    assert list(results) == [request.id for request in requests(2, 3)]
    assert {id: result.attempts for id, result in results.items() if result.attempts > 1} == {"g0m0": 3, "g1m1": 4}
    failed = results["g1m1"]
    assert failed.error is not None
    assert failed.error.startswith(message)
    assert (failed.completion, failed.text, failed.ttft, failed.cached_tokens) == (None, None, None, None)
    assert all(result.error is None and result.text for id, result in results.items() if id != "g1m1")
    assert batch.owner.abandoned == [batch["g1m1"].plan_id]
    assert set(batch.owner.committed) == {batch[id].plan_id for id in results if id != "g1m1"}


@pytest.mark.parametrize(("kind", "status"), [("status", 400), ("status", 413), ("status", 422), ("report", 400)])
async def test_a_wrong_request_is_not_retried(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, kind: str, status: int
) -> None:
    engine.fault = lambda id, n: fault(kind, status) if id == "g0m1" else None
    results = await collected(BatchRunner(plan(requests(1, 3))).run(client, MODEL, retries=AT_ONCE, max_tokens=4))
    assert [result.error is None for result in results.values()] == [True, False, True]
    assert engine.attempts["g0m1"] == results["g0m1"].attempts == 1


async def test_a_text_that_no_request_can_carry_fails_alone(plan: Plan, client: Any) -> None:
    asked = [BatchRequest(1, ["torn \ud83d"], "Why <1>?"), BatchRequest(2, ["whole"], "Why <2>?")]
    torn, whole = (await collected(BatchRunner(plan(asked)).run(client, MODEL, retries=AT_ONCE, max_tokens=4))).values()
    assert torn.error is not None  # some versions of the client send it, escaped
    assert torn.error.startswith(("UnicodeEncodeError: ", "BadRequestError: "))
    assert torn.attempts == 1
    assert whole.text


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_all_requests_may_fail(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, concurrency: int
) -> None:
    engine.fault = lambda id, n: fault("status", 500)
    batch = plan(requests(3, 5))
    results = await collected(BatchRunner(batch).run(client, MODEL, concurrency=concurrency, retries=0))
    assert list(results) == [request.id for request in requests(3, 5)]
    assert all(result.error for result in results.values())
    assert set(engine.attempts.values()) == {1}
    assert batch.owner.commits == 0
    assert len(batch.owner.abandoned) == 15


@pytest.mark.parametrize("failing", [1, 2, 5])
async def test_when_warmers_fail_the_next_one_warms(
    plan: Plan, requests: MakeRequests, start_engine: Any, fault: Any, failing: int
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=10, decode_rate=1000))
    batch = plan(requests(1, 8))
    executed = [planned.id for planned in batch]
    engine.fault = lambda id, n: fault("status", 500) if id in executed[:failing] else None
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        await collected(BatchRunner(batch).run(client, MODEL, concurrency=8, retries=0, max_tokens=2))
    for one, other in itertools.pairwise(executed[: failing + 1]):
        assert engine.when("over", one) < engine.when("came", other)
    stand_in = executed[failing]
    for id in executed[failing + 1 :]:
        assert engine.when("token", stand_in) < engine.when("came", id)
    assert engine.usage[executed[-1]]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_warmer_that_breaks_off_after_its_first_token_has_warmed(
    plan: Plan, requests: MakeRequests, start_engine: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmprefix_openai.retry._FIRST_SECONDS", 5.0)
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=5, decode_rate=1000))
    batch = plan(requests(1, 4))
    first = batch.requests[0].id
    engine.fault = lambda id, n: fault("break", chunks=3) if id == first else None
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        results = await collected(BatchRunner(batch).run(client, MODEL, retries=Retries(1), max_tokens=4))
    assert results[first].error is not None
    assert all(engine.when("over", planned.id) < engine.when("came", first) for planned in batch.requests[1:])


@pytest.mark.parametrize(
    ("status", "message"), [(401, "AuthenticationError"), (403, "PermissionDeniedError"), (404, "NotFoundError")]
)
async def test_a_failure_that_concerns_all_ends_the_run_at_once(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, status: int, message: str
) -> None:
    engine.fault = lambda id, n: fault("status", status)
    batch = plan(requests(20, 1))
    with pytest.raises(BatchError, match=f"the run can't begin: {message}"):
        await collected(BatchRunner(batch).run(client, MODEL, concurrency=4, retries=AT_ONCE))
    assert set(engine.attempts.values()) == {1}
    assert len(engine.attempts) <= 8
    assert batch.owner.commits == 0


async def test_an_unknown_model_ends_the_run(plan: Plan, requests: MakeRequests, client: Any) -> None:
    with pytest.raises(BatchError, match=r"the run can't begin: NotFoundError: .*The model `gone` does not exist"):
        await collected(BatchRunner(plan(requests(2, 2))).run(client, "gone"))


async def test_a_missing_server_ends_the_run(plan: Plan, requests: MakeRequests) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        with pytest.raises(BatchError, match="the run can't begin: APIConnectionError: Connection error"):
            await collected(BatchRunner(plan(requests(2, 2))).run(client, MODEL, retries=AT_ONCE))


async def test_ten_failures_in_a_row_that_concern_all_end_a_run_that_had_answers(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any
) -> None:
    batch = plan(requests(40, 1))
    executed = [planned.id for planned in batch]
    bad = {*executed[3:12], *executed[20:]}  # nine, and then all that come
    engine.fault = lambda id, n: fault("status", 403) if id in bad else None
    results: list[BatchResult] = []
    with pytest.raises(BatchError, match="the run ends: 10 requests in a row failed, the last with PermissionDenied"):
        await into(results, BatchRunner(batch).run(client, MODEL, concurrency=1, max_tokens=2))
    # All that was finished is handed out before.
    assert [result.id for result in results] == [id for id in batch.positions if id in executed[:29]]
    assert {result.id for result in results if result.error is not None} == bad & set(executed[:29])
    assert len(engine.attempts) == 30


async def test_a_used_up_quota_is_not_retried(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any
) -> None:
    engine.fault = lambda id, n: fault("status", 429, code="insufficient_quota")
    with pytest.raises(BatchError, match="the run can't begin: RateLimitError: "):
        await collected(BatchRunner(plan(requests(2, 1))).run(client, MODEL, retries=AT_ONCE))
    assert set(engine.attempts.values()) == {1}


@pytest.mark.parametrize(
    ("header", "expected"),
    [("7", (7, 7.5)), ("0.25", (0.25, 0.75)), ("-3", (0, 0.5)), ("soon", (0, 2)), (None, (0, 2)), ("date", (28, 31))],
)
async def test_the_servers_retry_after_is_followed(
    plan: Plan,
    requests: MakeRequests,
    engine: Any,
    client: Any,
    fault: Any,
    header: str | None,
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if header == "date":
        header = formatdate(time.time() + 30, usegmt=True)
    headers = {} if header is None else {"retry-after": header}
    engine.fault = lambda id, n: fault("status", 429, headers) if n <= 3 else None
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("stamina._core._smart_sleep", sleep)
    results = await collected(BatchRunner(plan(requests(1, 1))).run(client, MODEL, retries=Retries(3), max_tokens=2))
    assert results["g0m0"].text
    assert len(waits) == 3
    assert all(expected[0] <= wait <= expected[1] for wait in waits)


async def test_a_whole_attempt_is_timed_however_busily_it_streams(
    plan: Plan, requests: MakeRequests, start_engine: Any
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=0, decode_rate=20))
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        run = BatchRunner(plan(requests(1, 1))).run(client, MODEL, timeout=0.3, retries=1, max_tokens=40)
        (result,) = [result async for result in run]
    assert result.error == "TimeoutError: no whole answer in 0.3 s"
    assert result.attempts == engine.attempts["g0m0"] == 2


# -- leaving early -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "raise"])
@pytest.mark.parametrize("after", [0, 1, 7, 17])
async def test_leaving_early_ends_the_requests_in_flight(
    plan: Plan, requests: MakeRequests, start_engine: Any, way: str, after: int
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=1, decode_rate=400))
    batch = plan(requests(3, 6))
    seen: list[BatchResult] = []

    async def consume() -> None:
        run = BatchRunner(batch).run(client, MODEL, concurrency=4, max_tokens=8)
        if after == 0 and way != "cancel":
            await run.aclose()
            return
        async for result in run:
            seen.append(result)
            if len(seen) == after:
                if way == "cancel":
                    task.cancel()
                elif way == "raise":
                    raise ValueError("enough")
                else:
                    break
        if way == "aclose":
            await run.aclose()

    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        task = asyncio.ensure_future(consume())
        if after == 0:
            await asyncio.sleep(0.02)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while any("batch request" in other.get_name() for other in asyncio.all_tasks()):
            await asyncio.sleep(0.001)  # `break` leaves the generator to the event loop
        came = len(engine.attempts)
        await asyncio.sleep(0.03)
        assert len(engine.attempts) <= came + 4  # what was on its way, and nothing else
        while sum({"came": 1, "token": 0, "over": -1}[event.what] for event in engine.events):
            await asyncio.sleep(0.001)  # the engine sees it: no stream is left open
    assert len(seen) <= after
    settled = {*batch.owner.committed, *batch.owner.abandoned}
    assert {batch[id].plan_id for id in engine.attempts} <= settled
    assert not set(batch.owner.committed) & set(batch.owner.abandoned)


async def test_requests_that_never_started_stay_open_for_the_next_run(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any
) -> None:
    batch = plan(requests(3, 6))
    stats = batch.owner.stats
    async with aclosing(BatchRunner(batch).run(client, MODEL, concurrency=2, ordered=False, max_tokens=4)) as run:
        await anext(run)
    left = stats()
    assert len(engine.attempts) <= left.commits + left.abandons < 18  # some may have started and not got so far
    assert left.open_plans == 18 - left.commits - left.abandons
    assert len(await collected(BatchRunner(batch).run(client, MODEL, max_tokens=4))) == 18
    assert stats().open_plans == 0
    assert stats().commits == 18 - left.abandons


async def test_nothing_keeps_a_run_alive_that_was_left(
    plan: Plan, requests: MakeRequests, client: Any, tmp_path: Path
) -> None:
    batch = plan(requests(3, 6))
    planner = weakref.ref(batch.owner)
    for journal in (None, tmp_path / "journal"):
        async with aclosing(BatchRunner(batch).run(client, MODEL, concurrency=4, journal=journal, max_tokens=4)) as run:
            await anext(run)
    del batch, run
    for _ in range(300):  # the event loop lets go of a cancelled timer when its time has come
        gc.collect()
        if planner() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("something still refers to the batch's planner")


@pytest.mark.sample(3)
@pytest.mark.parametrize("milliseconds", [0, 1, 3, 5, 8, 12, 20, 35, 60])
async def test_cancelling_at_any_moment(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, milliseconds: int, tmp_path: Any
) -> None:
    engine.fault = lambda id, n: fault("break", chunks=3) if n == 1 and id.endswith("m1") else None
    batch = plan(requests(4, 5))

    async def consume() -> int:
        run = BatchRunner(batch).run(
            client, MODEL, concurrency=3, retries=AT_ONCE, timeout=5, journal=tmp_path / "journal", max_tokens=6
        )
        return len([result async for result in run])

    task = asyncio.ensure_future(consume())
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert outcome == 20 or isinstance(outcome, asyncio.CancelledError)
    assert await consume() == 20


async def test_a_task_that_is_cancelled_from_outside_ends_the_run(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any
) -> None:
    engine.fault = lambda id, n: fault("hang")
    run = BatchRunner(plan(requests(2, 1))).run(client, MODEL)
    waiting = asyncio.ensure_future(anext(run))
    while len(engine.attempts) < 2:
        await asyncio.sleep(0.001)
    for task in asyncio.all_tasks():
        if task.get_name() == "batch request g0m0":
            task.cancel()
    with pytest.raises(BatchError, match="batch request g0m0 was cancelled from outside"):
        await waiting


def test_an_event_loop_that_ends_with_the_run_unfinished(
    plan: Plan, requests: MakeRequests, engine: Any, fault: Any
) -> None:
    batch = plan(requests(3, 3))
    engine.fault = lambda id, n: fault("hang") if len(engine.attempts) > 1 else None

    async def main() -> None:
        # No connection outlives its request: none is idle when the loop ends, and nobody closes the client.
        once = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
        client = openai.AsyncOpenAI(base_url=engine.base_url, api_key="none", http_client=once)
        run = BatchRunner(batch).run(client, MODEL, concurrency=3, ordered=False, max_tokens=3)
        kept.append(run)
        await anext(run)
        while asked() > engine.attempts.keys():  # anyio leaks a connection that is cancelled as it is made
            await asyncio.sleep(0.001)
        assert len(asked()) > 1

    def asked() -> set[str]:
        names = [task.get_name() for task in asyncio.all_tasks()]
        return {*engine.attempts, *(name[14:] for name in names if name.startswith("batch request "))}

    kept: list[Any] = []
    asyncio.run(main())
    gc.collect()
    committed, abandoned = set(batch.owner.committed), set(batch.owner.abandoned)
    assert {batch[id].plan_id for id in engine.attempts} <= committed | abandoned
    assert not committed & abandoned
