"""Runs against an engine over HTTP that does what it should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from warmprefix import BatchPlan, BatchRequest
from warmprefix_openai import BatchResult, BatchRunner
from warmprefix_tools.emulator import EmulatorConfig

Plan = Callable[..., BatchPlan]
MakeRequests = Callable[..., list[BatchRequest]]
MODEL = EmulatorConfig().model


@pytest.mark.parametrize("concurrency", [1, 3, 32])
@pytest.mark.parametrize("journal", [False, True])
async def test_results_come_in_the_callers_order(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, concurrency: int, journal: bool, tmp_path: Path
) -> None:
    asked = requests(4, 6)
    batch = plan(asked)
    assert [planned.id for planned in batch] != [request.id for request in asked]
    kept = tmp_path / "run.journal" if journal else None
    results = [
        r async for r in BatchRunner(batch).run(client, MODEL, concurrency=concurrency, journal=kept, max_tokens=4)
    ]
    assert [result.id for result in results] == [request.id for request in asked]
    assert engine.most_at_once <= concurrency
    for result, request in zip(results, asked, strict=True):
        assert result.request.request is request
        assert result.error is None
        assert result.attempts == 1
        assert result.text == "[warmprefix emulat"
        assert result.finish_reason == "length"
        assert result.tool_calls == ()
        assert result.completion_tokens == 4
        assert result.ttft is not None
        assert result.ttft > 0
        assert engine.bodies[result.id]["messages"] == result.request.messages()
        assert result.prompt_tokens == engine.usage[result.id]["prompt_tokens"]
        assert result.cached_tokens == engine.usage[result.id]["prompt_tokens_details"]["cached_tokens"]
        assert batch.owner.committed[result.request.plan_id] == result.cached_tokens
    assert sum(result.cached_tokens or 0 for result in results) > 0
    stats = batch.owner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (len(asked), len(asked), 0)
    assert (stats.abandons, stats.late_commits) == (0, 0)
    assert stats.reported_cached_tokens == sum(result.cached_tokens or 0 for result in results)
    for planned in batch:  # the planner has learned what the engine holds now
        assert batch.owner.plan(planned.request.blocks, preamble="Answer briefly.").resident_tokens == (
            planned.total_tokens
        )


async def test_one_at_a_time_requests_run_in_execution_order(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any
) -> None:
    batch = plan(requests(3, 4))
    results = [
        result async for result in BatchRunner(batch).run(client, MODEL, concurrency=1, ordered=False, max_tokens=2)
    ]
    executed = [planned.id for planned in batch]
    assert [result.id for result in results] == executed
    assert [event.id for event in engine.events if event.what == "came"] == executed


@pytest.mark.parametrize("concurrency", [2, 8, 64])
async def test_no_request_comes_before_its_warmers_first_token(
    plan: Plan, requests: MakeRequests, start_engine: Any, concurrency: int
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=2, prefill_rate=400_000, decode_rate=500))
    batch = plan(requests(6, 8))
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        results = [
            result async for result in BatchRunner(batch).run(client, MODEL, concurrency=concurrency, max_tokens=4)
        ]
    assert len(results) == 48
    assert 1 < engine.most_at_once <= concurrency
    warmed = [planned for planned in batch if planned.warmed_by is not None]
    assert len(warmed) == 42
    for planned in warmed:
        assert engine.when("token", planned.warmed_by) < engine.when("came", planned.id)


async def test_the_first_of_a_group_warms_and_then_the_rest_run_side_by_side(
    plan: Plan, requests: MakeRequests, start_engine: Any
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=5, decode_rate=20))
    batch = plan(requests(1, 2))
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        async for _ in BatchRunner(batch).run(client, MODEL, concurrency=8, max_tokens=6):
            pass
    first, second = (planned.id for planned in batch)
    assert engine.when("token", first) < engine.when("came", second) < engine.when("over", first)


async def test_the_request_that_is_sent(plan: Plan, requests: MakeRequests, engine: Any, client: Any) -> None:
    batch = plan(requests(2, 1, tenants=["acme", None]))
    run = BatchRunner(batch).run(
        client,
        MODEL,
        messages=lambda planned: [{"role": "user", "content": f"Shout. {planned.request.question}"}],
        max_tokens=1,
        temperature=0.5,
        extra_body={"top_k": 3},
    )
    assert len([result async for result in run]) == 2
    assert engine.bodies["g0m0"] == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Shout. This is question <g0m0>."}],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "cache_salt": batch["g0m0"].cache_salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert batch["g0m0"].cache_salt is not None
    assert "cache_salt" not in engine.bodies["g1m0"]


async def test_an_engine_that_reports_no_usage(plan: Plan, requests: MakeRequests, client: Any) -> None:
    batch = plan(requests(1, 1))
    run = BatchRunner(batch).run(client, MODEL, stream_options={"include_usage": False}, max_tokens=3)
    (result,) = [result async for result in run]
    assert result.text
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (None, None, None)
    assert batch.owner.committed == {batch["g0m0"].plan_id: None}


async def test_an_answer_may_hold_any_character(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any
) -> None:
    text = "\u2028a\x85b\u2029\x7f\U0001f600\ufeff"
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    chunk = json.dumps({"choices": [choice]}, ensure_ascii=False)
    assert text in chunk
    for end in ("\n", "\r\n"):
        body = f": a comment{end}{end}event: x{end}data:{chunk}{end}{end}data: [DONE]{end}{end}"
        engine.fault = lambda id, n, body=body: fault("body", body=body)
        (result,) = [result async for result in BatchRunner(plan(requests(1, 1))).run(client, MODEL, retries=0)]
        assert (result.error, result.text) == (None, text)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_batch_of_nothing_and_of_one(
    plan: Plan, requests: MakeRequests, client: Any, count: int, ordered: bool, tmp_path: Path
) -> None:
    batch = plan(requests(count, 1))
    steps: list[tuple[str, int, int]] = []
    for journal in (None, tmp_path / "journal", tmp_path / "journal"):
        run = BatchRunner(batch).run(
            client, MODEL, ordered=ordered, journal=journal, progress=lambda *step: steps.append(step)
        )
        assert len([result async for result in run]) == count
    assert steps[0] == ("requests", 0, count)
    assert steps[-1] == ("requests", count, count)


async def test_progress_counts_every_request_once(plan: Plan, requests: MakeRequests, client: Any) -> None:
    steps: list[int] = []
    run = BatchRunner(plan(requests(2, 5))).run(client, MODEL, progress=lambda stage, done, total: steps.append(done))
    async for _ in run:
        pass
    assert steps == list(range(11))


async def test_a_slow_consumer_holds_nothing_back(plan: Plan, requests: MakeRequests, engine: Any, client: Any) -> None:
    batch = plan(requests(2, 4))
    run = BatchRunner(batch).run(client, MODEL, concurrency=2)
    await anext(run)
    while len(batch.owner.committed) < 8:
        await asyncio.sleep(0.005)
    assert len([result async for result in run]) == 7


async def test_two_runs_side_by_side(plan: Plan, requests: MakeRequests, client: Any) -> None:
    async def ids(groups: int) -> list[str]:
        return [result.id async for result in BatchRunner(plan(requests(groups, 3))).run(client, MODEL)]

    assert [len(ids) for ids in await asyncio.gather(ids(2), ids(3))] == [6, 9]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be 1 or more, got 0"),
        ({"concurrency": 2.0}, TypeError, "concurrency must be an int, got float"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 or None, got 0"),
        ({"stream": False}, ValueError, "stream must be left out"),
        ({"retries": -1}, ValueError, "count must be 0 or more, got -1"),
        ({"retries": "many"}, TypeError, "count must be an int, got str"),
        ({"journal": "x", "stop": {1, 2}}, TypeError, "with a journal, request options must be JSON"),
    ],
)
async def test_bad_arguments_are_refused_at_the_call(
    plan: Plan, client: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BatchRunner(plan([])).run(client, MODEL, **options)


async def test_a_client_that_can_not_be_awaited_is_refused(plan: Plan) -> None:
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as client:
        with pytest.raises(TypeError, match=r"client must be an openai.AsyncOpenAI, got OpenAI"):
            BatchRunner(plan([])).run(client, MODEL)  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as asynchronous:
            with pytest.raises(TypeError, match=r"model must be a str, got NoneType"):
                BatchRunner(plan([])).run(asynchronous, None)  # type: ignore[arg-type]


async def test_an_option_that_the_client_lacks_ends_the_run(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any
) -> None:
    with pytest.raises(TypeError, match="colour"):
        await anext(BatchRunner(plan(requests(2, 2))).run(client, MODEL, colour="red"))
    assert engine.events == []


async def test_the_callers_own_mistakes_end_the_run(plan: Plan, requests: MakeRequests, client: Any) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if done == 3:
            raise RuntimeError("the bar broke")

    results: list[BatchResult] = []

    async def run() -> None:
        async for result in BatchRunner(plan(requests(3, 3))).run(
            client, MODEL, concurrency=1, ordered=False, progress=progress
        ):
            results.append(result)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(RuntimeError, match="the bar broke"):
        await run()
    assert len(results) == 3
