"""The parts of httpx and httpx2 that are used, which are the same in both. Neither is imported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

__all__ = ["AsyncInner", "Request", "Response", "SyncInner", "body_of", "remade"]


class Request(Protocol):
    """An outgoing request."""

    method: str
    url: Any
    headers: Any
    stream: Any
    extensions: Any

    @property
    def content(self) -> bytes: ...


class Response(Protocol):
    """A response whose body was not read yet, unless it was made with its body."""

    status_code: int
    headers: Any
    stream: Any
    extensions: Any

    @property
    def content(self) -> bytes: ...
    @property
    def is_closed(self) -> bool: ...
    def iter_bytes(self) -> Iterator[bytes]: ...
    def aiter_bytes(self) -> AsyncIterator[bytes]: ...


class SyncInner(Protocol):
    """`httpx.BaseTransport`."""

    def handle_request(self, request: Any, /) -> Any: ...
    def close(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any = None, error: Any = None, traceback: Any = None, /) -> Any: ...


class AsyncInner(Protocol):
    """`httpx.AsyncBaseTransport`."""

    async def handle_async_request(self, request: Any, /) -> Any: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, kind: Any = None, error: Any = None, traceback: Any = None, /) -> Any: ...


def body_of(request: Request) -> bytes | None:
    """Return a request's whole body; None if it comes bit by bit."""
    try:
        return request.content
    except RuntimeError:  # `RequestNotRead`
        return None


def remade(
    request: Request, *, without: str, content: bytes | None = None, added: Mapping[str, str] | None = None
) -> Request:
    """Return the request without a header, with another body, and with headers that it did not have."""
    dropped = {without.encode()} if content is None else {without.encode(), b"content-length"}
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in dropped]
    for name, value in (added or {}).items():
        if name not in request.headers:
            headers.append((name.encode(), value.encode()))
    if content is None:
        content = body_of(request)
    body: dict[str, Any] = {"stream": request.stream} if content is None else {"content": content}
    made: Any = request.__class__
    remade: Request = made(request.method, request.url, headers=headers, extensions=request.extensions, **body)
    return remade
