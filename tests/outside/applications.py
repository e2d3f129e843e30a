"""Real applications through the gateway to the emulator: several turns with repeated tool results.

    python run.py test --all clients

Each application is installed as its users install it and runs without a screen. It asks a scripted emulator, whose
answers make it call its own tools. Recorders in front of the gateway and behind it compare what the application sent
with what arrived. `WARMPREFIX_CLIENTS` names a folder that has the applications already.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_programs import AGENTS, ANSWER, LAND, QUESTIONS, SEA, AgentProgram, Home, session_script
from client_wire import Recorder, differences, keeps_prefixes, served
from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_tools.emulator import EmulatorConfig, create_app


@dataclass(frozen=True)
class Session:
    """One run of an application, and what was recorded of it."""

    home: Home
    sent: Recorder
    arrived: Recorder

    def check(self, references: int) -> None:
        """Check that nothing but references, this many in the longest prompt, differs from what was sent."""
        assert self.sent.requests
        assert set(self.sent.statuses) == {200}
        assert differences(self.sent.requests, self.arrived.requests) == 0
        assert keeps_prefixes(self.sent.requests, self.arrived.requests)
        texts = [json.dumps(request.body) for request in self.arrived.requests]
        assert max(text.count("ord for word the result of the earlier call") for text in texts) == references


@pytest.fixture
def session_of(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Return a factory of sessions, whose answers are those of a script; `land.txt` and `sea.txt` can be read."""
    with ExitStack() as stack:

        def make(script: Sequence[Mapping[str, Any]]) -> Session:
            (tmp_path / "work").mkdir()
            (tmp_path / "work" / "sea.txt").write_text(SEA)
            (tmp_path / "work" / "land.txt").write_text(LAND)
            (tmp_path / "script.json").write_text(json.dumps(script))
            config = EmulatorConfig(
                kv_blocks=40_000,
                prefill_rate=math.inf,
                base_ttft_ms=0,
                decode_rate=math.inf,
                script=tmp_path / "script.json",
            )
            arrived = Recorder(create_app(config))
            upstream = stack.enter_context(served(arrived))
            sent = Recorder(Gateway(GatewayOptions((f"{upstream}/v1",))))
            base_url = f"{stack.enter_context(served(sent))}/v1"
            return Session(Home(tmp_path, base_url, config.model), sent, arrived)

        yield make


REFERENCES = {
    "OpenCode": 4,
    "Codex": 0,  # its results begin with the time that a command took
    "Claude Code": 3,  # it does not repeat a read itself
    "OpenClaw": 4,
    "Hermes": 3,  # as Claude Code
}
"""Results that are references in the last prompt of a session with seven calls."""


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_in_three_turns(session_of: Callable[..., Session], tmp_path: Path, agent: AgentProgram) -> None:
    command = agent.command()
    if command is None:
        pytest.skip(f"{agent.name} is not installed")
    one, other = tmp_path / "work" / "sea.txt", tmp_path / "work" / "land.txt"
    session = session_of(session_script(agent, one, other))
    agent.prepare(session.home)
    for turn, question in enumerate(QUESTIONS):
        assert ANSWER in agent.ask(session.home, command, question, turn > 0)
    session.check(REFERENCES[agent.name])
    page = httpx.get(session.home.base_url.removesuffix("/v1")).text
    assert f"{agent.name} (1)" in page


AGENT = """
import asyncio, sys
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def read(path: str) -> str:
    return open(path).read()
kind = OpenAIResponsesModel if sys.argv[3] == "responses" else OpenAIChatCompletionsModel
model = kind(model=sys.argv[2], openai_client=AsyncOpenAI(base_url=sys.argv[1], api_key="x"))
agent = Agent(name="reader", instructions="Be brief.", model=model, tools=[read])
print(asyncio.run(Runner.run(agent, "How deep is the sea?")).final_output)
"""


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(session_of: Callable[..., Session], tmp_path: Path, api: str) -> None:
    """The framework that PageIndex uses."""
    pytest.importorskip("agents")
    call = {"calls": [{"name": "read", "arguments": {"path": str(tmp_path / "work" / "sea.txt")}}]}
    session = session_of([call, call, call, {"text": ANSWER}])
    home = session.home
    assert ANSWER in home.run(sys.executable, "-c", AGENT, home.base_url, home.model, api)
    session.check(references=2)
