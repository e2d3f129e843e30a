"""Requests that continue a response which an upstream keeps: what is known of it, and the record of the next one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from warmprefix.errors import StoreError
from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.outgoing import AskedPrompt
from warmprefix_gateway.tenant_bodies import BodyRefusedError, refused_response_id
from warmprefix_gateway.turn_records import FoundTurn, MemoryValues, SealedValues, StoredTurn, TurnRecords
from warmprefix_openai import AnswerFacts
from warmprefix_requests import OutgoingRequest

if TYPE_CHECKING:
    from warmprefix_redis import RedisValues

__all__ = ["KeptAnswer", "ServerHistories"]

_RESPONSE = re.compile(r"/responses/([^/]+)(?:/[^/]*)?/?")


class ServerHistories:
    """What a gateway knows of the histories that its upstreams keep. For one event loop.

    Args:
        options: Of the gateway.
        metrics: Count what became of each look-up.
        fail: Counts a failure of the store.

    Raises:
        MissingExtraError: The records are for Redis, and its client is not installed.
    """

    def __init__(
        self, options: GatewayOptions, metrics: GatewayMetrics, fail: Callable[[str, Exception], None]
    ) -> None:
        self._upstreams = {upstream.rstrip("/") for upstream in options.upstreams}
        self._allows_all = "previous_response_id" in options.allow_fields
        self._metrics = metrics
        self._fail = fail
        self._redis = None if options.redis_url is None else _redis_values(options.redis_url)
        values = MemoryValues() if self._redis is None else SealedValues(self._redis, options.salt_key)
        self._records = TurnRecords(values)

    async def close(self) -> None:
        """Close the connections."""
        if self._redis is not None:
            await self._redis.aclose()

    async def before(self, call: OutgoingRequest, tenant: str | None) -> FoundTurn | None:
        """Return the record of the response that a request continues; None if it is not known here.

        Raises:
            BodyRefusedError: The request is a tenant's, and the response is not known to be its own.
        """
        given = call.body.get("previous_response_id")
        if given is None:
            return None
        found = None
        try:
            found = await self._find(tenant, given)
        except StoreError as error:
            self.failed("a response was not looked up", error)
            if tenant is not None and not self._allows_all:
                message = "the response cannot be looked up now; try again"
                raise BodyRefusedError(503, "records", message) from error
        else:
            known = found is not None and found.turn.history is not None
            self._metrics.histories.labels("known" if known else "unknown").inc()
        if found is None and tenant is not None and not self._allows_all:
            raise refused_response_id()
        return found

    def kept_answer(
        self, asked: AskedPrompt | None, sent: OutgoingRequest | None, upstream: str | None
    ) -> KeptAnswer | None:
        """Return what records the answer to a request; None if the upstream does not keep it."""
        if asked is None or sent is None or upstream is None or not asked.may_be_kept:
            return None
        return KeptAnswer(self, asked, sent, upstream)

    async def keep(self, tenant: str | None, id: str, turn: StoredTurn, texts: Mapping[str, str]) -> None:
        """Record a response, and the texts of its new references by their keys.

        Raises:
            StoreError: The store does not answer.
        """
        await self._records.keep(tenant, id, turn, texts)
        self._metrics.histories.labels("recorded").inc()

    async def upstream_of(self, tenant: str | None, method: str, path: str) -> str | None:
        """Return the upstream that keeps the response of a path; None if that is not known. Forget what is deleted.

        Raises:
            BodyRefusedError: A response is to be deleted, and it may be another tenant's, or what is known of it
                cannot be deleted.
        """
        named = _RESPONSE.search(path)
        if named is None:
            return None
        try:
            found = await self._find(tenant, named[1])
            if method == "DELETE" and found is None and tenant is not None:
                raise BodyRefusedError(404, "route", "the response is not known here")
            if method == "DELETE":
                await self._records.forget(tenant, named[1])
        except StoreError as error:
            self.failed("a response was not looked up", error)
            if method == "DELETE":  # other gateways would go on to refer to it
                raise BodyRefusedError(503, "records", "the response cannot be forgotten now; try again") from error
            return None
        return None if found is None else found.turn.upstream

    async def _find(self, tenant: str | None, id: object) -> FoundTurn | None:
        found = await self._records.find(tenant, id) if isinstance(id, str) else None
        return found if found is not None and found.turn.upstream in self._upstreams else None

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure."""
        self._metrics.histories.labels("failed").inc()
        self._fail(what, error)


class KeptAnswer:
    """An answer that its upstream keeps, if it does what was asked."""

    def __init__(self, histories: ServerHistories, asked: AskedPrompt, sent: OutgoingRequest, upstream: str) -> None:
        self._histories = histories
        self._asked = asked
        self._sent = sent
        self._upstream = upstream
        self._is_recorded = False

    async def record(self, facts: AnswerFacts) -> None:
        """Record the response, once, if it is completed and stored. Never raises."""
        response = facts.response
        if self._is_recorded or response is None or response.get("store") is False:
            return
        if response.get("status") != "completed":
            return
        self._is_recorded = True
        id = response.get("id")
        if not isinstance(id, str):
            return
        try:
            await self._histories.keep(self._asked.session.tenant, id, *self._turn(id, response))
        except Exception as error:
            self._histories.failed("a response was not recorded", error)

    def _turn(self, id: str, response: Mapping[str, Any]) -> tuple[StoredTurn, dict[str, str]]:
        """Return what is known of the response, and the texts of its new references by their keys."""
        asked, made = self._asked, self._sent.rewritten
        history, after = None, asked.call.body.get("previous_response_id")
        if made is not None and made.history is not None and response.get("conversation") is None:
            is_next = response.get("previous_response_id", after) == after
            is_whole = response.get("truncation") in (None, "disabled")  # a request without it takes the server's
            history = made.history.with_output(response.get("output")) if is_next and is_whole else None
        texts: dict[str, str] = {}
        if made is not None and history is not None:
            given = made.echoes.texts
            texts = {
                history.references[each]: text for each, text in given.items() if text and each in history.references
            }
        before = None if asked.found is None else asked.found.turn
        first, began = (id, time.time()) if before is None else (before.first, before.began)
        return StoredTurn(self._upstream, asked.session.key, first, began, history), texts


def _redis_values(url: str) -> RedisValues:
    from warmprefix_redis import RedisValues, SharedSettings  # an extra of its own

    settings = SharedSettings(redis_url=url)
    return RedisValues(
        url, prefix=settings.key_prefix, ttl=settings.conversation_ttl, timeout=settings.store_budget / 2
    )
