"""References to repeated tool results inside another ASGI application, such as a proxy of your own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from warmprefix.dedup import RewriteLevel, rewrite
from warmprefix.openai import read_call
from warmprefix_gateway.body_encodings import decompressed
from warmprefix_gateway.outgoing import with_references

__all__ = ["ReferencesMiddleware"]

_log = logging.getLogger("warmprefix.gateway")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Any, Receive, Any], Awaitable[None]]


class ReferencesMiddleware:
    """Replaces repeated tool results in the bodies of chat completions, responses and messages.

        app.add_middleware(ReferencesMiddleware, keep_tools=["deploy"])

    Other requests, larger bodies, and bodies in which nothing is repeated pass as they came; so does a request with
    which anything fails here.

    Args:
        app: The application.
        keep_tools: Names of tools whose results always stay.
        level: Which repeats become references; see `warmprefix.dedup.rewrite`.
        max_body_bytes: Larger bodies are not read.

    Raises:
        ValueError: `level` is unknown.
    """

    def __init__(
        self,
        app: App,
        *,
        keep_tools: Collection[str] = (),
        level: RewriteLevel = "exact",
        max_body_bytes: int = 64 << 20,
    ) -> None:
        rewrite("chat", {}, level=level)  # checks the level
        self._app = app
        self._keep_tools = frozenset(keep_tools)
        self._level: RewriteLevel = level
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
            rewritten = self._rewritten(scope["path"], headers, first["body"], encoding)
            if rewritten is not None:
                first["body"] = rewritten
                changed = (b"content-length", b"content-encoding")
                others = [pair for pair in scope["headers"] if pair[0].lower() not in changed]
                scope = {**scope, "headers": [*others, (b"content-length", str(len(rewritten)).encode())]}
        waiting = [first] if message["type"] == "http.request" else [message]

        async def receive_again() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, receive_again, send)

    def _rewritten(self, path: str, headers: dict[str, str], content: bytes, encoding: str) -> bytes | None:
        """Return the body with references, without its compression; None if it passes as it came."""
        try:
            plain = decompressed(content, encoding, self._most)
            call = None if plain is None else read_call("POST", path, headers, plain)
            made = None if call is None else with_references(call, self._keep_tools, self._level)
            return made[0].content if made is not None and made[1] else None
        except Exception:
            _log.warning("a request could not be read; it passed as it came")
            return None
