"""Shared by the tests of all integrations: emulated engines over HTTP, and real questions on real text."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import math
import os
import re
import runpy
import shutil
import socket
import sysconfig
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from warmprefix import ContextBlock
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, create_app
from warmprefix_tools.retriever import Bm25Retriever

Json = dict[str, Any]
T = TypeVar("T")

BUNDLE = "xquad_squad.text.jsonl.gz"
"""Real questions on real text, used if the folder `$WARMPREFIX_TRACES` holds this file."""
LIBRARY_FOLDERS = (
    *("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest"),
    *("urllib", "xml"),
)
"""Parts of the standard library whose documentation is the text otherwise; reading all of it takes six seconds."""
PASSAGES = 10
TURNS = 100
TURNS_PER_CONVERSATION = 4


@dataclass(frozen=True)
class Turn:
    """One question of a conversation, and the passages that a retriever found for it, best first."""

    conversation: str
    turn: int
    question: str
    passages: tuple[ContextBlock, ...]


@pytest.fixture(scope="session")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """The same questions and passages on every run."""
    folder = os.environ.get("WARMPREFIX_TRACES")
    if folder and (Path(folder) / BUNDLE).exists():
        return _turns_of_bundle(Path(folder) / BUNDLE)
    entries = read_standard_library(_part_of_standard_library(tmp_path_factory.mktemp("library")))
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [
        Turn(f"chat-{asked.conversation}", asked.turn, asked.text, retriever.retrieve(asked.query, PASSAGES))
        for asked in ask(entries, TURNS, seed=0)
    ]


def _part_of_standard_library(folder: Path) -> Path:
    for name in LIBRARY_FOLDERS:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, folder / name)
    return folder


def _turns_of_bundle(path: Path) -> list[Turn]:
    blocks: list[ContextBlock] = []
    questions: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        next(lines)
        for line in map(json.loads, lines):
            if "block" in line:
                blocks.append(ContextBlock(line["text"], id=f"p{line['block']}"))
            elif len(questions) < TURNS:
                questions.append(line["text"])
    retriever = Bm25Retriever(blocks)
    return [
        Turn(
            f"chat-{i // TURNS_PER_CONVERSATION}",
            i % TURNS_PER_CONVERSATION + 1,
            question,
            retriever.retrieve(question, PASSAGES),
        )
        for i, question in enumerate(questions)
    ]


class AnsweredRequest(NamedTuple):
    """A request that got an answer, and the usage in the answer."""

    body: Json
    prompt_tokens: int
    cached_tokens: int


class ServerThread:
    """A thread whose event loop serves all engines, each on its own port.

    Stopping a `uvicorn.Server` takes 0.2 s, so this class uses only uvicorn's HTTP protocol.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, app: ASGIApp) -> tuple[int, Callable[[], None]]:
        """Serve an application on a free port; returns the port, and a function that stops it."""
        config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None)
        config.load()
        protocol: Any = config.http_protocol_class
        state = ServerState()
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])

        async def start() -> asyncio.Server:
            return await self._loop.create_server(
                lambda: protocol(config=config, server_state=state, app_state={}, _loop=self._loop), sock=listener
            )

        server = self._run(start())

        async def stop() -> None:
            server.close()
            for connection in list(state.connections):
                connection.shutdown()
            if state.tasks:
                await asyncio.wait(state.tasks, timeout=1)
            for connection in list(state.connections):
                connection.transport.abort()

        return port, lambda: self._run(stop())

    def _run(self, steps: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result()


class Engine:
    """An emulated engine that records, breaks and scripts requests to it.

    Its usage counts the tokens that the emulated cache held. Its answers are noise unless a script gives them.
    """

    def __init__(self, thread: ServerThread) -> None:
        config = EmulatorConfig(kv_blocks=8192, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
        self.model = config.model
        self.bodies: list[Json] = []
        """Bodies of all requests, those that failed too."""
        self.answered: list[AnsweredRequest] = []
        self._failures = 0
        self._scripted: deque[Json] = deque()
        self._emulator: ASGIApp = create_app(config)
        port, self._stop = thread.listen(self._app)
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def fail_next(self, requests: int) -> None:
        """Answer the next `requests` requests with an internal server error."""
        self._failures = requests

    def script(self, *messages: Json) -> None:
        """Use these assistant messages as the next answers."""
        self._scripted.extend(messages)

    @property
    def prompts(self) -> list[str]:
        """The messages of each answered request, joined to one text."""
        return ["\n\n".join(_text(message) for message in answered.body["messages"]) for answered in self.answered]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in all answered requests."""
        return sum(answered.prompt_tokens for answered in self.answered)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return sum(answered.cached_tokens for answered in self.answered)

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that was found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self._emulator(scope, receive, send)
            return
        body = json.loads(await _whole_body(receive))
        self.bodies.append(body)
        if self._failures > 0:
            self._failures -= 1
            await _respond(send, 500, json.dumps({"error": {"message": "broken", "type": "InternalServerError"}}))
            return
        status, answer = await self._emulated(scope, body)
        if status != 200:
            await _respond(send, status, json.dumps(answer))
            return
        if self._scripted:
            message = self._scripted.popleft()
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            answer["choices"] = [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]
        usage = answer["usage"]
        self.answered.append(
            AnsweredRequest(body, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        )
        if body.get("stream"):
            await _respond(send, 200, "".join(_events(answer)), "text/event-stream")
        else:
            await _respond(send, 200, json.dumps(answer))

    async def _emulated(self, scope: Scope, body: Json) -> tuple[int, Json]:
        """Return the emulator's status and answer in one piece, for streaming requests too."""
        plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        plain.setdefault("max_tokens", plain.pop("max_completion_tokens", None) or 24)
        sent: list[Message] = []
        pending = [{"type": "http.request", "body": json.dumps(plain).encode(), "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await self._emulator(scope, receive, send)
        payload = b"".join(message.get("body", b"") for message in sent[1:])
        return int(sent[0]["status"]), json.loads(payload)


async def _whole_body(receive: Receive) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _respond(send: Send, status: int, body: str, content_type: str = "application/json") -> None:
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _events(answer: Json) -> Iterator[str]:
    """Yield the answer as a stream: its text, each tool call in pieces, the finish reason, the usage."""
    frame = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    [choice] = answer["choices"]
    message = choice["message"]
    deltas: list[Json] = [{"role": message["role"], "content": message.get("content")}]
    for i, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        pieces = [{"arguments": arguments[at : at + 30]} for at in range(0, len(arguments), 30)]
        begin = {**call, "function": {**call["function"], "arguments": ""}}
        deltas += [{"tool_calls": [{"index": i, **part}]} for part in (begin, *[{"function": p} for p in pieces])]
    for delta, reason in [*((delta, None) for delta in deltas), ({}, choice["finish_reason"])]:
        choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
        yield f"data: {json.dumps({**frame, 'choices': choices})}\n\n"
    yield f"data: {json.dumps({**frame, 'choices': [], 'usage': answer['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def _text(message: Json) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


@pytest.fixture
def readme_blocks() -> Callable[[str], list[str]]:
    """The unchanged code blocks of the README that import the given package."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    return lambda package: [block for block in blocks if f"from {package} import" in block]


@pytest.fixture
def run_section() -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Run the unchanged code blocks under a heading of docs/frameworks.md, one after the other; returns the names."""
    page = (Path(__file__).parents[2] / "docs/frameworks.md").read_text(encoding="utf-8")

    def run(heading: str, names: dict[str, Any]) -> dict[str, Any]:
        section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        assert blocks, heading
        for block in blocks:
            exec(compile(block, "frameworks.md", "exec", dont_inherit=True), names)
        return names

    return run


@pytest.fixture
def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, Engine], tuple[str, int]]:
    """Run an example against an engine; returns its output and its number of lines.

    It runs in this process, since importing a framework takes seconds. Warnings are errors here too.
    """

    def run(name: str, engine: Engine) -> tuple[str, int]:
        path = Path(__file__).parents[2] / "examples" / name
        for variable, value in (
            ("OPENAI_BASE_URL", engine.base_url),
            ("OPENAI_API_KEY", "none"),
            ("MODEL", engine.model),
        ):
            monkeypatch.setenv(variable, value)
        names = runpy.run_path(str(path), run_name="__main__")
        for name in {"client", "memory"} & names.keys():
            # The end of a process closes connections and databases.
            getattr(names[name], "close", lambda: None)()
        names.clear()
        with warnings.catch_warnings():
            # Connections that an example leaves open end here, and not in the event loop of a later test.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        return capsys.readouterr().out, len(path.read_text(encoding="utf-8").splitlines())

    return run


@pytest.fixture(scope="session")
def server_thread() -> Iterator[ServerThread]:
    """The thread that serves all engines."""
    with ServerThread() as thread:
        yield thread


@pytest.fixture
def start_engine(server_thread: ServerThread) -> Iterator[Callable[[], Engine]]:
    """Start any number of engines; each has its own cache."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Engine(server_thread))
