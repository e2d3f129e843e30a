"""References to repeated tool results inside another ASGI application, such as a proxy of your own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from warmprefix_gateway.body_encodings import decompressed, reader_of
from warmprefix_gateway.echo_watch import EchoedAnswer
from warmprefix_gateway.gateway_options import EchoHandling
from warmprefix_gateway.preparation import MOST_AT_ONCE, AbandonedWorkError, WorkLimit
from warmprefix_gateway.replies import error_body
from warmprefix_openai import is_stream
from warmprefix_requests import Echoes, prepared, read_call, with_references

__all__ = ["ReferencesMiddleware"]

_log = logging.getLogger("warmprefix.gateway")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Any, Receive, Any], Awaitable[None]]


class ReferencesMiddleware:
    """Replaces repeated tool results in the bodies of chat completions, responses and messages.

        app.add_middleware(ReferencesMiddleware, keep_tools=["deploy"])

    Answers get the texts back: a reference that the model copies into the arguments of a tool call becomes the text
    that it stands for. Other requests, larger bodies, and bodies in which nothing is repeated pass as they came, and so
    does a request with which anything fails here.

    Args:
        app: The application.
        keep_tools: Names of tools whose results always stay.
        echoes: What becomes of references in arguments: their text, an error, or nothing else.
        max_body_bytes: Larger bodies are not read.
    """

    def __init__(
        self,
        app: App,
        *,
        keep_tools: Collection[str] = (),
        echoes: EchoHandling = "restore",
        max_body_bytes: int = 64 << 20,
    ) -> None:
        self._app = app
        self._keep_tools = frozenset(keep_tools)
        self._echoes: EchoHandling = echoes
        self._most = max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Any) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
        encoding = headers.pop("content-encoding", "")
        is_prompt = read_call(scope.get("method", ""), scope.get("path", ""), headers, b'{"a":1}') is not None
        if scope["type"] != "http" or not is_prompt:
            await self._app(scope, receive, send)
            return
        content = bytearray()
        message = await receive()
        while message["type"] == "http.request":
            content += message.get("body", b"")
            if not message.get("more_body") or len(content) > self._most:
                break
            message = await receive()
        first: Message = {"type": "http.request", "body": bytes(content), "more_body": bool(message.get("more_body"))}
        if message["type"] == "http.request" and not first["more_body"] and len(content) <= self._most:
            rewritten = await self._rewritten(scope["path"], headers, first["body"], encoding)
            if rewritten is not None:
                first["body"], echoes = rewritten
                new = {b"content-length": str(len(first["body"])).encode()}
                if echoes and self._echoes != "pass":
                    new[b"accept-encoding"] = b"identity"  # so that the answer can be read
                    send = _EchoedSend(send, echoes, self._echoes, scope["path"])
                changed = {b"content-encoding", *new}
                others = [pair for pair in scope["headers"] if pair[0].lower() not in changed]
                scope = {**scope, "headers": [*others, *new.items()]}
        waiting = [first] if message["type"] == "http.request" else [message]

        async def receive_again() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, receive_again, send)

    async def _rewritten(
        self, path: str, headers: dict[str, str], content: bytes, encoding: str
    ) -> tuple[bytes, Echoes] | None:
        """Return the body with references, without its compression, and these; None if it passes as it came.

        Large bodies are read in a thread, so that the application's other requests go on meanwhile.
        """
        limit = WorkLimit()
        if len(content) <= MOST_AT_ONCE and not encoding:
            return self._read(path, headers, content, encoding, limit)
        try:
            return await asyncio.to_thread(self._read, path, headers, content, encoding, limit)
        finally:
            limit.is_abandoned = True

    def _read(
        self, path: str, headers: dict[str, str], content: bytes, encoding: str, limit: WorkLimit
    ) -> tuple[bytes, Echoes] | None:
        try:
            plain = decompressed(content, encoding, self._most)
            call = None if plain is None else read_call("POST", path, headers, plain)
            if call is None:
                return None
            sent = prepared(call, [with_references(self._keep_tools, limit.check)])
            return None if sent.rewritten is None else (sent.content, sent.rewritten.echoes)
        except AbandonedWorkError:
            return None
        except Exception:
            _log.warning("a request could not be read; it passed as it came")
            return None


class _EchoedSend:
    """The way of an answer to the client, without echoes. An answer in one piece is sent when it is whole."""

    def __init__(self, send: Any, echoes: Echoes, handling: EchoHandling, path: str) -> None:
        self._send = send
        self._echoes = echoes
        self._handling: EchoHandling = handling
        self._path = path
        self._begin: Message | None = None
        self._answer: EchoedAnswer | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._answer is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            await self._pass(self._answer, message)

    async def _start(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        if message["status"] >= 300:
            await self._send(message)
            return
        streams = is_stream(headers.get(b"content-type", b"").decode("latin-1"), asked=False)
        reader = reader_of(headers.get(b"content-encoding", b"").decode("latin-1"), streams)
        self._answer = EchoedAnswer(reader, self._echoes, self._handling)
        others = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"content-length"]
        self._begin = {**message, "headers": others}
        if self._answer.streams:
            await self._send_begin()

    async def _pass(self, answer: EchoedAnswer, message: Message) -> None:
        data = answer.feed(message.get("body", b""))
        has_more = bool(message.get("more_body"))
        if not has_more:
            data += answer.finish()
        if not has_more and self._begin is not None and answer.refused:
            body = error_body(self._path, 502, answer.refusal)
            self._begin = {**self._begin, "status": 502, "headers": [(b"content-type", b"application/json")]}
            await self._send_begin()
            await self._send({"type": "http.response.body", "body": body})
        elif data or not has_more:
            await self._send_begin()
            await self._send({**message, "body": data})

    async def _send_begin(self) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            await self._send(begin)
