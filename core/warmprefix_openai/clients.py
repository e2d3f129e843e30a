"""The OpenAI SDK's own HTTP clients, with a link."""

from __future__ import annotations

from functools import partial
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix_openai.transports import asend, send
from warmprefix_openai.writer import LinkWriter

try:
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["AsyncLinkClient", "LinkClient"]


class LinkClient(DefaultHttpxClient):
    """Client of the SDK's HTTP stack: httpx, or httpx2 since its version 3.

    It overrides `send` because each request passes it once, with its redirects, its signature and its proxies inside. A
    transport sits below these, and would have to choose the proxies again.
    """

    def __init__(self, writer: LinkWriter, **options: Any) -> None:
        super().__init__(**options)
        self._writer = writer

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._writer.open(request)
        forward = partial(super().send, stream=stream or exchange is not None, **options)
        response = send(self._writer, exchange, request, forward)
        if not stream and exchange is not None:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response


class AsyncLinkClient(DefaultAsyncHttpxClient):
    """A `LinkClient` for tasks."""

    def __init__(self, writer: LinkWriter, **options: Any) -> None:
        super().__init__(**options)
        self._writer = writer

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._writer.open(request)
        forward = partial(super().send, stream=stream or exchange is not None, **options)
        response = await asend(self._writer, exchange, request, forward)
        if not stream and exchange is not None:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response
