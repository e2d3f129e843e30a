"""What all requests of a gateway share: its upstreams, its counts, and what it decides about a request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, get_args

from warmprefix.errors import MissingExtraError
from warmprefix.fair_lru import FairLru
from warmprefix.residency import EngineReport
from warmprefix_gateway.applications import application_of
from warmprefix_gateway.echo_watch import EchoedAnswer
from warmprefix_gateway.gateway_options import GatewayOptions, References
from warmprefix_gateway.http_messages import OF_ENGINES, RawHeaders, betas_with, is_messages, upstream_headers
from warmprefix_gateway.ledger import Ledger
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.outgoing import AskedPrompt, Rules, outgoing, with_tenant_salt
from warmprefix_gateway.recording import BodyRecorder, RecordedExchange
from warmprefix_gateway.reordering import FoundContext, Outcome, Reordered, Reorderer, as_templates
from warmprefix_gateway.routes import Routes
from warmprefix_gateway.server_histories import ServerHistories
from warmprefix_gateway.sessions import PromptParts, SessionBook, prompt_parts, session_name
from warmprefix_gateway.shared_beginnings import GrownRequest, SharedBeginning, SharedBeginnings
from warmprefix_gateway.shared_sessions import SharedSessions, shared_sessions
from warmprefix_gateway.shares import AbandonedWorkError, Preparation, Shares
from warmprefix_gateway.tenant_bodies import BodyRefusedError, check_parts, check_type, read_strictly, refuse_fields
from warmprefix_gateway.tenant_keys import Access, TenantKeys
from warmprefix_gateway.touching import TouchSender, UpstreamPath
from warmprefix_gateway.turn_records import FoundTurn
from warmprefix_gateway.upstreams import Upstreams
from warmprefix_openai import AnswerFacts
from warmprefix_requests import (
    FieldRefusals,
    OutgoingRequest,
    SentTools,
    SteadyTools,
    StoredHistory,
    prepared,
    read_call,
    steady_tools,
)
from warmprefix_requests.marks import CacheMarker
from warmprefix_requests.outgoing import route_of
from warmprefix_requests.retention import RequestPriorities

try:
    import aiohttp
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["LEVEL_HEADER", "ORDER_HEADER", "PARENT_HEADER", "Office"]

_log = logging.getLogger("warmprefix.gateway")

LEVEL_HEADER = "x-warmprefix-references"
"""Header with which a request chooses its level of references."""
ORDER_HEADER = "x-warmprefix-order"
"""Header with which a request keeps the order of its context, by the value `keep`."""
PARENT_HEADER = "x-parent-session-id"
"""Header with which a sub-agent's request names the session of the agent that started it."""
_LEVELS: Mapping[str | None, References] = {level: level for level in get_args(References)}
_MOST_HEADER_BYTES = 65_536
_BEGINNINGS_SHARE = 8
"""Beginnings of requests that are known take this part of the bytes that requests may."""
_KNOWN_SPEED = 4
"""A byte that is known takes this part of the time of a new one, or less."""
_CONNECT_SECONDS = 10.0
"""Longest time until an upstream accepts a connection."""
_MOST_TOOL_BYTES = 32 << 20
"""Bytes of all definitions of tools that sessions have sent, as JSON."""
_SINGLE_HEADERS = ("authorization", "x-api-key", "content-type", "content-encoding")


class _Prepared(NamedTuple):
    """What goes out for a request."""

    sent: OutgoingRequest
    parts: PromptParts
    reordered: Reordered | None
    tools: SentTools | None = None
    """What the conversation has declared with it; None if its tools are left alone."""
    beginning: SharedBeginning | None = None


class _ReadRequest(NamedTuple):
    """A request with a prompt, and what was found in it."""

    call: OutgoingRequest
    parts: PromptParts
    grown: GrownRequest | None
    context: FoundContext | None = None
    waits: bool = False
    """True if the context waits to be ordered, and is announced until then."""
    announced: AbstractContextManager[object] = nullcontext()


