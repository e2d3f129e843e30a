"""The engines behind a gateway: which one a request goes to, which ones answer, and how long they take."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from warmprefix import ContextBlock
from warmprefix.errors import MissingExtraError, NoAgentError
from warmprefix.residency import EngineReport
from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.sessions import PromptParts, Session
from warmprefix_openai.cache_metrics import report_from_metrics
from warmprefix_requests.engine_salts import Engine, EngineName, recognised_engine
from warmprefix_routing import ReplicaLoad, ReplicaRouter, Route

try:
    import aiohttp
    from yarl import URL
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["Durations", "FirstByteTimer", "UpstreamState", "Upstreams", "reason_of", "written_time"]

_log = logging.getLogger("warmprefix.gateway")
_CHECK_SECONDS = 2.0
_ENGINE_SECONDS, _NO_ANSWER_SECONDS = 60.0, 5.0
"""Time after which an upstream is asked again which engine it is: after an answer, and without one."""
_MOST_ANSWER_BYTES = 1 << 20
_TOUCHED: Collection[EngineName | None] = ("vllm", "sglang", "warmprefix-emulator")
"""Engines of one's own that evict what was read longest ago. At llama.cpp, a touch would take the slot of another."""


class Upstreams:
    """Chooses an upstream for each request, and checks in the background which ones answer.

    Requests of one session go to one upstream, and new sessions where the beginning of their prompt was sent before,
    as far as the load allows; see `ReplicaRouter`.
    """

    def __init__(
        self, options: GatewayOptions, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._bases = [upstream.rstrip("/") for upstream in options.upstreams]
        self._options = options
        self._metrics = metrics
        self._router = ReplicaRouter(self._bases, profile=options.cache_profile)
        self.states = {base: UpstreamState(base) for base in self._bases}
        """What was seen of each upstream, by its address."""
        self.added = Durations()
        """Times that the gateway itself takes until the first byte of an answer is sent."""
        self._task: asyncio.Task[None] | None = None
        self._engines: dict[str, tuple[Engine, float]] = {}
        """What was recognised, and until when it counts."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._evicts_by_priority = bool(options.reorder) and options.cache_profile.eviction == "priority"
        self._capacities: dict[str, int] = {}
        self._prioritising: set[str] = set()
        """Upstreams that evict by priority, as they show."""
        metrics.upstreams.set(len(self._bases))

    @property
    def alive(self) -> int:
        """Number of upstreams that answer."""
        return sum(state.answers for state in self.states.values())

    def others(self, tried: set[str]) -> bool:
        """Return True if an upstream answers that was not tried."""
        return any(state.answers and base not in tried for base, state in self.states.items())

    def route(self, session: Session, parts: PromptParts, tokens: int, only: str | None = None) -> Route:
        """Choose the upstream of a request with a prompt, unless `only` one can answer.

        Raises:
            NoAgentError: No upstream answers, or not that one.
        """
        head = _head(parts)
        return self._router.route(
            [] if session.prompts else [head],
            tenant=session.tenant,
            conversation=session.key,
            parent=session.parent,
            prompt_tokens=max(tokens, head.tokens),
            replicas=None if only is None else [only],
        )

    def learn(
        self,
        tenant: str | None,
        base: str,
        parts: PromptParts | None = None,
        session: str | None = None,
        tokens: int = 0,
    ) -> None:
        """Record that another gateway sent the head of a prompt to an upstream, or all of a session's.

        An upstream that this gateway does not have, or that does not answer, is left out.
        """
        blocks = () if parts is None else (_head(parts),)
        report = None if session is None else EngineReport(prompt_tokens=tokens, cached_tokens=tokens)
        if base in self.states:
            with suppress(NoAgentError):
                route = self._router.route(
                    blocks, tenant=tenant, conversation=session, prompt_tokens=0, replicas=[base]
                )
                self._router.commit(route, report)

    def exchange_load(self, tenant: str | None, elsewhere: dict[str, ReplicaLoad]) -> dict[str, ReplicaLoad]:
        """Count a tenant's load that other gateways report; return this one's."""
        return self._router.exchange_load(elsewhere, tenant)

    def any_base(self, tried: Collection[str] = ()) -> str:
        """Return the first upstream that answers and was not tried. If all were tried, return the first."""
        return next((base for base in self._bases if self.states[base].answers and base not in tried), self._bases[0])

    def commit(self, route: Route) -> None:
        self._router.commit(route)

    def prefilled(self, route: Route) -> None:
        self._router.prefilled(route)

    def abandon(self, route: Route) -> None:
        self._router.abandon(route)

    def failed(self, base: str, reason: str) -> None:
        """Note that an upstream did not answer: with others, requests go to them until it does."""
        if self.states[base].answers:
            self._change(base, reason)

    def _change(self, base: str, reason: str) -> None:
        """Note that an upstream does not answer for a reason; an empty one means that it does again."""
        state = self.states[base]
        state.change(not reason)
        if len(self._bases) > 1:  # a single one is asked anyway
            (self._router.fail if reason else self._router.join)(base)
        self._metrics.upstreams.set(self.alive)
        at = written_time(state.changed_at or 0.0)
        if reason:
            _log.warning("upstream %s does not answer: %s, at %s", base, reason, at)
        else:
            _log.warning("upstream %s answers again, at %s", base, at)

    def target(self, base: str, raw_path: bytes, query: bytes) -> URL:
        """Return the URL of a request at an upstream; its path is never joined in another way than as it came.

        Paths under `/v1` follow the upstream's base, others its root.
        """
        path = raw_path.decode("latin-1")
        if path == "/v1" or path.startswith("/v1/"):
            address = base + path[len("/v1") :] if base.endswith("/v1") else base + path
        else:
            address = base.removesuffix("/v1") + path
        return URL(f"{address}?{query.decode('latin-1')}" if query else address, encoded=True)

    # -- checks

    def start(self, client: aiohttp.ClientSession) -> None:
        """Check each upstream now, and then again and again; a single one only while it does not answer."""
        self._task = asyncio.create_task(self._check(client))

    async def engine(self, client: aiohttp.ClientSession, base: str, *, is_needed: bool = False) -> Engine:
        """Return the engine of an upstream. It is asked again after a while, without a wait.

        Args:
            client: Asks it.
            base: Address of the upstream.
            is_needed: Wait for another answer if the first ones did not show the engine.
        """
        engine = self.seen_engine(client, base)
        asking = self._asking.get(base)
        if asking is not None and (base not in self._engines or (is_needed and engine.name is None)):
            await asyncio.shield(asking)  # others wait for it too
            engine = self._engines[base][0]
        return engine

    def seen_engine(self, client: aiohttp.ClientSession, base: str) -> Engine:
        """Return the engine of an upstream as far as it was recognised; it is asked again after a while."""
        given = self._options.engine
        if given is not None and not self._options.reorder:
            return Engine.given(given)
        engine, until = self._engines.get(base, (Engine(), 0.0))
        if self._clock() >= until and base not in self._asking:
            asking = self._asking[base] = asyncio.create_task(self._recognise(client, base))
            asking.add_done_callback(lambda _: self._asking.pop(base))
        return engine if given is None else Engine.given(given)

    def can_be_touched(self, client: aiohttp.ClientSession, base: str, tenant: str | None) -> bool:
        """Return True if an upstream answers, and is an engine whose cache a request over a prefix renews.

        Only a server of one's own shows its cache: what a host bills by the token is never touched.
        """
        engine = self.seen_engine(client, base)
        if not self.states[base].answers or engine.name not in _TOUCHED:
            return False
        if base not in (self._prioritising if self._evicts_by_priority else self._capacities):
            return False
        is_salted = tenant is not None and self._options.cache_profile.isolation == "cache_salt"
        return not is_salted or engine.takes_salt("chat") is True

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that the cache of the smallest upstream holds; None if no metrics show it."""
        return min(self._capacities.values(), default=None)

    def take_priorities(self, client: aiohttp.ClientSession) -> bool:
        """Return True if all upstreams evict by the priority of a request, and use it for nothing else."""
        if not self._evicts_by_priority:
            return False
        for base in self._bases:
            self.seen_engine(client, base)
        return self._prioritising >= set(self._bases)

    async def _recognise(self, client: aiohttp.ClientSession, base: str) -> None:
        paths = [b"/v1/models", b"/version"]
        paths += [b"/metrics", b"/server_info"][: bool(self._options.reorder) + self._evicts_by_priority]
        models, version, *more = await asyncio.gather(
            *[self._content(client, str(self.target(base, path, b""))) for path in paths]
        )
        (self._prioritising.add if any(map(evicts_by_priority, more)) else self._prioritising.discard)(base)
        if more and (tokens := report_from_metrics(f"{more[0].decode('utf-8', 'replace')}\n").capacity_tokens):
            self._capacities[base] = tokens
        found = recognised_engine(models, version)
        engine = found if models else self._engines.get(base, (found, 0.0))[0]  # a busy engine is still the same
        self._engines[base] = engine, self._clock() + (_ENGINE_SECONDS if models else _NO_ANSWER_SECONDS)

    async def _content(self, client: aiohttp.ClientSession, url: str) -> bytes:
        """Return the answer to a GET; empty without one."""
        key = self._options.upstream_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        content = bytearray()
        try:
            async with client.get(
                URL(url, encoded=True),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=_CHECK_SECONDS),
                allow_redirects=False,
            ) as answer:
                async for piece in answer.content.iter_any():
                    content += piece
                    if answer.status != 200 or len(content) > _MOST_ANSWER_BYTES:
                        return b""
        except Exception:  # whatever it is, the engine stays unknown
            return b""
        return bytes(content)

    async def stop(self) -> None:
        for asking in self._asking.values():
            asking.cancel()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _check(self, client: aiohttp.ClientSession) -> None:
        checked: Collection[str] = self._bases
        while True:
            reasons = await asyncio.gather(*[self._problem(client, base) for base in checked])
            for base, reason in zip(checked, reasons, strict=True):
                if self.states[base].answers == bool(reason):  # the router has it in the same state
                    self._change(base, reason)
            await asyncio.sleep(self._options.bounds.health_seconds)
            checked = self._bases if len(self._bases) > 1 or not self.alive else ()

    async def _problem(self, client: aiohttp.ClientSession, base: str) -> str:
        """Return why an upstream does not answer; an empty text if it does."""
        url = URL(f"{base.removesuffix('/v1')}/health", encoded=True)
        try:
            async with client.get(
                url, timeout=aiohttp.ClientTimeout(total=_CHECK_SECONDS), allow_redirects=False
            ) as answer:
                return "" if answer.status < 500 else f"status {answer.status} at /health"
        except Exception as error:  # whatever it is, the checks go on
            return reason_of(error)


