"""Sub-agents of real frameworks begin with their parent's prompt, and go to the engine that has it.

The code blocks of docs/frameworks.md run unchanged, on three emulated engines behind the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.integrations.gateway.conftest import INSTANT

from warmprefix_gateway import GatewayServer
from warmprefix_tools.emulator import EmulatorServer

for framework in ("agents", "deepagents", "langchain_openai"):
    pytest.importorskip(framework)
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool, set_tracing_disabled  # noqa: E402
from langchain.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

set_tracing_disabled(disabled=True)
pytestmark = pytest.mark.filterwarnings("ignore:The feature `forked subagents` is in beta")

PARENTS = {
    f"What is new in project {number}?": f"You help with project {number}. " + "Read before you write. " * 60
    for number in range(3)
}
"""Their questions and instructions; the gateway would keep all parents with the same ones at one engine."""
TASKS = ("Look into the sea.", "Look into the sky.")


def read_file(path: str) -> str:
    """Read a file."""
    return f"The text of {path}: " + "the water is deep, and the air is high. " * 60


class Sent(NamedTuple):
    """A request, and what its engine reported."""

    body: Mapping[str, Any]
    prompt_tokens: int
    cached_tokens: int

    @property
    def items(self) -> list[Any]:
        return list(self.body.get("messages") or self.body["input"])

    @property
    def front(self) -> str:
        """What stands in front of the messages, byte for byte."""
        return json.dumps([self.body.get("tools"), self.body.get("instructions")])


class Requests:
    """Notes all requests of HTTP clients that were answered."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def see(self, response: httpx.Response) -> None:
        response.read()
        self._note(response)

    async def asee(self, response: httpx.Response) -> None:
        await response.aread()
        self._note(response)

    def _note(self, response: httpx.Response) -> None:
        usage = response.json()["usage"]
        tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.sent.append(Sent(json.loads(response.request.content), tokens, details.get("cached_tokens") or 0))

    def children(self) -> Iterator[tuple[Sent, Sent]]:
        """Yield each request that begins with a task, and the longest one of which it has all messages."""
        for child in self.sent:
            *before, last = child.items
            if last.get("role") == "user" and any(task in json.dumps(last) for task in TASKS):
                shown = [sent for sent in self.sent if sent.items == before[: len(sent.items)]]
                yield child, max(shown, key=lambda sent: len(sent.items))

    def check_forks(self) -> None:
        forks = list(self.children())
        assert len(forks) == len(PARENTS) * len(TASKS)
        for child, parent in forks:
            assert child.front == parent.front
            assert child.cached_tokens >= 0.95 * parent.prompt_tokens


Started = Callable[..., Iterator[dict[str, Any]]]


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def start(
    requests: Requests, gateway_of: Callable[..., GatewayServer], run_section: Any, tmp_path: Path
) -> Iterator[Started]:
    """Start engines whose model gives these answers to a parent, and yield the page's names for each parent."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(event_hooks={"response": [requests.see]}))

        def started(*answers: Any, kind: Any = OpenAIResponsesModel) -> Iterator[dict[str, Any]]:
            script = tmp_path / "script.json"
            known = [{"when": f"Found: {task}", "text": "All is known."} for task in TASKS]
            found = [{"when": task, "text": f"Found: {task}"} for task in TASKS]
            script.write_text(json.dumps([*known, *found, *answers]))
            engines = [stack.enter_context(EmulatorServer(replace(INSTANT, script=script))) for _ in range(3)]
            base: Any = {"base_url": gateway_of(*[engine.base_url for engine in engines]).base_url, "api_key": "none"}
            model = ChatOpenAI(**base, model=INSTANT.model, max_retries=0, http_client=client)
            tools: dict[str, Any] = {"tools": [tool(read_file)], "function_tools": [function_tool(read_file)]}
            aclient: Any = httpx.AsyncClient(event_hooks={"response": [requests.asee]})
            openai = AsyncOpenAI(**base, max_retries=0, http_client=aclient)
            for question, instructions in PARENTS.items():
                given = {"model": model, "agents_model": kind(INSTANT.model, openai), "tasks": TASKS, **tools}
                yield run_section(
                    "Sub-agents",
                    {**given, "instructions": instructions, "question": question, "close": openai.close},
                )

        yield started


def call_of(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


READ = {"calls": [call_of("read_file", path="changes.txt")]}
DELEGATE = {"calls": [call_of("delegate", task=task) for task in TASKS]}


def test_agents_of_langchain(start: Started, requests: Requests) -> None:
    for names in start(READ, DELEGATE):
        answer = names["agent"].invoke({"messages": [{"role": "user", "content": names["question"]}]})
        found = [message.content for message in answer["messages"][-3:]]
        assert found == [*[f"Found: {task}" for task in TASKS], "All is known."]
    requests.check_forks()


def test_branches_of_langgraph(start: Started, requests: Requests) -> None:
    for names in start({"text": "Look twice."}):
        answer = names["graph"].invoke({"messages": [{"role": "user", "content": names["question"]}]})
        assert {f"Found: {task}" for task in TASKS} <= {message.content for message in answer["messages"]}
    requests.check_forks()


def test_sub_agents_of_deepagents(start: Started, requests: Requests) -> None:
    tasks = [call_of("task", description=task, subagent_type="general-purpose") for task in TASKS]
    for names in start(READ, {"calls": tasks}):
        answer = names["deep_agent"].invoke({"messages": [{"role": "user", "content": names["question"]}]})
        assert answer["messages"][-1].content == "All is known."
    requests.check_forks()


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_runs_of_openai_agents(start: Started, requests: Requests, kind: Any) -> None:
    async def ask() -> None:
        names: dict[str, Any] = {}
        for names in start(READ, DELEGATE, kind=kind):
            assert await names["ask"](names["question"], "one") == "All is known."
        await names["close"]()

    asyncio.run(ask())
    requests.check_forks()
