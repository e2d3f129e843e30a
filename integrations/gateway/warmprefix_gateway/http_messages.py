"""HTTP messages: which headers pass, in both directions, byte for byte, and answers that the gateway gives itself."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any

from warmprefix.errors import MissingExtraError

try:
    from multidict import CIMultiDict
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = [
    "OF_ENGINES",
    "ClientAnswer",
    "RawHeaders",
    "Send",
    "answer_headers",
    "betas_with",
    "error_body",
    "has_repeated",
    "is_messages",
    "reply",
    "upstream_headers",
]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RawHeaders = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
_OURS = {"host", "expect", "x-warmprefix-application", "x-warmprefix-references", "x-warmprefix-order"}

OF_ENGINES = frozenset(
    {
        *("x-data-parallel-rank", "x-dp-rank", "x-smg-target-worker", "x-worker-instance-id"),  # choose a replica
        *("x-gateway-destination-endpoint", "x-prefill-instance-id", "x-prefiller-host-port"),
        *("x-smg-priority", "x-gateway-inference-objective", "x-gateway-inference-fairness-id"),
        "x-request-id",  # becomes the engine's own id of the request, which must be unique among all tenants
        "x-body-compressed",  # makes SGLang read another body than the gateway
        *("x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"),
    }
)
"""Headers with which a client could choose what an engine or a proxy in front of it does; none of a tenant's pass."""

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def upstream_headers(raw: RawHeaders, left_out: Collection[str]) -> CIMultiDict[str]:
    """Return a client's headers for the upstream, without those of one connection and `left_out`, in lower case.

    The values are what the HTTP client encodes in UTF-8. A value that is not UTF-8 counts as Latin-1.

    Raises:
        ValueError: A value has a control character.
    """
    named = {part.strip().lower() for name, value in raw if name.lower() == b"connection" for part in value.split(b",")}
    hidden = {*_HOP_BY_HOP, *_OURS, *left_out, *(name.decode("latin-1") for name in named)}
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in raw:
        text = name.decode("latin-1")
        if text.lower() in hidden:
            continue
        if _FORBIDDEN.search(value):
            raise ValueError(f"the value of {text} has a control character")
        try:
            headers.add(text, value.decode())
        except UnicodeDecodeError:
            headers.add(text, value.decode("latin-1"))
    return headers


def answer_headers(raw: RawHeaders, *, without_length: bool) -> list[tuple[bytes, bytes]]:
    """Return an upstream's headers for the client, as they came.

    Raises:
        ValueError: One of them cannot be sent.
    """
    hidden = {*_HOP_BY_HOP, "content-length"} if without_length else _HOP_BY_HOP
    passed = [(name, value) for name, value in raw if name.decode("latin-1").lower() not in hidden]
    if not all(_NAME.fullmatch(name) and not _FORBIDDEN.search(value) for name, value in passed):
        raise ValueError("a header of the answer has a control character")
    return passed


def betas_with(raw: RawHeaders, beta: str) -> str:
    """Return the value of `anthropic-beta` with those that the client asks for, and another one."""
    given = [value.decode("latin-1") for name, value in raw if name.lower() == b"anthropic-beta"]
    return ",".join([*given, beta])


def has_repeated(raw: RawHeaders, names: Collection[str]) -> bool:
    """Return True if one of these headers is there twice, so that two servers could read another one each."""
    found = [name.lower().decode("latin-1") for name, _ in raw]
    return any(found.count(name) > 1 for name in names)


class ClientAnswer:
    """The answer to the client, which begins with its first byte at the latest.

    Args:
        send: Sends a message to the client.
        status: Of the answer.
        headers: Of the answer.
        holds: Let each piece wait for the next one, so that the client has the whole answer only after `finish`.
    """

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], *, holds: bool = False) -> None:
        self._send = send
        self._begin = {"type": "http.response.start", "status": status, "headers": headers}
        self._holds = holds
        self._held = b""
        self.has_started = False

    async def start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send(self._begin)

    async def send(self, data: bytes) -> None:
        if self._holds:
            data, self._held = self._held, data
        if data:
            await self.start()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, rest: bytes) -> None:
        await self.start()
        await self._send({"type": "http.response.body", "body": self._held + rest, "more_body": False})

    async def break_off(self, rest: bytes) -> None:
        """Send what there is; the answer stays without its end."""
        self._holds, held = False, self._held
        await self.start()
        await self.send(held + rest)


# -- answers of the gateway itself

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def is_messages(path: str) -> bool:
    """Return True for a route of Anthropic's API."""
    return path.rstrip("/").endswith(("/messages", "/messages/count_tokens"))


def error_body(path: str, status: int, message: str) -> bytes:
    """Return the body of an error, in Anthropic's shape for its routes and in OpenAI's for all others.

    >>> error_body("/v1/chat/completions", 502, "no upstream answers")
    b'{"error": {"message": "no upstream answers", "type": "api_error", "param": null, "code": 502}}'
    """
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if is_messages(path):
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


async def reply(send: Send, status: int, kind: bytes, body: bytes, more: Collection[tuple[bytes, bytes]] = ()) -> None:
    """Send a whole answer, with more headers if given."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
