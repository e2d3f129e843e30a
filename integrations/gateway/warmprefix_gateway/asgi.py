"""The gateway as an ASGI application: requests in, requests out, answers back unchanged."""

from __future__ import annotations

import asyncio

from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.http_messages import Send, error_body, has_repeated, reply
from warmprefix_gateway.office import Office
from warmprefix_gateway.page import overview_page, page_policy
from warmprefix_gateway.passed_request import PassedRequest, Scope
from warmprefix_gateway.request_body import ClientLeftError, Receive

__all__ = ["Gateway"]

_MOST_HEADER_BYTES = 64 * 1_024
_OWN_PATHS = ("/", "/metrics", "/health")
_SAFE = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store"))


class Gateway:
    """Passes requests on to upstreams. Use it with any ASGI server that runs `lifespan`.

    Whatever fails in the gateway's own work, the client's bytes go out as they came.
    """

    def __init__(self, options: GatewayOptions) -> None:
        """Prepare a gateway.

        Raises:
            KeysError: The file of keys could not be read.
        """
        self._office = Office(options)
        self.metrics = self._office.metrics
        """Counts of the gateway."""
        self._own_turn = asyncio.Lock()
        self.is_draining = False
        """True once the server was asked to stop: health checks then fail, and requests still pass."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "lifespan.startup":
            await self._office.open()
            await send({"type": "lifespan.startup.complete"})
        await self._office.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        office, path = self._office, scope["path"]
        if scope["method"] in ("GET", "HEAD") and path in _OWN_PATHS:
            async with self._own_turn:
                status, kind, body, more = self._own_answer(path)
                await asyncio.sleep(0)  # anyone may ask for pages, so other requests go on between two of them
            # Outside the turn: a client that does not read its page must not keep it.
            await reply(send, status, kind, b"" if scope["method"] == "HEAD" else body, more)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _MOST_HEADER_BYTES:
            await self._refuse(send, path, 431, "headers", "the headers are too large")
            return
        if office.options.has_tenants and has_repeated(scope["headers"], office.single_headers):
            await self._refuse(send, path, 400, "headers", "a header is repeated that may be there once")
            return
        may_pass, tenant = office.access.tenant(headers)
        if not may_pass:
            await self._refuse(send, path, 401, "key", "the API key is missing or unknown")
            return
        if not office.places.take(tenant):
            await self._refuse(send, path, 429, "busy", "too many requests at one time; try again")
            return
        office.metrics.in_flight.inc()
        if office.touches is not None:
            office.touches.began()
        request = PassedRequest(office, scope, headers, tenant, receive, send)
        try:
            await request.run()
        except ClientLeftError:
            office.metrics.disconnects.inc()
        except Exception as error:
            office.fail("a request was not answered", error)
            if not request.has_begun:
                await self._refuse(send, path, 500, "failure", "the gateway failed")
        finally:
            office.places.give_back(tenant)
            office.metrics.in_flight.dec()
            if office.touches is not None:
                office.touches.ended()

    def _own_answer(self, path: str) -> tuple[int, bytes, bytes, list[tuple[bytes, bytes]]]:
        office = self._office
        status, kind, policy = 200, b"text/plain; charset=utf-8", b"default-src 'none'"
        if path == "/health":
            is_up = bool(office.upstreams.alive) and not self.is_draining
            status = 200 if is_up else 503
            body = b"ok" if is_up else b"draining" if self.is_draining else b"no upstream answers"
        elif path == "/metrics":
            office.metrics.sessions.set(len(office.ledger.sessions))
            body = office.metrics.text()
        else:
            kind = b"text/html; charset=utf-8"
            states = list(office.upstreams.states.values())
            page = overview_page(office.ledger, office.options, states, office.upstreams.added)
            body, policy = page.encode(), page_policy(page)
        return status, kind, body, [(b"content-security-policy", policy), *_SAFE]

    async def _refuse(self, send: Send, path: str, status: int, reason: str, message: str) -> None:
        self._office.metrics.refused.labels(reason).inc()
        await reply(send, status, b"application/json", error_body(path, status, message))
