"""Plugins in the real applications: installed as users do it, with and without a gateway, and removed again.

python run.py test --all clients
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from client_plugins import GATEWAY, PLUGGED, PluggedAgent, install_packages, with_packages
from client_programs import ANSWER, LAND, QUESTIONS, ROOT, SEA, Home, installed, session_script
from client_wire import Recorder, differences, keeps_prefixes, served
from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_tools.emulator import EmulatorConfig, create_app

NO_GATEWAY = "http://127.0.0.1:9"
SPOKEN = "no model ran"
"""What the engine says to a prompt without tools."""


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
    assert not any(b"x-anthropic-billing-header" in request.content for request in servers.arrived.requests)
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
    assert not any(b"ord for word the " in request.content for request in arrived)


@each(agent for agent in PLUGGED if agent.program.name == "Hermes")
def test_hermes_makes_references_itself(
    servers_of: Callable[..., Servers], tmp_path: Path, agent: PluggedAgent
) -> None:
    servers = servers_of(script_of(agent, tmp_path))
    agent.program.prepare(servers.home)
    ask(agent, servers, 3)
    requests = servers.arrived.requests
    assert requests[-1].content.count(b"ord for word the ") >= 2
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


@pytest.mark.parametrize("is_there", [True, False])
def test_claude_codes_settings(servers_of: Callable[..., Servers], is_there: bool) -> None:
    claude = next(agent for agent in PLUGGED if agent.program.name == "Claude Code").program.command()
    if claude is None:
        pytest.skip("Claude Code is not installed")
    servers = servers_of([{"text": ANSWER}])
    home = servers.home
    settings = (ROOT / "integrations" / "claude_code" / "settings.json").read_text()
    gateway = servers.gateway_url if is_there else NO_GATEWAY
    home.write(".claude/settings.json", settings.replace("http://127.0.0.1:8080", gateway))
    variables = {
        "ANTHROPIC_API_KEY": "x",
        "ANTHROPIC_MODEL": home.model,
        "ANTHROPIC_SMALL_FAST_MODEL": home.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "IS_SANDBOX": "1",
        "PATH": f"{claude.parent}:{os.environ['PATH']}",
    }
    ask = 'claude -p --output-format stream-json --verbose "How deep is the sea?" || true'  # it fails without a gateway
    printed = home.run("sh", "-c", ask, **variables)
    assert (ANSWER in printed) is is_there
    assert ("warmprefix: no gateway answers" in printed) is not is_there
    assert bool(servers.sent.requests) is is_there
    assert len(servers.arrived.requests) == len(servers.sent.requests)
    assert not any(b"x-anthropic-billing-header" in request.content for request in servers.arrived.requests)


LIBRARY = """
import asyncio, sys
import litellm
from warmprefix_plugins.litellm_callback import GatewayCallback
litellm.callbacks = [GatewayCallback()]
async def ask(base_url):
    answer = await litellm.acompletion(
        model=f"openai/{sys.argv[1]}", api_base=base_url, api_key="x", litellm_session_id="talk 7",
        messages=[{"role": "user", "content": "How deep is the sea?"}],
    )
    print(answer.choices[0].message.content)
asyncio.run(ask(sys.argv[2]))
asyncio.run(ask(sys.argv[3]))
"""


@pytest.fixture
def litellm(servers_of: Callable[..., Servers]) -> tuple[Servers, Path]:
    """Return servers, and the folder with the programs of LiteLLM's environment, which has the callback."""
    program = installed("litellm", "bin/litellm")
    if program is None:
        pytest.skip("LiteLLM is not installed")
    servers = servers_of([])
    install_packages(servers.home)
    return replace(servers, home=with_packages(servers.home)), program.parent


def test_litellm_as_a_library_names_the_session_to_the_gateway_only(litellm: tuple[Servers, Path]) -> None:
    servers, programs = litellm
    bases = f"{servers.gateway_url}/v1", servers.home.base_url
    assert servers.home.run(programs / "python", "-c", LIBRARY, servers.home.model, *bases).count(SPOKEN) == 2
    assert servers.header("x-session-id") == ["talk 7"]
    assert servers.header("x-warmprefix-application") == ["LiteLLM"]
    direct = dict(servers.arrived.requests[1].headers)
    assert "x-session-id" not in direct
    assert "x-warmprefix-application" not in direct


@pytest.mark.parametrize("is_there", [True, False])
def test_litellms_proxy(litellm: tuple[Servers, Path], is_there: bool) -> None:
    servers, programs = litellm
    home = servers.home
    found = home.run(programs / "python", "-c", "from importlib.util import find_spec; print(find_spec('backoff'))")
    if found.strip() == "None":
        pytest.skip("LiteLLM's proxy is not installed")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]

    def model(name: str, base: str) -> dict[str, Any]:
        parameters = {"model": f"openai/{home.model}", "api_base": base, "api_key": "x"}
        return {"model_name": name, "litellm_params": {**parameters, "num_retries": 0}}

    gateway = servers.gateway_url if is_there else NO_GATEWAY
    home.write(
        "litellm.yaml",
        {
            "model_list": [model("sea", f"{gateway}/v1"), model("direct", home.base_url)],
            "litellm_settings": {
                "callbacks": "warmprefix_plugins.litellm_callback.gateway_callback",
                "fallbacks": [{"sea": ["direct"]}],
            },
        },
    )
    key = f"sk-{'7' * 40}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home.folder), "LITELLM_MASTER_KEY": key}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # in place of the newest from its repository
    environment |= {**home.variables, GATEWAY: gateway}
    listens = ("--host", "127.0.0.1", "--port", f"{port}")
    command: list[str | Path] = [programs / "litellm", "--config", home.folder / "litellm.yaml", *listens]
    log = home.folder / "litellm.log"
    with log.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as proxy:
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=60)  # until it listens
            for stream in (False, True):
                answer: Any = client.chat.completions.create(
                    model="sea",
                    messages=[{"role": "user", "content": "How deep is the sea?"}],
                    stream=stream,
                    extra_headers={"x-litellm-session-id": "talk 7"},
                )
                text = answer.choices[0].message.content if not stream else ""
                for chunk in answer if stream else ():
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                assert SPOKEN in text
        finally:
            proxy.terminate()
    assert log.read_text().count("no gateway at ") == (0 if is_there else 1)
    assert len(servers.arrived.requests) == 2
    assert servers.header("x-session-id") == (["talk 7"] * 2 if is_there else [])
    assert servers.header("x-warmprefix-application") == (["LiteLLM"] * 2 if is_there else [])
