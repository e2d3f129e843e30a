"""Agents that fail: their documents are read by others, or reported as skipped; references never dangle."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from openai import APITimeoutError, AuthenticationError, InternalServerError, OpenAI, RateLimitError, Timeout

from warmprefix_chain_of_agents import (
    ChainOfAgents,
    ChainOfAgentsError,
    ChainProgress,
    Manager,
    ManagerError,
    Worker,
    WorkersFailedError,
)
from warmprefix_openai import Retries

QUESTION = "Which fact is worth a mention?"
AT_ONCE = Retries(count=2)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_openai.retry._FIRST_SECONDS", 0.0)


def read_by(answer: Any) -> dict[str, list[str]]:
    """For each document, who read it."""
    read: dict[str, list[str]] = {}
    for report in answer.workers:
        if report.error is None:
            for block in report.blocks:
                read.setdefault(block.id, []).append(report.agent)
    return read


@pytest.mark.parametrize("mode", ["map", "chain"])
@pytest.mark.parametrize("conversation", [None, "c"])
def test_documents_of_a_dead_agent_are_read_by_the_others(
    start_team: Any, documents: Any, dangling: Any, shown: Any, mode: str, conversation: str | None
) -> None:
    team, given = start_team(workers=4, mode=mode), documents(8)
    before = read_by(team.chain.run("Where do we begin?", given, conversation=conversation))
    team.kill("w1")
    answer = team.chain.run(QUESTION, given, conversation=conversation)
    after = read_by(answer)
    assert sorted(after) == sorted(before)
    assert all(len(agents) == 1 and agents != ["w1"] for agents in after.values())
    assert all(after[id] == agents for id, agents in before.items() if agents != ["w1"])  # only its share moves
    assert answer.skipped == ()
    assert [agent.name for agent in team.chain.router.agents] == ["w0", "w2", "w3"]
    again = team.chain.run("And then?", given, conversation=conversation)
    assert all(report.error is None for report in again.workers)  # the dead one is not tried again
    for bodies in team.bodies().values():
        for body in bodies:
            assert dangling(body, given) == []
    assert team.chain.router.stats().open == team.chain.planner.stats().open_plans == 0


@pytest.mark.parametrize("mode", ["map", "chain"])
def test_an_agent_that_is_killed_amid_many_runs(
    start_team: Any, documents: Any, dangling: Any, shown: Any, mode: str
) -> None:
    lock, steps = threading.Lock(), [0]

    def kill(progress: ChainProgress) -> None:
        if progress.kind == "read":
            with lock:
                steps[0] += 1
                if steps[0] == 12:
                    team.kill("w1")

    team = start_team(workers=4, mode=mode, on_progress=kill, recovery=3600.0)
    pool = documents(12)

    def converse(number: int) -> None:
        for turn in range(3):
            given = [pool[(number + turn + place * 2) % 12] for place in range(5)]
            answer = team.chain.run(f"Question {turn} of {number}?", given, conversation=f"c{number}")
            assert sorted(read_by(answer)) == sorted(block.id for block in given)
            assert all(len(agents) == 1 for agents in read_by(answer).values())
            assert answer.skipped == ()

    with ThreadPoolExecutor(6) as threads:
        for conversing in [threads.submit(converse, number) for number in range(6)]:
            conversing.result()
    assert [agent.name for agent in team.chain.router.agents] == ["w0", "w2", "w3"]
    for name, bodies in team.bodies().items():
        for body in bodies:
            assert dangling(body, pool) == []
            assert name == "manager" or shown(body, pool)
    assert team.chain.router.stats().open == team.chain.planner.stats().open_plans == 0


async def test_an_agent_that_dies_while_it_is_asked(
    start_async_team: Any, start_faulty: Any, faults: Any, connect_async: Any, documents: Any, dangling: Any
) -> None:
    """Its server stops in the middle of its answer, for good."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def die() -> None:
        accepted, _ = listener.accept()
        listener.close()
        accepted.recv(1)
        accepted.close()

    thread = threading.Thread(target=die)
    thread.start()
    team, given = start_async_team(mode="map"), documents(6)

    class Doomed:
        base_url = f"http://127.0.0.1:{port}/v1"

    chain = ChainOfAgents(
        [*team.chain._setup.crew.workers.values(), Worker("doomed", connect_async(Doomed), "m")],
        team.chain._setup.manager,
        mode="map",
        retries=AT_ONCE,
    )
    runs = [chain.arun(f"Question {n}?", given, conversation=f"c{n}") for n in range(3)]
    for answer in await asyncio.gather(*runs):
        assert sorted(read_by(answer)) == sorted(block.id for block in given)
        assert all("doomed" not in agents for agents in read_by(answer).values())
    thread.join()
    for bodies in team.bodies().values():
        assert all(dangling(body, given) == [] for body in bodies)


