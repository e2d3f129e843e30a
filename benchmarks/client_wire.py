"""Servers on free ports that record the prompts which pass, and what became of them."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise, takewhile
from typing import Any, NamedTuple

import uvicorn

from warmprefix_requests import RewriteRoute, restored
from warmprefix_requests.prompts import canonical_front, canonical_messages

__all__ = ["ROUTES", "RecordedRequest", "Recorder", "RoundRobin", "differences", "keeps_prefixes", "served"]

ROUTES: Mapping[str, RewriteRoute] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
_OF_THE_GATEWAY = ("stream_options", "cache_salt")
"""Fields that the gateway may add."""


class RecordedRequest(NamedTuple):
    """A request with a prompt."""

    path: str
    headers: list[tuple[str, str]]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The body."""
        body: dict[str, Any] = json.loads(self.content)
        return body

    @property
    def route(self) -> RewriteRoute:
        """The shape of the body."""
        return ROUTES[self.path]


@dataclass
class Recorder:
    """An ASGI application in front of another one; it keeps the requests with a prompt."""

    app: Any
    requests: list[RecordedRequest] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in ROUTES:
            await self.app(scope, receive, send)
            return
        pieces: list[bytes] = []
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]

        async def listen() -> Any:
            message = await receive()
            pieces.append(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.requests.append(RecordedRequest(scope["path"], headers, b"".join(pieces)))
            return message

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            await send(message)

        await self.app(scope, listen, answer)


class RoundRobin:
    """An ASGI application that gives each request to the next of several, as a balancer without a plan does."""

    def __init__(self, apps: Sequence[Any]) -> None:
        self._next = cycle(apps)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await next(self._next)(scope, receive, send)


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


def differences(sent: Sequence[RecordedRequest], arrived: Sequence[RecordedRequest]) -> int:
    """Return the number of requests that, with their references restored, are not what was sent, or did not arrive."""
    were_sent = Counter((request.path, _text(request.body)) for request in sent)
    were_restored = Counter((request.path, _text(restored(request.route, request.body))) for request in arrived)
    return max((were_sent - were_restored).total(), (were_restored - were_sent).total())


def keeps_prefixes(sent: Sequence[RecordedRequest], arrived: Sequence[RecordedRequest]) -> bool:
    """Return True if each prompt that arrived shares as many messages with the one before as those that were sent."""

    def shared(requests: Sequence[RecordedRequest]) -> list[int]:
        prompts = [_messages(request) for request in requests]
        return [
            len(list(takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))) for pair in pairwise(prompts)
        ]

    return all(after >= before for before, after in zip(shared(sent), shared(arrived), strict=True))


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in body.items() if name not in _OF_THE_GATEWAY})


def _messages(request: RecordedRequest) -> list[object]:
    body = request.body
    return [canonical_front(body), *canonical_messages(request.route, body)]
