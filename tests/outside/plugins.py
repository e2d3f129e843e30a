"""Plugins in the real applications: installed as users do it, with and without a gateway, and removed again.

python run.py test --all clients
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client_plugins import GATEWAY, PLUGGED, PluggedAgent
from client_programs import ANSWER, LAND, QUESTIONS, SEA, Home, session_script
from client_wire import Recorder, differences, keeps_prefixes, served
from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_tools.emulator import EmulatorConfig, create_app

NO_GATEWAY = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Servers:
    """A gateway, and the engine behind it, which an application may ask directly, too."""

    home: Home
    sent: Recorder
    arrived: Recorder
    gateway: Gateway
    gateway_url: str

    def header(self, name: str) -> list[str | None]:
        """Return a header of each request that the gateway got."""
        return [dict(request.headers).get(name) for request in self.sent.requests]

    def sessions(self) -> list[str]:
        """Return the ids of the sessions that the gateway knows."""
        return [session.key for session in self.gateway._office.ledger.sessions]


@pytest.fixture
def servers_of(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    """Return a factory of servers whose engine answers as a script says; `home` asks the engine without the gateway."""
    with ExitStack() as stack:

        def make(script: Any, gateway: str | None = None) -> Servers:
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
            engine = stack.enter_context(served(arrived))
            inner = Gateway(GatewayOptions((f"{engine}/v1",)))
            sent = Recorder(inner)
            url = stack.enter_context(served(sent))
            home = Home(tmp_path, f"{engine}/v1", config.model, {GATEWAY: gateway or url})
            return Servers(home, sent, arrived, inner, url)

        yield make


def ask(agent: PluggedAgent, servers: Servers, questions: int) -> list[str]:
    """Ask the first questions of the session; return what the application printed."""
    command = agent.program.command()
    assert command is not None
    asked = enumerate(QUESTIONS[:questions])
    answers = [agent.program.ask(servers.home, command, question, turn > 0) for turn, question in asked]
    assert all(ANSWER in answer for answer in answers)
    return answers


def each(agents: Iterable[PluggedAgent]) -> pytest.MarkDecorator:
    """Run a test with each of these agents; it is skipped for those that are not installed."""
    return pytest.mark.parametrize(
        "agent",
        [
            pytest.param(
                agent,
                id=agent.program.name,
                marks=pytest.mark.skipif(agent.program.command() is None, reason="it is not installed"),
            )
            for agent in agents
        ],
    )


def script_of(agent: PluggedAgent, folder: Path) -> Any:
    return session_script(agent.program, folder / "work" / "sea.txt", folder / "work" / "land.txt")


@each(agent for agent in PLUGGED if agent.uses_gateway)
def test_a_session_goes_through_the_gateway(
    servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent
) -> None:
    servers = servers_of(script_of(agent, tmp_path))
    agent.program.prepare(servers.home)
    ask(agent, servers, 3)
    assert len(servers.sent.requests) >= 10
    assert set(servers.sent.statuses) == {200}
    assert len(servers.arrived.requests) == len(servers.sent.requests)  # none went past the gateway
    assert differences(servers.sent.requests, servers.arrived.requests) == 0
    names = servers.header(agent.session_header)
    assert len(set(names)) == 1
    assert servers.sessions() == names[:1]
    if agent.names_itself:
        assert set(servers.header("x-warmprefix-application")) == {agent.program.name}
    assert not any("x-warmprefix-application" in dict(request.headers) for request in servers.arrived.requests)


@each(PLUGGED)
def test_without_a_gateway_the_application_works(
    servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent
) -> None:
    servers = servers_of(script_of(agent, tmp_path), NO_GATEWAY)
    agent.program.prepare(servers.home)
    ask(agent, servers, 1)
    assert servers.arrived.requests
    assert not servers.sent.requests


@each(agent for agent in PLUGGED if agent.remove is not None)
def test_once_removed_nothing_is_left(servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent) -> None:
    servers = servers_of(script_of(agent, tmp_path))
    agent.program.prepare(servers.home)
    assert agent.remove is not None
    agent.remove(servers.home)
    ask(agent, servers, 1)
    assert not servers.sent.requests
    arrived = servers.arrived.requests
    assert not any("x-warmprefix-application" in dict(request.headers) for request in arrived)
    assert not any(b"ord for word the result" in request.content for request in arrived)


@each(agent for agent in PLUGGED if agent.program.name == "Hermes")
def test_hermes_makes_references_itself(
    servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent
) -> None:
    servers = servers_of(script_of(agent, tmp_path))
    agent.program.prepare(servers.home)
    ask(agent, servers, 3)
    requests = servers.arrived.requests
    assert requests[-1].content.count(b"ord for word the result") >= 2
    assert len({dict(request.headers).get("x-session-id") for request in requests}) == 1
    assert keeps_prefixes(requests, requests)


@each(agent for agent in PLUGGED if agent.program.name == "Hermes")
def test_hermes_writes_the_text_that_a_copied_reference_stands_for(
    servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent
) -> None:
    sea = tmp_path / "work" / "sea.txt"
    show = {"calls": [agent.program.show(sea)]}
    copied = f'[Word for word the result of the earlier call terminal({{"command":"cat {sea}"}}).]'
    copy = {"name": "write_file", "arguments": {"path": str(tmp_path / "work" / "copy.txt"), "content": copied}}
    servers = servers_of([show, show, {"calls": [copy]}, {"text": ANSWER}])
    agent.program.prepare(servers.home)
    ask(agent, servers, 1)
    first, second = [message for message in servers.arrived.requests[2].body["messages"] if message["role"] == "tool"]
    assert second["content"] == copied
    assert (tmp_path / "work" / "copy.txt").read_text() == first["content"]