class Office:
    """The shared part of a gateway. Not thread-safe: one event loop uses it.

    Raises:
        KeysError: The file of keys could not be read.
        OSError: The file to record to could not be opened.
    """

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.metrics = GatewayMetrics()
        self.ledger = Ledger(
            self.metrics, sessions=SessionBook(origin=secrets.token_hex(4) if options.redis_url else "")
        )
        self.access = Access(None if options.keys is None else TenantKeys(options.keys), options.tenant_header)
        self.routes = Routes(options.allow_routes)
        self.single_headers = {*_SINGLE_HEADERS, (options.tenant_header or "").lower()}
        """Headers that decide what a tenant's request is, so none may be there twice."""
        self.upstreams = Upstreams(options, self.metrics)
        self.shared: SharedSessions | None = None
        """What gateways know together; None for one alone."""
        if options.redis_url is not None:
            self.shared = shared_sessions(options, self.ledger.sessions, self.upstreams, self.metrics, self.fail)
        self.refusals = FieldRefusals()
        profile = options.cache_profile
        self.marker = CacheMarker(profile) if profile.marks is not None else None
        keep_tools = frozenset(options.keep_tools)
        self.reorderer: Reorderer | None = None
        """Orders contexts, if that is asked for."""
        if options.reorder and profile.separator is None:  # else no order saves anything
            self.reorderer = Reorderer(as_templates(options.reorder), options.pin_first, options.pin_last, profile)
        priorities = None if self.reorderer is None else RequestPriorities(self.reorderer.planner)
        self._rules = Rules(options.references, keep_tools, profile, self.marker, self.reorderer, priorities)
        self.touches: TouchSender | None = None
        """Keeps contexts cached; None if that is off, or nothing is ordered."""
        if options.touches and self.reorderer is not None and priorities is not None:
            key, planner = options.upstream_key, self.reorderer.planner
            self.touches = TouchSender(planner, priorities, self.upstreams, self.ledger, key, self.fail)
        self._salt_key = options.salt_key or secrets.token_bytes(32)
        tenants = self.access.tenants
        self.places = Shares(options.bounds.max_in_flight, tenants)
        """Requests at one time."""
        self.buffers = Shares(options.bounds.max_buffered_bytes, tenants)
        """Bytes of all bodies that are held now."""
        self.histories = ServerHistories(options, self.metrics, self.fail)
        self.beginnings = SharedBeginnings(options.bounds.max_buffered_bytes // _BEGINNINGS_SHARE)
        self._preparing = Preparation()
        self._tools: FairLru[tuple[str | None, str, bytes], SentTools] = FairLru()
        """What each conversation of a session has declared: sub-agents have tools of their own."""
        self._client: aiohttp.ClientSession | None = None
        self._is_warned = False
        self._takes_priorities = False
        """True if requests may have a priority, as the upstreams evict by it."""
        self._recorder = None if options.record is None else BodyRecorder(options.record, self.fail)

    async def open(self) -> None:
        """Begin to check the upstreams."""
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=self.options.bounds.silent_seconds
            ),
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
        )
        self.upstreams.start(self._client)
        if self.touches is not None:
            self.touches.open(self._client)

    async def close(self) -> None:
        """Close all connections to the upstreams, and the file of recorded requests."""
        if self.touches is not None:
            await self.touches.close()
        await self.upstreams.stop()
        if self._client is not None:
            await self._client.close()
        await self.histories.close()
        if self.shared is not None:
            await self.shared.aclose()
        self._preparing.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    @property
    def client(self) -> aiohttp.ClientSession:
        """The client for all upstreams.

        Raises:
            RuntimeError: The server did not run the lifespan of the application.
        """
        if self._client is None:
            raise RuntimeError("the server must run the lifespan of the gateway")
        return self._client

    @property
    def hides_keys(self) -> bool:
        """True if the client's key is not for the upstream."""
        return self.access.has_keys or self.options.upstream_key is not None

    def upstream_headers(
        self, raw: RawHeaders, path: str, tenant: str | None, left_out: Collection[str], beta: str | None = None
    ) -> MutableMapping[str, str]:
        """Return a client's headers for an upstream, with its key if there is one, and without `left_out`.

        Raises:
            ValueError: A value has a control character.
        """
        hidden = {*left_out, *(OF_ENGINES if tenant is not None else ())}
        if self.options.tenant_header is not None:
            hidden.add(self.options.tenant_header.lower())
        if self.hides_keys:
            hidden |= {"authorization", "x-api-key"}
        headers = upstream_headers(raw, hidden)
        if (key := self.options.upstream_key) is not None:
            name, value = ("x-api-key", key) if is_messages(path) else ("Authorization", f"Bearer {key}")
            headers[name] = value
        if beta is not None:
            headers["anthropic-beta"] = betas_with(raw, beta)
        return headers

    async def ask(
        self, content: bytes, path: str, headers: Mapping[str, str], tenant: str | None
    ) -> AskedPrompt | None:
        """Find the session of a request, and decide what to send; None if it is not understood. O(bytes).

        Large bodies are read in a thread, so that other requests go on meanwhile.

        Raises:
            BodyRefusedError: The body is a tenant's, and it is not understood, or reaches beyond the tenant.
        """
        began = time.perf_counter()
        self._takes_priorities = self._client is not None and self.upstreams.take_priorities(self._client)
        found: _Prepared | None = None
        continues = path.rstrip("/").endswith("/responses") and b'"previous_response_id"' in content
        level = _LEVELS.get(headers.get(LEVEL_HEADER))
        keys, known = self.beginnings.find(tenant, f"{route_of(path)} {level}", content)
        size = len(content) - known.read.length * (_KNOWN_SPEED - 1) // _KNOWN_SPEED
        try:
            read = await self._preparing.run(
                tenant,
                size,
                lambda _: self._read(content, path, headers, tenant, known, continues=continues),
                _withdraw,
            )
            if read is None and tenant is not None:
                raise BodyRefusedError(400, "body", "the request is not understood")
            if read is None:
                return None
            call, parts = read.call, read.parts
            with read.announced:
                before = await self.histories.before(call, tenant) if continues else None
                name = session_name(headers, call.body) or (None if before is None else before.turn.session)
                if self.shared is not None:
                    await self.shared.look_up(tenant, name, parts, headers.get(PARENT_HEADER))
                session = self.ledger.sessions.find(tenant, name, parts, headers.get(PARENT_HEADER))
                session.application = session.application or application_of(headers, call.body)
                conversation = tenant, session.key, _conversation(call, parts)
                tools = self._tools.use(conversation)
                if read.waits:
                    await asyncio.sleep(0)  # requests that came together announce their contexts first
                found = await self._preparing.run(
                    tenant, size, lambda check: self._prepare(read, before, headers, tenant, check, tools), self._drop
                )
            sent, parts, reordered, declared, beginning = found
            self.beginnings.keep(keys, known, beginning)
            if declared is not None and declared != tools:
                self._tools.put(conversation, declared, tenant, len(repr(declared)))
                while self._tools.size > _MOST_TOOL_BYTES:
                    self._tools.evict()
            if reordered is not None and reordered.outcome is not None:
                self._count_context(reordered.outcome)
        except BodyRefusedError:
            raise
        except Exception as error:
            self._drop(found)
            if tenant is not None:
                self.fail("a tenant's request is refused, because it could not be prepared", error)
                raise BodyRefusedError(500, "failure", "the gateway could not prepare the request") from error
            self.fail("a request passes as it came, because it could not be prepared", error)
            return None
        self.metrics.added_seconds.observe(time.perf_counter() - began)
        return AskedPrompt(call, session, parts, sent, reordered, before)

    def _read(
        self,
        content: bytes,
        path: str,
        headers: Mapping[str, str],
        tenant: str | None,
        known: SharedBeginning,
        *,
        continues: bool = False,
    ) -> _ReadRequest | None:
        """Return a request with a prompt, and announce its context if it is to be ordered.

        If a tenant's request `continues` a response, that must be looked up then.
        """
        if tenant is not None:
            content = content.removeprefix(BOM_UTF8)
        check_parts(content[known.read.length :], known.read.separators)
        grown = GrownRequest.read(route_of(path), content, known, strictly=tenant is not None)
        body = None if grown is None else grown.body
        if tenant is not None:
            check_type(headers)
            body = body or read_strictly(content)
            checked = ("previous_response_id",) if continues else ()
            refuse_fields(body if grown is None else grown.new_body, (*self.options.allow_fields, *checked))
        call = read_call("POST", path, headers, content, body)
        if call is None:
            return None
        parts = prompt_parts(call.route, call.body) if grown is None else grown.parts
        context: FoundContext | None = None
        if self.reorderer is not None:
            try:
                context = self.reorderer.find(call, tenant)
                announced = self.reorderer.announced(context)
            except Exception as error:
                self.fail("a context is not ordered in view of the requests behind it", error)
            else:
                if announced is not None:
                    return _ReadRequest(call, parts, grown, context, True, announced)
        return _ReadRequest(call, parts, grown, context)

    def _prepare(
        self,
        read: _ReadRequest,
        before: FoundTurn | None,
        headers: Mapping[str, str],
        tenant: str | None,
        check: Callable[[], None],
        declared: SentTools | None,
    ) -> _Prepared:
        call, parts, grown, mode = read.call, read.parts, read.grown, self.options.steady_tools
        tools: SteadyTools | None = None
        rules = self._rules
        if rules.priorities is not None and not self._takes_priorities:
            rules = rules._replace(priorities=None)
        level = headers.get(LEVEL_HEADER)
        if level in _LEVELS:
            rules = rules._replace(references=_LEVELS[level])
        if headers.get(ORDER_HEADER) == "keep":
            rules = rules._replace(order_locked=True)
        earlier = None if before is None else before.turn.history
        is_stored = call.route == "responses" and call.body.get("store") is not False
        if is_stored and call.body.get("previous_response_id") is None:
            earlier = StoredHistory()
        try:
            if mode != "off" and call.route != "completions":
                tools = steady_tools(call.route, call.body, declared, mode)
                if tools is not None and (tools.front is not None or tools.tools is not call.body["tools"]):
                    parts = prompt_parts(call.route, tools.placed(call.route, {**call.body, "tools": [*tools.tools]}))
            sent, reordered = outgoing(
                call,
                rules,
                tenant=tenant,
                salt_key=self._salt_key,
                check=check,
                earlier=earlier,
                context=read.context,
                grown=grown,
                tools=tools,
            )
        except (BodyRefusedError, AbandonedWorkError):
            raise
        except Exception as error:
            self.fail("a request goes out without references, order and marks, because making them failed", error)
            rules = Rules("off", (), rules.profile, None)
            sent, reordered = outgoing(call, rules, tenant=tenant, salt_key=self._salt_key)
        beginning = None if grown is None else grown.beginning()
        return _Prepared(sent, parts, reordered, None if tools is None else tools.sent, beginning)

    def _drop(self, found: _Prepared | None) -> None:
        if found is not None and self.reorderer is not None:
            self.reorderer.abandon(found.reordered)

    async def salted_embedding(self, content: bytes, headers: Mapping[str, str], tenant: str) -> bytes:
        """Return a body without a prompt to answer, with its tenant's salt: pooling models have prefix caches too.

        Raises:
            BodyRefusedError: The body is not understood, or reaches beyond the tenant.
        """

        def prepare(_: Callable[[], None]) -> bytes:
            plain = content.removeprefix(BOM_UTF8)
            check_type(headers)
            body = read_strictly(plain)
            refuse_fields(body, self.options.allow_fields)
            call = OutgoingRequest("completions", plain, body)
            if self._rules.profile.isolation != "cache_salt":
                return plain
            return prepared(call, [with_tenant_salt("cache_salt", tenant, self._salt_key)]).content

        return await self._preparing.run(tenant, len(content), prepare)

    async def separates(self, base: str, tenant: str | None, route: str) -> bool:
        """Return False if an upstream may ignore the salt of a request's tenant.

        If the engine was not recognised, only Messages are refused: SGLang has ignored their salt until now.
        """
        if tenant is None or self._rules.profile.isolation != "cache_salt":
            return True
        is_refused = route == "messages"
        engine = await self.upstreams.engine(self.client, base, is_needed=is_refused)
        takes = engine.takes_salt(route)
        return not is_refused if takes is None else takes

    def chosen(self, asked: AskedPrompt | None, upstream: str) -> None:
        """Let other gateways know which upstream a request goes to."""
        if asked is not None and self.shared is not None:
            self.shared.sent(asked.session, asked.parts, upstream)

    def _count_context(self, outcome: Outcome) -> None:
        self.metrics.contexts.labels(outcome).inc()
        if outcome == "numbered" and not self._is_warned:
            self._is_warned = True
            _log.warning("contexts whose blocks are numbered keep their order")

    def answered(
        self,
        asked: AskedPrompt,
        sent: OutgoingRequest,
        facts: AnswerFacts,
        upstream: str | None,
        target: tuple[bytes, bytes],
    ) -> None:
        """Count an answered request; `target` is the path and the query that it went to."""
        tokens = facts.tokens
        self.ledger.record(asked, sent, upstream, tokens.prompt_tokens, tokens.cached_tokens)
        if self.shared is not None and upstream is not None:
            self.shared.answered(asked.session, asked.parts, upstream)
        plan = asked.reordered and asked.reordered.plan
        if plan is not None and self.reorderer is not None:
            report = EngineReport(
                tokens.cached_tokens, tokens.prompt_tokens, capacity_tokens=self.upstreams.capacity_tokens
            )
            if self._client is not None and upstream is not None:
                self.upstreams.seen_engine(self._client, upstream)
            is_new = self.reorderer.planner.commit(plan, report=report)
            path, query = target
            if is_new and self.touches is not None and upstream is not None and not query:  # it may hold a key
                self.touches.answered(plan, sent, UpstreamPath(upstream, path, asked.session.tenant))

    def record(
        self,
        asked: AskedPrompt,
        sent: bytes,
        *,
        upstream: str | None,
        status: int | None,
        outcome: str,
        usage: Mapping[str, object] | None,
    ) -> None:
        """Record what was sent for a request, and what came of it, if that was asked for."""
        if self._recorder is not None:
            tenant, key = asked.session.tenant, asked.session.key
            context = asked.reordered.context if asked.reordered is not None else ()
            bodies = (sent, asked.call.content, context)
            self._recorder.record(RecordedExchange(time.time(), tenant, key, upstream, status, outcome, usage, *bodies))

    def count_echoes(self, answer: EchoedAnswer) -> None:
        """Count the references that a model copied into its tool calls."""
        outcome = "refused" if answer.refused else "restored"
        self.metrics.echoes.labels(outcome).inc(answer.restored)
        self.metrics.echoes.labels("unresolved").inc(answer.unresolved)
        self.metrics.echoes.labels("unwatched").inc(answer.unwatched)

    def abandon(self, asked: AskedPrompt | None) -> None:
        """Drop the plan of a request that was not answered; no effect after `answered`."""
        if asked is not None and self.reorderer is not None:
            self.reorderer.abandon(asked.reordered)

    def fail(self, what: str, error: Exception) -> None:
        """Count a failure of the gateway's own work. The log has its kind only: its text may quote the request."""
        self.metrics.failures.inc()
        _log.warning("%s: %s", what, type(error).__name__)


def _conversation(call: OutgoingRequest, parts: PromptParts) -> bytes:
    """Return what tells the conversations of one session apart: the first message, which sub-agents have of their own.

    Requests that continue a response do not show it.
    """
    if call.route == "responses" and call.body.get("store") is not False:
        return b""
    return parts.digests[min(parts.begin, len(parts.digests) - 1)]


def _withdraw(read: _ReadRequest | None) -> None:
    """End the announcement of a request that was given up."""
    if read is not None:
        with read.announced:
            return
