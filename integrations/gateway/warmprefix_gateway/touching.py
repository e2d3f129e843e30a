"""Touches: requests for one token that keep contexts cached which come again. For one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from warmprefix import ContextPlan, ContextPlanner
from warmprefix.errors import MissingExtraError
from warmprefix_gateway.ledger import Ledger
from warmprefix_gateway.upstreams import Upstreams
from warmprefix_openai import WholeAnswer
from warmprefix_requests import OutgoingRequest
from warmprefix_requests.retention import RequestPriorities
from warmprefix_requests.touches import DueTouch, Toucher
from warmprefix_requests.usage import TokenUsage

try:
    import aiohttp
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["TouchSender", "UpstreamPath"]

_SECONDS = 30.0
"""Longest time of a touch."""
_MOST_ANSWER_BYTES = 1 << 20


class UpstreamPath(NamedTuple):
    """Where a request went, and where its touches go."""

    base: str
    """The upstream that computed it, and so holds its context."""
    path: bytes
    tenant: str | None


class TouchSender:
    """Sends the touches of one gateway, one at a time, while few requests are in flight.

    A touch has the salt of its request and no header of the client: it goes out with the gateway's own key or without
    one, so it is not the client's usage. Nothing of it reaches a client.
    """

    def __init__(
        self,
        planner: ContextPlanner,
        priorities: RequestPriorities,
        upstreams: Upstreams,
        ledger: Ledger,
        key: str | None,
        on_error: Callable[[str, Exception], object],
    ) -> None:
        """Start with nothing to send.

        Args:
            planner: Knows which paths are worth it.
            priorities: Those of the gateway's requests.
            upstreams: The engines.
            ledger: Knows which of them report cached tokens.
            key: The gateway's own key for them.
            on_error: Called if the gateway's own work fails.
        """
        self._toucher = Toucher[UpstreamPath](planner, priorities)
        self._upstreams = upstreams
        self._ledger = ledger
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._on_error = on_error
        self._sending: asyncio.Task[None] | None = None
        self._client: aiohttp.ClientSession | None = None

    def open(self, client: aiohttp.ClientSession) -> None:
        """Send touches with this client from now on."""
        self._client = client

    async def close(self) -> None:
        """End the touch in flight, and send no other."""
        self._client = None
        if self._sending is not None:
            self._sending.cancel()
            with suppress(asyncio.CancelledError):
                await self._sending

    def began(self) -> None:
        """Count a client's request as in flight."""
        self._toucher.began()

    def answered(self, plan: ContextPlan, sent: OutgoingRequest, way: UpstreamPath) -> None:
        """Keep what was sent for a plan that is committed now, if its upstream is one to be touched."""
        if self._accepts(way):
            self._toucher.keep(plan, sent, way.base, way)
        self._toucher.served(plan)

    def ended(self) -> None:
        """Count a client's request as over, and send what is due."""
        self._toucher.ended()
        if self._sending is None or self._sending.done():
            due = self._next()
            if due is not None:
                self._sending = asyncio.create_task(self._send_all(due))

    def _next(self) -> DueTouch[UpstreamPath] | None:
        if self._client is None:
            return None
        try:
            return self._toucher.due(self._accepts)
        except Exception as error:
            self._on_error("a touch could not be chosen", error)
            return None

    def _accepts(self, way: UpstreamPath) -> bool:
        return self._client is not None and self._upstreams.can_be_touched(self._client, way.base, way.tenant)

    async def _send_all(self, due: DueTouch[UpstreamPath] | None) -> None:
        while due is not None:
            request: OutgoingRequest | None = due.attempt.request
            while request is not None:
                request = await self._send(due, request)
            due = self._next()

    async def _send(self, due: DueTouch[UpstreamPath], request: OutgoingRequest) -> OutgoingRequest | None:
        """Send a touch and report its answer; return a request to send in its place."""
        status: int | None = None
        tokens = TokenUsage()
        try:
            status, tokens = await self._answer(due.way, request)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            pass
        except Exception as error:
            self._on_error("a touch could not be sent", error)
        finally:
            total, cached = tokens.prompt_tokens, tokens.cached_tokens
            cached = self._ledger.with_zeros(due.way.base, request.body.get("model"), total, cached)
            again = self._toucher.answered(due, status, total, cached)
        if again is None:
            metrics, is_counted = self._ledger.metrics, status is not None and status < 300 and cached is not None
            metrics.touches.labels("answered" if is_counted else "failed").inc()
            if is_counted:
                metrics.touch_tokens.labels("cached").inc(cached or 0)
                metrics.touch_tokens.labels("computed").inc(max((total or 0) - (cached or 0), 0))
        return again

    async def _answer(self, way: UpstreamPath, request: OutgoingRequest) -> tuple[int, TokenUsage]:
        if self._client is None:
            raise OSError("the gateway is closed")
        async with self._client.post(
            self._upstreams.target(way.base, way.path, b""),
            data=request.encode(),
            headers=self._headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=_SECONDS),
        ) as answer:
            reader, size = WholeAnswer(), 0
            async for piece in answer.content.iter_any():
                size += len(piece)
                if size > _MOST_ANSWER_BYTES:
                    return answer.status, TokenUsage()
                reader.feed(piece)
            reader.finish()
            return answer.status, reader.facts.tokens