def test_an_agent_that_was_lost_is_given_another_chance(start_team: Any, documents: Any) -> None:
    team = start_team(workers=2, recovery=0.0)
    team.chain.router.fail("w0")
    assert {report.agent for report in team.chain.run(QUESTION, documents(6)).workers} == {"w1"}
    team.chain._setup.crew.lost("w0")
    assert {report.agent for report in team.chain.run(QUESTION, documents(6)).workers} == {"w0", "w1"}


def test_who_was_lost_by_another_chain_is_given_another_chance(start_team: Any, documents: Any) -> None:
    """The other one may have ended since."""
    team = start_team(workers=2, recovery=0.0)
    for name in team.workers:
        team.chain.router.fail(name)
    assert {agent.name for agent in team.chain.router.failed} == {"w0", "w1"}
    assert {report.agent for report in team.chain.run(QUESTION, documents(6)).workers} == {"w0", "w1"}
    team.chain.router.fail("w0")
    assert {report.agent for report in team.chain.run(QUESTION, documents(6)).workers} == {"w1"}
    assert {report.agent for report in team.chain.run(QUESTION, documents(6)).workers} == {"w0", "w1"}


def test_if_all_were_lost_all_are_tried(start_team: Any, documents: Any) -> None:
    team = start_team(workers=2, recovery=3600.0)
    for name in team.workers:
        team.chain._setup.crew.lost(name)
    assert read_by(team.chain.run(QUESTION, documents(4))).keys() == {"d0", "d1", "d2", "d3"}


def test_agents_that_left_are_asked_nothing(start_team: Any, documents: Any) -> None:
    team = start_team(workers=2)
    team.chain.router.leave("w0")
    assert {report.agent for report in team.chain.run(QUESTION, documents(4)).workers} == {"w1"}
    team.chain.router.leave("w1")
    with pytest.raises(WorkersFailedError, match=r"no agent could read 4 of the documents \(no agent is live\)"):
        team.chain.run(QUESTION, documents(4))


def solo(server: Any, connect: Any, manager: Any | None = None, **options: Any) -> ChainOfAgents:
    options.setdefault("retries", AT_ONCE)
    answering = connect(server if manager is None else manager)
    return ChainOfAgents([Worker("w", connect(server), "m")], Manager(answering, "m"), **options)


@pytest.mark.parametrize("fault", ["500", "429", "408", "broken", "garbage", "in-stream", "empty"])
def test_failures_that_may_pass_are_retried(
    start_faulty: Any, faults: Any, connect: Any, documents: Any, fault: str
) -> None:
    behaviour = {
        "broken": faults.deltas({"role": "assistant", "content": "A piece"}, end=None),
        "garbage": faults.raw(b"data: {no json\n\n"),
        "in-stream": faults.raw(b'data: {"error": {"message": "engine died", "code": 500}}\n\n'),
        "empty": faults.raw(b""),
    }.get(fault) or faults.status(int(fault))
    server = start_faulty(behaviour, behaviour, faults.text("A unit."))
    steps: list[Any] = []
    answer = solo(server, connect, on_progress=steps.append).run(QUESTION, documents(1))
    assert answer.workers[0].text == "A unit."
    assert answer.workers[0].attempts == 3
    assert len([progress for progress in steps if progress.kind == "retrying" and progress.error]) == 2
    assert len(server.bodies) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_failures_that_will_not_pass_are_not_retried(
    start_faulty: Any, faults: Any, connect: Any, documents: Any, status: int
) -> None:
    server = start_faulty(faults.status(status))
    with pytest.raises(WorkersFailedError) as failed:
        solo(server, connect).run(QUESTION, documents(1))
    assert len(server.bodies) == 1
    assert failed.value.workers[0].attempts == 1
    assert failed.value.__cause__ is failed.value.workers[0].error


