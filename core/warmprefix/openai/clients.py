"""The OpenAI SDK's own HTTP clients, with a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from warmprefix.errors import MissingExtraError
from warmprefix.openai.transports import asend, send

try:
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

if TYPE_CHECKING:
    from warmprefix.openai.link import EngineLink

__all__ = ["AsyncLinkClient", "LinkClient"]

# Whatever a client does ends in `send`, and there all that belongs to one request is inside: redirects, a signature of
# the body, proxies. A transport stands below these, and would have to rebuild the choice of proxies besides.


class LinkClient(DefaultHttpxClient):
    """Of the HTTP stack that the SDK uses: httpx, or httpx2 since its version 3."""

    def __init__(self, link: EngineLink, **options: Any) -> None:
        super().__init__(**options)
        self._link = link

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._link.open(request)
        if exchange is None:
            return super().send(request, stream=stream, **options)
        sent = super().send
        response = send(self._link, exchange, request, lambda request: sent(cast(Any, request), stream=True, **options))
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response


class AsyncLinkClient(DefaultAsyncHttpxClient):
    """`LinkClient`, for tasks."""

    def __init__(self, link: EngineLink, **options: Any) -> None:
        super().__init__(**options)
        self._link = link

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        request, exchange = self._link.open(request)
        if exchange is None:
            return await super().send(request, stream=stream, **options)
        sent = super().send
        response = await asend(
            self._link, exchange, request, lambda request: sent(cast(Any, request), stream=True, **options)
        )
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response
