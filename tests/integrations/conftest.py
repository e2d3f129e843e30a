"""What the tests of every integration share: an engine over HTTP that tells what it was sent, and real questions."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from hypothesis import settings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmprefix import ContextBlock
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.demo.retriever import Bm25Retriever
from warmprefix_tools.emulator import EmulatorConfig, create_app

settings.register_profile("warmprefix", deadline=None)  # no test asserts a duration, so neither does Hypothesis
settings.load_profile("warmprefix")

Json = dict[str, Any]

BUNDLE = "xquad_squad.text.jsonl.gz"
"""Real text with real questions, used where the folder that `WARMPREFIX_TRACES` names has it."""
PASSAGES = 10
TURNS = 100
TURNS_A_CONVERSATION = 4


@dataclass(frozen=True)
class Turn:
    """One question of one conversation, and what a retriever found for it, best first."""

    conversation: str
    turn: int
    question: str
    passages: tuple[ContextBlock, ...]


@pytest.fixture(scope="session")
def turns() -> list[Turn]:
    """The same ones on every run."""
    folder = os.environ.get("WARMPREFIX_TRACES")
    if folder and (Path(folder) / BUNDLE).exists():
        return _turns_of_the_bundle(Path(folder) / BUNDLE)
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [
        Turn(f"chat-{asked.conversation}", asked.turn, asked.text, retriever.retrieve(asked.query, PASSAGES))
        for asked in ask(entries, TURNS, seed=0)
    ]


def _turns_of_the_bundle(path: Path) -> list[Turn]:
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
            f"chat-{i // TURNS_A_CONVERSATION}",
            i % TURNS_A_CONVERSATION + 1,
            question,
            retriever.retrieve(question, PASSAGES),
        )
        for i, question in enumerate(questions)
    ]


class Answered(NamedTuple):
    """A request that got an answer, and the usage that came with it."""

    body: Json
    prompt_tokens: int
    cached_tokens: int


class Engine:
    """The emulator on a free port, and in front of it what writes down, breaks and scripts.

    Usage counts what the emulator's cache really held. Its answers are noise unless a script says otherwise.
    """

    def __init__(self) -> None:
        config = EmulatorConfig(kv_blocks=8192, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
        self.model = config.model
        self.bodies: list[Json] = []
        """Every request that came, those that failed too."""
        self.answered: list[Answered] = []
        self._failures = 0
        self._scripted: deque[Json] = deque()
        self._emulator: ASGIApp = create_app(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def fail_next(self, requests: int) -> None:
        """Answer the next requests with an internal server error."""
        self._failures = requests

    def script(self, *messages: Json) -> None:
        """Give these assistant messages as the next answers."""
        self._scripted.extend(messages)

    @property
    def prompts(self) -> list[str]:
        """The messages of each answered request as one text."""
        return ["\n\n".join(_text(message) for message in answered.body["messages"]) for answered in self.answered]

    @property
    def prompt_tokens(self) -> int:
        """Of all answered requests."""
        return sum(answered.prompt_tokens for answered in self.answered)

    @property
    def cached_tokens(self) -> int:
        """Of these, found in the prefix cache."""
        return sum(answered.cached_tokens for answered in self.answered)

    @property
    def hit_ratio(self) -> float:
        """Of all answered requests, token-weighted."""
        return self.cached_tokens / self.prompt_tokens

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

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
        self.answered.append(Answered(body, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        if body.get("stream"):
            await _respond(send, 200, "".join(_events(answer)), "text/event-stream")
        else:
            await _respond(send, 200, json.dumps(answer))

    async def _emulated(self, scope: Scope, body: Json) -> tuple[int, Json]:
        """The emulator's answer in one piece, however it was asked for."""
        plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        plain.setdefault("max_tokens", plain.pop("max_completion_tokens", None) or 24)
        sent: list[Message] = []
        pending = [{"type": "http.request", "body": json.dumps(plain).encode(), "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await asyncio.Event().wait()  # the client never leaves
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
    """The answer as a stream: its text, each of its tool calls, the reason for its end, the usage."""
    frame = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    [choice] = answer["choices"]
    message = choice["message"]
    deltas: list[Json] = [{"role": message["role"], "content": message.get("content")}]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or ())]
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
    """The README's code blocks that import the given package, as they stand there."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    return lambda package: [block for block in blocks if f"from {package} import" in block]


@pytest.fixture
def start_engine() -> Iterator[Callable[[], Engine]]:
    """Start as many engines as a test wants; each has a cache of its own."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Engine())