@pytest.mark.parametrize("asked", ["0.2", "date"])
def test_retry_after_is_kept(start_faulty: Any, faults: Any, connect: Any, documents: Any, asked: str) -> None:
    if asked == "date":
        asked = email.utils.formatdate(time.time() + 2, usegmt=True)
    server = start_faulty(faults.status(429, {"retry-after": asked}), faults.text("A unit."))
    began = time.monotonic()
    assert solo(server, connect).run(QUESTION, documents(1)).text
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(
    ("delta", "end", "message"),
    [
        ({"role": "assistant", "content": None}, "stop", "holds no text; it ended for the reason 'stop'"),
        ({"role": "assistant", "content": "  \n"}, "length", "holds no text; it ended for the reason 'length'"),
        ({"role": "assistant", "refusal": "I will not."}, "stop", "a refusal: I will not."),
        (
            {"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": ""}}]},
            "tool_calls",
            "a tool call",
        ),
        ({"role": "assistant", "content": ["no", "text"]}, "stop", "holds no text"),
    ],
)
def test_an_answer_that_is_no_text_is_a_failure(
    start_faulty: Any, faults: Any, connect: Any, start_engine: Any, documents: Any, delta: Any, end: str, message: str
) -> None:
    server, good = start_faulty(faults.deltas(delta, end=end)), start_engine()
    chain = ChainOfAgents(
        [Worker("odd", connect(server), "m"), Worker("good", connect(good), good.model)],
        Manager(connect(good), good.model),
        retries=AT_ONCE,
        together=False,
    )
    answer = chain.run(QUESTION, documents(6))
    odd = [report for report in answer.workers if report.agent == "odd"]
    assert odd
    assert all(message in str(report.error) and report.attempts == 3 for report in odd)
    assert answer.skipped == ()
    assert {name for names in read_by(answer).values() for name in names} == {"good"}
    assert {agent.name for agent in chain.router.agents} == {"odd", "good"}  # it answers, so it is not dead


def test_unreadable_documents_are_skipped_and_reported_to_the_manager(
    start_faulty: Any, faults: Any, connect: Any, start_engine: Any, documents: Any
) -> None:
    """One document is too much for every worker; it is not tried on all of them."""

    def choosy(handler: Any) -> None:
        last = server.bodies[-1]["messages"][-1]["content"]
        (faults.status(400) if "Document 3." in last else faults.text("A unit."))(handler)

    server, manager = start_faulty(choosy), start_engine()
    client = connect(server)
    chain = ChainOfAgents(
        [Worker(f"w{number}", client, "m") for number in range(6)],
        Manager(connect(manager), manager.model),
        together=False,
    )
    given = documents(5)
    answer = chain.run(QUESTION, given)
    assert answer.skipped == (given[3],)
    assert sorted(read_by(answer)) == ["d0", "d1", "d2", "d4"]
    assert len([report for report in answer.workers if report.error is not None]) == 2
    assert "1 of the documents could not be read." in manager.prompts[0]
    assert chain.router.stats().open == chain.planner.stats().open_plans == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_documents_are_not_skipped_for_agents_that_refuse_them_all(
    start_faulty: Any, faults: Any, connect: Any, documents: Any, status: int
) -> None:
    """They have nothing to do, and so are given the more."""
    bad, good = connect(start_faulty(faults.status(status))), connect(start_faulty(faults.text("A unit.")))
    chain = ChainOfAgents(
        [*(Worker(f"bad{n}", bad, "m") for n in range(4)), Worker("good", good, "m")],
        Manager(good, "m"),
        mode="map",
        concurrency=4,
        retries=AT_ONCE,
    )
    for _ in range(2):
        answer = chain.run(QUESTION, documents(20))
        assert answer.skipped == ()
        assert {name for names in read_by(answer).values() for name in names} == {"good"}
    assert len(chain.router.agents) == 5
    assert chain.router.stats().open == chain.planner.stats().open_plans == 0


