"""What is refused, and how it is message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, InMemoryChats, Manager, Worker
from warmprefix_routing import Agent, AgentRouter


@pytest.fixture
def client() -> Iterator[OpenAI]:
    """A client without a server."""
    with OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as client:
        yield client


@pytest.fixture
def chain(client: OpenAI) -> ChainOfAgents:
    return ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"))


def test_workers_must_be_there_and_differ(client: OpenAI) -> None:
    manager = Manager(client, "m")
    with pytest.raises(ValueError, match="workers must be one or more, got none"):
        ChainOfAgents([], manager)
    with pytest.raises(ValueError, match="names of workers must differ, got 'w' twice"):
        ChainOfAgents([Worker("w", client, "m"), Worker("w", client, "n")], manager)
    with pytest.raises(ValueError, match="name of the manager must differ from the workers' names, got 'manager'"):
        ChainOfAgents([Worker("manager", client, "m")], manager)
    with pytest.raises(TypeError, match="workers must be Workers, got str"):
        ChainOfAgents(["w"], manager)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"manager": "m"}, TypeError, "manager must be a Manager, got str"),
        ({"router": "r"}, TypeError, "router must be an AgentRouter or None, got str"),
        ({"planner": "p"}, TypeError, "planner must be a ContextPlanner or None, got str"),
        ({"retries": 3}, TypeError, "retries must be a Retries or None, got int"),
        ({"prompts": "p"}, TypeError, "prompts must be a Prompts or None, got str"),
        ({"memory": {}}, TypeError, "memory must be a ChatMemory or None, got dict"),
        ({"on_progress": 1}, TypeError, "on_progress must be callable or None, got int"),
        ({"mode": "reduce"}, ValueError, "mode must be 'chain' or 'map', got 'reduce'"),
        ({"on_failure": "ask"}, ValueError, "on_failure must be 'skip' or 'raise', got 'ask'"),
        ({"concurrency": 0}, ValueError, "concurrency must be 1 or more, got 0"),
        ({"concurrency": 1.5}, TypeError, "concurrency must be an int, got float"),
        ({"max_chat_tokens": 0}, ValueError, "max_chat_tokens must be 1 or more, got 0"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 and finite, or None, got 0"),
        ({"timeout": float("inf")}, ValueError, "timeout must be above 0 and finite, or None, got inf"),
        ({"recovery": -1}, ValueError, "recovery must be 0 or more, got -1"),
        ({"recovery": float("nan")}, ValueError, "recovery must be 0 or more, got nan"),
    ],
)
def test_options_are_checked(client: OpenAI, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        ChainOfAgents([Worker("w", client, "m")], **({"manager": Manager(client, "m")} | options))
    assert str(refused.value) == message
    assert re.match(r".+ must .+, got \S", message)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": ""}, ValueError, "name must not be empty, got ''"),
        ({"name": 1}, TypeError, "name must be a str, got int"),
        ({"model": ""}, ValueError, "model must not be empty, got ''"),
        ({"client": "http://"}, TypeError, "client of 'w' must be an openai.OpenAI or openai.AsyncOpenAI, got str"),
        ({"options": 1}, TypeError, "options of 'w' must be a mapping, got int"),
        (
            {"options": {"timeout": 9, "n": 2}},
            ValueError,
            "options of 'w' must hold no option of the chain, got n, timeout",
        ),
        (
            {"options": {"extra_body": {"cache_salt": "s"}}},
            ValueError,
            "options of 'w' must hold no option of the chain, got extra_body.cache_salt",
        ),
        ({"capacity_tokens": 0}, ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
        ({"weight": 0.0}, ValueError, "weight must be positive and finite, got 0.0"),
    ],
)
def test_agents_are_checked(client: OpenAI, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        Worker(**({"name": "w", "client": client, "model": "m"} | given))
    assert str(refused.value) == message
    assert re.match(r".+ must .+, got \S", message)
    if not {"capacity_tokens", "weight"} & given.keys():
        with pytest.raises(error, match=r"^.* must "):
            Manager(**({"name": "w", "client": client, "model": "m"} | given))


@pytest.mark.parametrize(
    ("question", "documents", "options", "error", "message"),
    [
        ("", [], {}, ValueError, "question must not be blank, got ''"),
        (" \n", [], {}, ValueError, "question must not be blank, got ' \\n'"),
        (None, [], {}, TypeError, "question must be a str, got NoneType"),
        ("?", "text", {}, TypeError, "documents must be a sequence of documents, got one str"),
        ("?", ContextBlock("text"), {}, TypeError, "documents must be a sequence of documents, got one ContextBlock"),
        ("?", None, {}, TypeError, "documents must be a sequence of documents, got one NoneType"),
        ("?", {"a": "text"}, {}, TypeError, "documents must be a sequence of documents, got one dict"),
        ("?", ["a", 1], {}, TypeError, "documents[1] must be a text, a block, a document or a node, got int"),
        ("?", [], {"conversation": ""}, ValueError, "conversation must not be empty, got ''"),
        ("?", [], {"conversation": 1}, TypeError, "conversation must be a str or None, got int"),
        ("?", [], {"tenant": 1}, TypeError, "tenant must be a str or None, got int"),
    ],
)
def test_questions_are_checked(
    chain: ChainOfAgents, question: Any, documents: Any, options: Any, error: type[Exception], message: str
) -> None:
    for ask in (chain.run, chain.stream, chain.astream, lambda *a, **k: asyncio.run(chain.arun(*a, **k))):
        with pytest.raises(error) as refused:
            ask(question, documents, **options)
        assert str(refused.value) == message
    assert re.match(r".+ must .+, got \S", message)
    assert chain.planner.stats().plans == 0


async def test_clients_to_be_awaited_need_arun() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as client:
        with OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as other:
            chain = ChainOfAgents([Worker("v", other, "m"), Worker("w", client, "m")], Manager(client, "m"))
            for ask in (chain.run, chain.stream):
                with pytest.raises(TypeError) as refused:
                    ask("?", ["A document."])
                assert str(refused.value) == (
                    "clients of w, manager must be an openai.OpenAI for run and stream; use arun or astream"
                )


def test_workers_that_the_router_lacks_join_it(client: OpenAI) -> None:
    router = AgentRouter([Agent("v"), "elsewhere"])
    workers = [Worker("v", client, "m"), Worker("w", client, "m", capacity_tokens=1_000, weight=2.0)]
    chain = ChainOfAgents(workers, Manager(client, "m"), router=router)
    assert chain.router is router
    assert router.agents == (Agent("v"), Agent("elsewhere"), Agent("w", 1_000, 2.0))


def test_only_its_own_workers_are_asked(start_team: Any, documents: Any) -> None:
    router = AgentRouter(["elsewhere"])
    team = start_team(workers=2, router=router)
    assert {report.agent for report in team.chain.run("?", documents(8)).workers} == {"w0", "w1"}


def test_what_is_given_is_used(client: OpenAI) -> None:
    planner, memory = ContextPlanner(), InMemoryChats()
    chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"), planner=planner, memory=memory)
    assert chain.planner is planner
