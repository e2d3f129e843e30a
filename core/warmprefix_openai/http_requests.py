"""Requests of httpx and httpx2 with another body. No I/O."""

from __future__ import annotations

from typing import Any

from warmprefix_openai.plans import PLAN_HEADER
from warmprefix_requests import OutgoingRequest

__all__ = ["body_of", "remade", "with_body", "without_body"]

_OF_ONE = frozenset({b"content-length", b"idempotency-key", b"x-request-id"})
"""Headers that another request must not repeat."""


def body_of(request: Any) -> Any:
    """Return a request's whole body; None if it comes bit by bit."""
    try:
        return request.content
    except RuntimeError:  # `RequestNotRead`
        return None


def with_body(request: Any, outgoing: OutgoingRequest) -> Any:
    """Return a request of the same kind with the body of another attempt."""
    return remade(request, outgoing.encode())


def remade(request: Any, content: bytes | None) -> Any:
    """Return the request without the header of its plan, and with this body."""
    dropped = {PLAN_HEADER.encode()} if content is None else {PLAN_HEADER.encode(), b"content-length"}
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in dropped]
    body: dict[str, Any] = {"stream": request.stream} if content is None else {"content": content}
    return type(request)(request.method, request.url, headers=headers, extensions=request.extensions, **body)


def without_body(request: Any, seconds: float) -> Any:
    """Return a request to the same place, without a body, each step of which takes this long at most."""
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _OF_ONE]
    given = request.extensions.get("timeout", {})
    timeout = {name: min(seconds, own or seconds) for name, own in given.items()}
    extensions = {**request.extensions, "timeout": timeout}
    return type(request)(request.method, request.url, headers=headers, extensions=extensions)