def test_skipping_can_be_refused(start_faulty: Any, faults: Any, connect: Any, documents: Any) -> None:
    def choosy(handler: Any) -> None:
        last = server.bodies[-1]["messages"][-1]["content"]
        (faults.status(400) if "Document 3." in last else faults.text("A unit."))(handler)

    server = start_faulty(choosy)
    for mode in ("chain", "map"):
        chain = solo(server, connect, on_failure="raise", together=False, mode=mode, concurrency=1)
        given = documents(5)
        with pytest.raises(WorkersFailedError, match=r"no agent could read 1 of the documents \(w: .*400") as failed:
            chain.run(QUESTION, given)
        assert failed.value.unread == (given[3],)
        assert isinstance(failed.value, ChainOfAgentsError)
        assert chain.router.stats().open == chain.planner.stats().open_plans == 0


def test_all_workers_failing_is_an_error_whatever_the_policy(start_team: Any, documents: Any) -> None:
    team, given = start_team(workers=3, mode="map"), documents(6)
    for engine in team.workers.values():
        engine.fail_next(100)
    with pytest.raises(WorkersFailedError) as failed:
        team.chain.run(QUESTION, given)
    assert failed.value.unread == tuple(given)
    assert isinstance(failed.value.__cause__, InternalServerError)
    assert not team.engines["manager"].bodies
    assert team.chain.router.stats().open == team.chain.planner.stats().open_plans == 0


def test_the_error_of_a_failing_manager_has_the_workers_summaries(start_team: Any, documents: Any) -> None:
    team = start_team()
    team.engines["manager"].fail_next(2)
    with pytest.raises(ManagerError, match="the manager 'manager' did not answer: ") as failed:
        team.chain.run(QUESTION, documents(3), conversation="c")
    assert all(report.text for report in failed.value.workers)
    assert failed.value.manager.attempts == 2
    assert isinstance(failed.value.__cause__, InternalServerError)
    assert team.chain.run(QUESTION, documents(3), conversation="c").text


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("awaited", [True, False])
async def test_an_agent_that_hangs_is_given_up(
    start_faulty: Any, faults: Any, connect: Any, connect_async: Any, start_engine: Any, documents: Any,
    after: int, awaited: bool,
) -> None:  # fmt: skip
    done = threading.Event()
    server, good = start_faulty(faults.hang(done, after=after)), start_engine()
    to = connect_async if awaited else connect
    chain = ChainOfAgents(
        [Worker("slow", to(server), "m"), Worker("good", to(good), good.model)],
        Manager(to(good), good.model),
        timeout=1.5,
        retries=Retries(count=0),
        mode="map",
    )
    answer = await chain.arun(QUESTION, documents(6))
    done.set()
    assert answer.skipped == ()
    assert {name for names in read_by(answer).values() for name in names} == {"good"}
    assert "slow" in {report.agent for report in answer.workers}
    assert [agent.name for agent in chain.router.agents] == ["good"]


def test_a_lost_agent_is_not_waited_for_again(
    start_faulty: Any, faults: Any, connect: Any, start_engine: Any, documents: Any
) -> None:
    done = threading.Event()
    server, good = start_faulty(faults.hang(done)), start_engine()
    chain = ChainOfAgents(
        [Worker("slow", connect(server), "m"), Worker("good", connect(good), good.model)],
        Manager(connect(good), good.model),
        timeout=1.5,
        retries=Retries(count=0),
        mode="map",
        concurrency=1,
    )
    answer = chain.run(QUESTION, documents(10))
    done.set()
    assert sorted(read_by(answer)) == sorted(block.id or "" for block in documents(10))
    assert [report.attempts for report in answer.workers if report.agent == "slow"].count(1) == 1
    assert len([report for report in answer.workers if report.agent == "slow"]) > 1
    assert len(server.bodies) == 1