# -- what was seen of an upstream

_LATEST = 1_000


class Durations:
    """The latest of a series of durations, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def __bool__(self) -> bool:
        return bool(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)

    def percentile(self, share: float) -> float:
        """Return the duration that this share of them does not exceed. O(n log n).

        Raises:
            IndexError: There is no duration.
        """
        return sorted(self._latest)[max(-int(-share * len(self._latest) // 1) - 1, 0)]


class FirstByteTimes(NamedTuple):
    """Seconds until the first byte of an answer."""

    gateway: float
    """From the client's last byte to the request to the upstream, and from the answer's first byte to the client."""
    upstream: float
    """From the request to the upstream to the first byte of the answer's body."""


class FirstByteTimer:
    """Measures a request from its last byte on; of several attempts, the last one counts as the upstream's."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prepared = self._asked = self._arrived = 0.0

    def ask(self) -> None:
        self._asked = time.perf_counter()
        self._prepared = self._prepared or self._asked

    def arrive(self) -> None:
        """Note the first piece of the answer."""
        self._arrived = time.perf_counter()

    def end(self) -> FirstByteTimes:
        """Return the times when the first piece was passed on."""
        own = self._prepared - self._began + time.perf_counter() - self._arrived
        return FirstByteTimes(own, self._arrived - self._asked)


@dataclass(slots=True)
class UpstreamState:
    """One upstream, as its requests and checks have found it. Times are seconds since 1970."""

    base: str
    clock: Callable[[], float] = time.time
    answers: bool = True
    changed_at: float | None = None
    """When it stopped to answer, or did so again; None if it always did."""
    requests: int = 0
    in_flight: int = 0
    errors: int = 0
    last_error: str = ""
    last_error_at: float | None = None
    first_bytes: Durations = field(default_factory=Durations)
    """Times from a request to the first byte of its answer's body."""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request for as long as it runs."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def fail(self, reason: str) -> None:
        """Count an error."""
        self.errors += 1
        self.last_error, self.last_error_at = reason, self.clock()

    def change(self, answers: bool) -> None:
        """Note that it answers again, or does not answer any more."""
        self.answers = answers
        self.changed_at = self.clock()


def _head(parts: PromptParts) -> ContextBlock:
    """Return what stands in front of the messages as one block."""
    return ContextBlock(parts.head, id=parts.head, tokens=max(parts.characters[parts.begin - 1] // 4, 1))


def evicts_by_priority(info: bytes) -> bool:
    """Return True if SGLang's `/server_info` shows that a priority decides about eviction, and about nothing else."""
    try:
        shown = json.loads(info)
    except (ValueError, RecursionError):
        return False
    if not isinstance(shown, dict) or shown.get("radix_eviction_policy") != "priority":
        return False
    # With the first one the number also orders the queue, with the second one requests with a number fail.
    return not shown.get("enable_priority_scheduling") and not shown.get("abort_on_priority_when_disabled")


def reason_of(error: BaseException) -> str:
    """Return why a request failed, without anything of the request."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the name of its host was not found"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return type(error).__name__


def written_time(seconds: float) -> str:
    """Return a time in UTC.

    >>> written_time(0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
