"""Real applications through the gateway to the emulator: several turns with repeated tool results.

    python run.py test --all clients

Each application is installed as its users install it and runs without a screen. It asks a scripted emulator, whose
answers make it call its own tools. Recorders in front of the gateway and behind it compare what the application sent
with what arrived.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_requests import RewriteRoute, restored
from warmprefix_tools.emulator import EmulatorConfig, create_app

ROOT = Path(__file__).parents[2]
NODE = ROOT / ".venv-clients" / "node" / "node_modules" / ".bin"
"""Where `run.py` installs the applications that come from npm."""
ANSWER = "It is 3,688 metres deep."
SEA = "The sea is 3,688 metres deep on average.\n" * 60
ROUTES: Mapping[str, RewriteRoute] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}


@dataclass
class Recorder:
    """An ASGI application in front of another one; it keeps the bodies of requests with a prompt."""

    app: Any
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in ROUTES:
            await self.app(scope, receive, send)
            return
        pieces: list[bytes] = []

        async def listen() -> Any:
            message = await receive()
            pieces.append(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.bodies.append((scope["path"], json.loads(b"".join(pieces))))
            return message

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            await send(message)

        await self.app(scope, listen, answer)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application on a free port."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@dataclass
class Session:
    """One run of an application."""

    home: Path
    base_url: str
    model: str
    sent: Recorder
    arrived: Recorder

    def run(self, *command: str | Path, **variables: str) -> str:
        """Run a command in the folder of the file to read; return what it printed."""
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment |= {"HOME": str(self.home), **variables}
        done = subprocess.run(
            command,
            cwd=self.home / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout

    def check(self, references: int) -> None:
        """Check that nothing but this many references, and the gateway's own fields, differs from what was sent."""
        assert self.sent.bodies
        assert set(self.sent.statuses) == {200}
        assert len(self.sent.bodies) == len(self.arrived.bodies)
        expected = [(path, text_of(body)) for path, body in self.sent.bodies]
        found = 0
        for path, body in self.arrived.bodies:
            found += json.dumps(body).count("ord for word the result of the earlier call")
            assert (path, text_of(restored(ROUTES[path], body))) in expected
        assert found == references


def text_of(body: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in body.items() if name not in ("stream_options", "cache_salt")})


@pytest.fixture
def session_of(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Return a factory of sessions in which the application makes one call three times."""
    with ExitStack() as stack:

        def make(tool: str, arguments: Mapping[str, Any]) -> Session:
            (tmp_path / "work").mkdir()
            (tmp_path / "work" / "sea.txt").write_text(SEA)
            script = tmp_path / "script.json"
            script.write_text(
                json.dumps([*[{"calls": [{"name": tool, "arguments": arguments}]}] * 3, {"text": ANSWER}])
            )
            config = EmulatorConfig(
                kv_blocks=40_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf, script=script
            )
            arrived = Recorder(create_app(config))
            upstream = stack.enter_context(served(arrived))
            sent = Recorder(Gateway(GatewayOptions((f"{upstream}/v1",))))
            return Session(tmp_path, f"{stack.enter_context(served(sent))}/v1", config.model, sent, arrived)

        yield make


def installed(name: str, folder: Path) -> Path:
    command = folder / name
    if not command.exists():
        pytest.skip(f"{name} is not installed in {folder}")
    return command


def test_opencode(session_of: Callable[..., Session], tmp_path: Path) -> None:
    command = installed("opencode", NODE)
    session = session_of("read", {"filePath": str(tmp_path / "work" / "sea.txt")})
    options = {"baseURL": session.base_url, "apiKey": "x"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {session.model: {"name": "emulator"}}}
    (tmp_path / "work" / "opencode.json").write_text(
        json.dumps({"provider": {"gateway": provider}, "autoupdate": False})
    )
    assert ANSWER in session.run(command, "run", "-m", f"gateway/{session.model}", "How deep is the sea?")
    session.check(references=1 + 2)


def test_codex(session_of: Callable[..., Session], tmp_path: Path) -> None:
    """Its results begin with the time that a command took, so they are never equal."""
    command = installed("codex", NODE)
    session = session_of("exec_command", {"cmd": f"cat {tmp_path}/work/sea.txt"})
    (tmp_path / ".codex").mkdir()
    provider = f'name = "gateway"\nbase_url = "{session.base_url}"\nwire_api = "responses"\nenv_key = "GATEWAY_KEY"\n'
    settings = f'model = "{session.model}"\nmodel_provider = "gateway"\n[model_providers.gateway]\n{provider}'
    (tmp_path / ".codex" / "config.toml").write_text(settings)
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    assert ANSWER in session.run(command, "exec", *flags, "How deep is the sea?", GATEWAY_KEY="x")
    session.check(references=0)


def test_hermes_agent(session_of: Callable[..., Session], tmp_path: Path) -> None:
    """It refers to repeated reads itself."""
    command = installed("hermes", ROOT / ".venv-hermes" / "bin")
    session = session_of("read_file", {"path": str(tmp_path / "work" / "sea.txt")})
    (tmp_path / ".hermes").mkdir()
    model = {"default": session.model, "provider": "custom", "base_url": session.base_url, "api_key": "x"}
    settings = {"model": {**model, "context_length": 131_072}}
    (tmp_path / ".hermes" / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    assert ANSWER in session.run(command, "-z", "How deep is the sea?", OPENAI_API_KEY="x")
    session.check(references=0)


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
    session = session_of("read", {"path": str(tmp_path / "work" / "sea.txt")})
    assert ANSWER in session.run(sys.executable, "-c", AGENT, session.base_url, session.model, api)
    session.check(references=1 + 2)