@pytest.mark.parametrize("awaited", [True, False])
async def test_the_time_out_is_for_the_whole_answer(
    start_faulty: Any, faults: Any, connect: Any, connect_async: Any, documents: Any, awaited: bool
) -> None:
    done = threading.Event()
    server = start_faulty(faults.drip(done))
    chain = solo(server, connect_async if awaited else connect, timeout=1.5, retries=Retries(count=0))
    with pytest.raises(WorkersFailedError, match="no whole answer in") as failed:
        await chain.arun(QUESTION, documents(1))
    done.set()
    assert isinstance(failed.value.__cause__, TimeoutError)


@pytest.mark.sample(1)
@pytest.mark.parametrize("awaited", [True, False])
async def test_an_answer_without_end_kills_no_agent(
    start_faulty: Any, faults: Any, connect: Any, connect_async: Any, documents: Any, awaited: bool
) -> None:
    """A document that makes a model ramble would else take one after the other for dead."""
    done = threading.Event()

    def choosy(handler: Any) -> None:
        last = server.bodies[-1]["messages"][-1]["content"]
        (faults.drip(done) if "Document 3." in last else faults.text("A unit."))(handler)

    server = start_faulty(choosy)
    client = (connect_async if awaited else connect)(server)
    given = documents(5)
    chain = ChainOfAgents(
        [Worker(f"w{number}", client, "m") for number in range(4)],
        Manager(client, "m"),
        mode="map",
        concurrency=1,  # the server looks at the last request that came
        timeout=1.5,
        retries=Retries(count=0),
    )
    answer = await chain.arun(QUESTION, given)
    done.set()
    assert answer.skipped == (given[3],)
    assert len(chain.router.agents) == 4
    assert chain.router.stats().failures == 0


def test_a_clients_own_time_outs_hold_too(start_engine: Any, connect: Any) -> None:
    """A missing connection is noticed long before the time-out of an answer."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        client = stack.enter_context(OpenAI(base_url=url, api_key="none", timeout=Timeout(60.0, connect=0.2)))
        engine = start_engine()
        chain = ChainOfAgents(
            [Worker("full", client, "m")],
            Manager(connect(engine), engine.model),
            timeout=30.0,
            retries=Retries(count=0),
        )
        began = time.monotonic()
        with pytest.raises(WorkersFailedError) as failed:
            chain.run(QUESTION, ["A document."])
        assert isinstance(failed.value.__cause__, APITimeoutError)
        assert time.monotonic() - began < 15


def test_the_clients_own_retries_are_off(start_faulty: Any, faults: Any, documents: Any) -> None:
    server = start_faulty(faults.status(429))
    with OpenAI(base_url=server.base_url, api_key="none", max_retries=5) as client:
        chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"), retries=Retries(count=1, longest=0.0))
        with pytest.raises(WorkersFailedError) as failed:
            chain.run(QUESTION, documents(1))
    assert isinstance(failed.value.__cause__, RateLimitError)
    assert len(server.bodies) == 2


def test_text_that_cannot_be_sent_is_a_failure(start_team: Any, documents: Any) -> None:
    team = start_team(together=False)
    answer = team.chain.run(QUESTION, [*documents(2), "half a pair: \ud800"])
    assert [block.text for block in answer.skipped] == ["half a pair: \ud800"]
    assert sorted(read_by(answer)) == ["d0", "d1"]


def test_an_option_that_the_client_lacks_is_raised_as_it_is(start_engine: Any, connect: Any) -> None:
    engine = start_engine()
    client = connect(engine)
    chain = ChainOfAgents([Worker("w", client, engine.model, options={"colour": "red"})], Manager(client, "m"))
    with pytest.raises(TypeError, match="colour"):
        chain.run(QUESTION, ["A document."])
    assert chain.router.stats().open == chain.planner.stats().open_plans == 0


def test_a_wrong_key_is_not_tried_again(start_faulty: Any, faults: Any, connect: Any, documents: Any) -> None:
    server = start_faulty(faults.text("A unit."), faults.status(401))
    with pytest.raises(ManagerError) as failed:
        solo(server, connect).run(QUESTION, documents(1))
    assert isinstance(failed.value.__cause__, AuthenticationError)
    assert len(server.bodies) == 2
