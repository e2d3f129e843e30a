"""Mode "map": the workers read at once, and the manager is given all that they hand on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, Manager, Worker

QUESTION = "Which fact is worth a mention?"


@pytest.mark.parametrize("together", [None, True, False])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_document_is_read_by_one_worker(
    start_team: Any, documents: Any, shown: Any, count: int, together: bool | None
) -> None:
    team, given = start_team(mode="map", together=together), documents(count)
    answer = team.chain.run(QUESTION, given)
    read = [id for name in team.workers for body in team.bodies()[name] for id in shown(body, given)]
    assert sorted(read) == sorted(document.id for document in given)
    assert sorted(block.id for report in answer.workers for block in report.blocks) == sorted(read)
    assert answer.skipped == ()
    prompts = sum(len(bodies) for name, bodies in team.bodies().items() if name != "manager")
    assert prompts == len(answer.workers)
    assert prompts <= 3 if together else prompts == count


def test_documents_stand_before_the_question(start_team: Any, documents: Any) -> None:
    team, given = start_team(mode="map", together=True), documents(6)
    team.chain.run(QUESTION, given)
    for engine in team.workers.values():
        [body] = engine.bodies
        system, user = body["messages"]
        assert system["role"] == "system"
        assert QUESTION not in system["content"]
        ends = [user["content"].find(block.text) + len(block.text) for block in given if block.text in user["content"]]
        assert ends
        assert user["content"].startswith("[d")
        assert max(ends) < user["content"].index(QUESTION)


def test_documents_have_labels_whatever_the_planner_annotates(start_team: Any, documents: Any) -> None:
    """The prompts name them."""
    team, given = start_team(mode="map", together=True, planner=ContextPlanner(annotate="none")), documents(6)
    team.chain.run(QUESTION, given)
    prompts = [body["messages"][1]["content"] for engine in team.workers.values() for body in engine.bodies]
    assert all(sum(f"[{block.id}] {block.text}" in prompt for prompt in prompts) == 1 for block in given)


def test_a_document_that_comes_again_is_a_warm_prefix(start_team: Any, documents: Any) -> None:
    team, given = start_team(workers=4, mode="map"), documents(8)
    team.chain.run("What is fact 1?", given)
    again = team.chain.run("And what is fact 2?", list(reversed(given)))
    for report in again.workers:
        [block] = report.blocks
        assert report.usage.cached_tokens is not None
        assert report.usage.cached_tokens >= len(block.text) // 5  # the emulator's tokens are about as long as words


def test_the_manager_is_given_all_units_with_the_labels_behind_them(start_team: Any, documents: Any) -> None:
    team, given = start_team(mode="map", together=True), documents(6)
    answer = team.chain.run(QUESTION, given)
    [body] = team.engines["manager"].bodies
    asked = body["messages"][-1]["content"]
    for number, report in enumerate(answer.workers, start=1):
        labels = ", ".join(f"[{block.id}]" for block in report.blocks)
        assert f"Summary {number} (of {labels}): {report.text}" in asked
    assert asked.endswith(f"Question: {QUESTION}\n\nAnswer:")
    assert answer.text == answer.manager.text


def test_usage_is_what_the_engines_counted(start_team: Any, documents: Any) -> None:
    team, given = start_team(mode="map"), documents(7)
    for _ in range(2):
        before = {name: len(engine.answered) for name, engine in team.engines.items()}
        answer = team.chain.run(QUESTION, given)
        for name, usage in answer.usage_by_agent.items():
            answered = team.engines[name].answered[before[name] :]
            assert usage.prompt_tokens == sum(one.prompt_tokens for one in answered)
            assert usage.cached_tokens == sum(one.cached_tokens for one in answered)
        assert answer.usage.prompt_tokens == sum(usage.prompt_tokens for usage in answer.usage_by_agent.values())
        assert answer.usage.completion_tokens
        assert all(report.ttft is not None and report.attempts == 1 for report in answer.workers)


def test_repeated_documents_are_read_once(start_team: Any, documents: Any) -> None:
    team, given = start_team(mode="map"), documents(3)
    answer = team.chain.run(QUESTION, [*given, *given, ContextBlock(given[0].text)])
    assert Counter(block.id for report in answer.workers for block in report.blocks) == {"d0": 1, "d1": 1, "d2": 1}


def test_strings_are_documents_and_blank_ones_are_left_out(start_team: Any) -> None:
    team = start_team(mode="map")
    answer = team.chain.run(QUESTION, ["", "Alone.", " \n", ContextBlock("\t", id="blank")])
    assert [block.text for report in answer.workers for block in report.blocks] == ["Alone."]
    assert sum(len(engine.bodies) for engine in team.workers.values()) == 1
    assert len(team.engines["manager"].bodies) == 1


@pytest.mark.parametrize("mode", ["chain", "map"])
@pytest.mark.parametrize("options", [{}, {"conversation": "chat"}], ids=["alone", "conversation"])
@pytest.mark.parametrize(("documents", "given"), [([], "none"), (["", " \n"], "2 blank")])
def test_without_documents_no_model_is_called(
    start_team: Any, mode: str, options: dict[str, str], documents: list[str], given: str
) -> None:
    team = start_team(mode=mode)

    async def arun() -> None:
        await team.chain.arun(QUESTION, documents, **options)

    async def astream() -> None:
        async for _ in team.chain.astream(QUESTION, documents, **options):
            pass

    for ask in (
        lambda: team.chain.run(QUESTION, documents, **options),
        lambda: list(team.chain.stream(QUESTION, documents, **options)),
        lambda: asyncio.run(arun()),
        lambda: asyncio.run(astream()),
    ):
        with pytest.raises(ValueError, match=rf"^documents must be one or more that are not blank, got {given}$"):
            ask()
    assert all(not engine.bodies for engine in team.engines.values())
    assert team.chain.router.stats().assignments == 0


def test_concurrency_is_bounded(start_faulty: Any, faults: Any, connect: Any, documents: Any) -> None:
    lock, inside, most = threading.Lock(), [0], [0]

    def slow(handler: Any) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        with lock:
            inside[0] -= 1
        faults.text("A unit.")(handler)

    client = connect(start_faulty(slow))
    workers = [Worker(f"w{number}", client, "m") for number in range(4)]
    chain = ChainOfAgents(workers, Manager(client, "m"), mode="map", concurrency=2)
    assert len(chain.run(QUESTION, documents(9)).workers) == 9
    assert most == [2]


def test_planner_and_router_get_a_report_of_every_reading(start_team: Any, documents: Any) -> None:
    team = start_team(mode="map")
    team.chain.run(QUESTION, documents(5), tenant="acme")
    stats = team.chain.planner.stats()
    assert (stats.plans, stats.commits, stats.abandons, stats.open_plans) == (6, 6, 0, 0)
    assert stats.reported_cached_tokens == sum(engine.cached_tokens for engine in team.engines.values())
    assert team.chain.router.stats().open == 0
    assert sum(team.chain.router.load("acme").values()) > 0


async def test_awaited_and_in_threads(start_async_team: Any, start_team: Any, documents: Any) -> None:
    start: Callable[..., Any]
    for start in (start_async_team, start_team):
        team = start(mode="map")
        answer = await team.chain.arun(QUESTION, documents(5))
        assert len(answer.workers) == 5
        assert answer.text


async def test_run_works_where_a_loop_runs(start_team: Any, documents: Any) -> None:
    team = start_team(mode="map")
    assert team.chain.run(QUESTION, documents(2)).text


def test_the_report_of_a_cut_unit_has_its_finish_reason(start_engine: Any, documents: Any) -> None:
    engine = start_engine()
    with OpenAI(base_url=engine.base_url, api_key="none") as client:
        workers = [Worker("cut", client, engine.model, options={"max_tokens": 3})]
        answer = ChainOfAgents(workers, Manager(client, engine.model), mode="map").run("Why?", documents(1))
    assert answer.workers[0].usage.completion_tokens == 3
    assert answer.workers[0].finish_reason == "length"
