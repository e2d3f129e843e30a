"""The OpenAI SDK's own HTTP clients, with a link."""

from __future__ import annotations

from typing import Any, cast

from warmprefix.errors import MissingExtraError
from warmprefix.openai.tracker import PlanTracker
from warmprefix.openai.transports import asend, send

try:
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["AsyncLinkClient", "LinkClient"]

# The clients override `send` because each request passes it once, with its redirects, its signature and its proxies
# inside. A transport sits below these, and would have to choose the proxies again.


class LinkClient(DefaultHttpxClient):
    """Client of the SDK's HTTP stack: httpx, or httpx2 since its version 3."""

    def __init__(self, tracker: PlanTracker, **options: Any) -> None:
        super().__init__(**options)
        self._tracker = tracker

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._tracker.open(request)
        if exchange is None:
            return super().send(request, stream=stream, **options)
        sent = super().send
        response = send(
            self._tracker, exchange, request, lambda request: sent(cast(Any, request), stream=True, **options)
        )
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response


class AsyncLinkClient(DefaultAsyncHttpxClient):
    """A `LinkClient` for tasks."""

    def __init__(self, tracker: PlanTracker, **options: Any) -> None:
        super().__init__(**options)
        self._tracker = tracker

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._tracker.open(request)
        if exchange is None:
            return await super().send(request, stream=stream, **options)
        sent = super().send
        response = await asend(
            self._tracker, exchange, request, lambda request: sent(cast(Any, request), stream=True, **options)
        )
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response
