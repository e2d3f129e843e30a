"""What gateways know together through Redis: sessions, which upstream computed their prompts, and load."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from warmprefix.fair_lru import FairLru
from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.sessions import PromptParts, Session, SessionBook, session_key
from warmprefix_gateway.turn_records import Seal
from warmprefix_gateway.upstreams import Upstreams
from warmprefix_routing import ReplicaLoad

if TYPE_CHECKING:
    from warmprefix_redis import RedisTables

__all__ = ["SharedSession", "SharedSessions", "shared_sessions"]

_VERSION = 1
_CELLS = 1 << 17
"""Of one tenant. A later value takes the place of another one in its cell, so tenants never take each other's room."""
_MAX_ENDS, _MAX_USER_TEXTS = 4, 2
"""Places in an unnamed conversation that are looked up: where the model has answered, and texts of the user."""
_MAX_BASES = 16
"""Upstreams with one head, latest last."""
_MAX_TENANTS, _MAX_HEADS = 10_000, 10_000
_LOAD_SECONDS, _LOST_SECONDS = 0.05, 10.0
"""Time between two looks at a tenant's load, and without news after which a gateway's load does not count."""


class SharedSession(NamedTuple):
    """A session, as the gateway knows it that sent its latest prompt."""

    key: str
    version: int
    """Greater than all that this gateway knew."""
    upstream: str
    first_turn: int
    turn: int
    is_answered: bool
    tokens: int | None
    """Length of the prompt, as the engine reported it."""
    rate: float
    head: str
    user_text: str
    end: str
    """Digest of the whole conversation, in hexadecimal digits, as the one above."""
    parts: int
    characters: int

    def prompt(self, parts: PromptParts) -> PromptParts:
        """Return the prompt's parts, as far as one that may continue it shows them. O(messages)."""
        end, begin = bytes.fromhex(self.end), parts.begin
        at = self.parts - 1
        if not begin <= at < len(parts.digests) or parts.digests[at] != end:
            at = parts.digests.index(end) if end in parts.digests[begin:] else -1
        if at >= 0:
            kept = at + 1
            digests, characters, turns = parts.digests[:kept], parts.characters[:kept], parts.turns[:kept]
        else:  # the history was changed, at an unknown place
            digests = (*parts.digests[:begin], end)
            characters = (*parts.characters[:begin], max(self.characters, parts.characters[begin - 1]))
            turns = (*parts.turns[:begin], self.turn)
        if self.head != parts.head:
            digests = (*[b""] * begin, *digests[begin:])
        texts = (bytes.fromhex(self.user_text),) if self.user_text else ()
        return PromptParts(digests, characters, turns, self.head, begin, texts)


@dataclass(slots=True)
class _TenantLoad:
    due: float = 0.0
    seen: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)
    """By gateway: what it wrote last, and when that was new here."""
    elsewhere: dict[str, ReplicaLoad] = field(default_factory=dict)
    """By upstream: the sum of these, without gateways that are gone."""


class SharedSessions:
    """Keeps the sessions of a gateway in agreement with those of all gateways with the same Redis server and salt key.

    The session of each request is looked up before its upstream is chosen, and written when it was chosen and when the
    upstream has answered. Of two versions the later one counts, without a clock. What is not found in time is decided
    as by one gateway alone. No method raises. For one event loop.

    Args:
        tables: Where the cells are.
        secret: Without it, a cell cannot be read, and shows neither session nor tenant.
        book: The sessions of this gateway.
        upstreams: The upstreams of this gateway. What others sent to any other upstream is left out.
        metrics: Count what became of each look-up.
        fail: Counts a failure.
        clock: Seconds from any origin, never backwards.
    """

    def __init__(
        self,
        tables: RedisTables,
        secret: bytes,
        book: SessionBook,
        upstreams: Upstreams,
        metrics: GatewayMetrics,
        fail: Callable[[str, Exception], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tables = tables
        self._seal = Seal(secret)
        self._key = blake2b(secret, person=b"wp-sessions").digest()
        self._book = book
        self._upstreams = upstreams
        self._metrics = metrics
        self._fail = fail
        self._clock = clock
        self._sender = secrets.token_bytes(8)
        self._heads: FairLru[tuple[str | None, str], tuple[str, ...]] = FairLru()
        """Upstreams with a head, as they were read or written last."""
        self._loads: FairLru[str | None, _TenantLoad] = FairLru()
        self._exchanges: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """True while anything is read or written."""
        return self._tables.is_busy

    async def aclose(self) -> None:
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._tables.aclose()

    # -- sessions

    async def look_up(
        self, tenant: str | None, name: str | None, parts: PromptParts, parent: str | None = None
    ) -> None:
        """Learn what other gateways know of the session of a request, and of the one that `parent` names."""
        with self._tolerated():
            outcome = await self._found(tenant, name, parts, [_key_name(session_key(parent))] if parent else [])
            self._metrics.shared_sessions.labels(outcome).inc()

    async def _found(self, tenant: str | None, name: str | None, parts: PromptParts, parents: list[bytes]) -> str:
        party = self._party(tenant)
        names = [b"head:" + parts.head.encode(), *parents, *_looked_up(name, parts)]
        self._exchange_load(tenant, party, is_needed=not parts.turn)
        values = await self._tables.read(f"{party}:sessions", [self._cell(party, each) for each in names])
        if values is None:
            return "missed"
        opened = [self._opened(party, each, value) for each, value in zip(names, values, strict=True)]
        self._learn_head(tenant, parts, tuple(opened[0] or ()))
        found = [SharedSession(*content) for content in opened[1:] if content is not None]
        for session in sorted(found, key=lambda session: session.version):
            self._learn(tenant, session, parts)
        return "found" if any(opened[1 + len(parents) :]) else "unknown"

    def _learn(self, tenant: str | None, shared: SharedSession, parts: PromptParts) -> None:
        session, is_news = self._book.learn(tenant, shared.key, shared.first_turn, shared.version, shared.upstream)
        prompt = shared.prompt(parts)
        self._book.end(session, prompt)
        if not is_news:
            return
        session.version, session.upstream = shared.version, shared.upstream
        session.turn, session.head = shared.turn, shared.head
        session.user_text, session.end = bytes.fromhex(shared.user_text), bytes.fromhex(shared.end)
        session.is_answered = session.is_answered or shared.is_answered
        self._book.keep(session, prompt, shared.tokens, shared.rate)
        tokens = shared.tokens or shared.characters // 4
        self._upstreams.learn(tenant, shared.upstream, session=shared.key, tokens=tokens)

    def _learn_head(self, tenant: str | None, parts: PromptParts, bases: tuple[str, ...]) -> None:
        before = self._heads.get((tenant, parts.head)) or ()
        self._keep_head(tenant, parts.head, bases)
        for base in bases:
            if base not in before:
                self._upstreams.learn(tenant, base, parts)

    def _keep_head(self, tenant: str | None, head: str, bases: tuple[str, ...]) -> None:
        self._heads.put((tenant, head), bases, tenant)
        self._heads.use((tenant, head))
        while len(self._heads) > _MAX_HEADS:
            self._heads.evict()

    def sent(self, session: Session, parts: PromptParts, base: str) -> None:
        """Write which upstream a request of a session goes to."""
        with self._tolerated():
            self._send(session, parts, base)

    def _send(self, session: Session, parts: PromptParts, base: str) -> None:
        party, head = self._party(session.tenant), parts.head
        session.upstream = base
        cells = self._cells(session, parts, party, None)
        bases = self._heads.get((session.tenant, head)) or ()
        if base not in bases:
            bases = (*bases, base)[-_MAX_BASES:]
            self._keep_head(session.tenant, head, bases)
            name = b"head:" + head.encode()
            cells[self._cell(party, name)] = self._sealed(party, name, bases)
        self._tables.write(f"{party}:sessions", cells)
        self._write_load(session.tenant, party)

    def answered(self, session: Session, parts: PromptParts, base: str) -> None:
        """Write that a request of a session was answered; the book must have recorded it."""
        with self._tolerated():
            session.upstream = base
            party = self._party(session.tenant)
            sent = next((prompt for prompt in reversed(session.prompts) if prompt.parts is parts), None)
            if sent is not None:
                cells = self._cells(session, parts, party, sent.tokens, sent.rate)
                self._tables.write(f"{party}:sessions", cells)
            self._write_load(session.tenant, party)  # else the request would count as in flight for too long

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail("a session is not shared", error)

    def _cells(
        self, session: Session, parts: PromptParts, party: str, tokens: int | None, rate: float = 0.0
    ) -> dict[bytes, bytes | None]:
        session.version += 1
        shared = SharedSession(
            *(session.key, session.version, session.upstream, session.first_turn, parts.turn),
            *(session.is_answered or session.requests > 0, tokens, rate, parts.head),
            *(b"".join(parts.user_texts[-1:]).hex(), parts.digests[-1].hex()),
            *(len(parts.digests), parts.characters[-1]),
        )
        names = [*_looked_up(session.key, parts)] if session.is_named else [_key_name(session.key), *_ends(parts)]
        return {self._cell(party, name): self._sealed(party, name, shared) for name in names}

    # -- load

    def _exchange_load(self, tenant: str | None, party: str, *, is_needed: bool) -> None:
        """Learn what the other gateways sent where, now and then or if it is needed."""
        load, now = self._loads.use(tenant), self._clock()
        if load is None:
            self._loads.put(tenant, load := _TenantLoad(), tenant)
            if len(self._loads) > _MAX_TENANTS:
                self._loads.evict()
        if now >= load.due or is_needed:
            load.due = now + _LOAD_SECONDS
            exchange = asyncio.create_task(self._exchanged(tenant, party, load))
            self._exchanges.add(exchange)
            exchange.add_done_callback(self._exchanges.discard)

    async def _exchanged(self, tenant: str | None, party: str, load: _TenantLoad) -> None:
        with self._tolerated():
            await self._exchange(tenant, party, load)

    async def _exchange(self, tenant: str | None, party: str, load: _TenantLoad) -> None:
        table = f"{party}:load"
        found = await self._tables.read(table)
        now = self._clock()
        if found is not None:
            seen = {bytes(sender or b""): value or b"" for sender, value in zip(found[::2], found[1::2], strict=True)}
            load.seen = {
                sender: load.seen[sender] if load.seen.get(sender, (b"",))[0] == value else (value, now)
                for sender, value in seen.items()
                if sender != self._sender
            }
        lost = [sender for sender, (_, since) in load.seen.items() if now - since > _LOST_SECONDS]
        load.elsewhere = {}
        for sender, (value, _) in load.seen.items():
            content = None if sender in lost else self._opened(party, b"load:" + sender, value)
            for base, *sent in content or ():
                load.elsewhere[base] = load.elsewhere.get(base, ReplicaLoad()).plus(sent)
        if lost:
            self._tables.write(table, dict.fromkeys(lost))
        self._write_load(tenant, party)

    def _write_load(self, tenant: str | None, party: str) -> None:
        """Count the load of other gateways, and write that of this one."""
        load = self._loads.get(tenant)
        own = self._upstreams.exchange_load(tenant, {} if load is None else load.elsewhere)
        content = self._sealed(party, b"load:" + self._sender, [[base, *sent] for base, sent in own.items()])
        self._tables.write(f"{party}:load", {self._sender: content})

    # -- cells

    def _party(self, tenant: str | None) -> str:
        """Return the name of a tenant's tables."""
        name = b"" if tenant is None else b"=" + tenant.encode("utf-8", "surrogatepass")
        return blake2b(name, key=self._key, digest_size=16).hexdigest()

    def _cell(self, party: str, name: bytes) -> bytes:
        digest = blake2b(name, key=self._key, digest_size=8, person=b"wp-cell", salt=bytes.fromhex(party)).digest()
        return b"%x" % (int.from_bytes(digest, "big") % _CELLS)

    def _sealed(self, party: str, name: bytes, content: object) -> bytes:
        return self._seal.sealed(b"%b:%d:%b" % (party.encode(), _VERSION, name), json.dumps(content).encode())

    def _opened(self, party: str, name: bytes, value: bytes | None) -> list[Any] | None:
        """Return the content of a cell; None if it is empty, or not sealed by a gateway under this name."""
        text = None if value is None else self._seal.opened(b"%b:%d:%b" % (party.encode(), _VERSION, name), value)
        return None if text is None else json.loads(text)


def shared_sessions(
    options: GatewayOptions,
    book: SessionBook,
    upstreams: Upstreams,
    metrics: GatewayMetrics,
    fail: Callable[[str, Exception], None],
) -> SharedSessions:
    """Return the shared sessions of a gateway with a Redis server.

    Raises:
        MissingExtraError: The client of Redis is not installed.
        ValueError: The URL cannot be used.
    """
    from warmprefix_redis import RedisTables, SharedSettings  # an extra of its own

    settings = SharedSettings(redis_url=options.redis_url)
    tables = RedisTables(
        options.redis_url or "",
        prefix=settings.key_prefix,
        ttl=settings.conversation_ttl,
        patience=settings.store_budget,
        fail=partial(fail, "gateways do not agree, because Redis failed"),
    )
    return SharedSessions(tables, options.salt_key, book, upstreams, metrics, fail)


def _looked_up(name: str | None, parts: PromptParts) -> Iterator[bytes]:
    """Yield the names under which a session may have been written that this prompt belongs to."""
    if name is not None:
        key = _key_name(session_key(name))
        yield key
        yield b"%b\0%b" % (key, parts.head.encode())
        return
    last = len(parts.digests) - 1
    answered = (at for at in range(last - 1, parts.begin - 1, -1) if parts.turns[at + 1] > parts.turns[at])
    for at in (*[last] * (last >= parts.begin), *islice(answered, _MAX_ENDS)):
        yield b"end:" + parts.digests[at]
    for text in parts.user_texts[1:][-_MAX_USER_TEXTS:]:
        yield b"text:" + text


def _ends(parts: PromptParts) -> Iterator[bytes]:
    """Yield the names of a prompt's ends, by which a longer one finds it; as in `SessionBook.find`."""
    for end in parts.digests[parts.begin :][-2:]:
        yield b"end:" + end
    for text in parts.user_texts[1:][-1:]:
        yield b"text:" + text


def _key_name(key: str) -> bytes:
    return b"key:" + key.encode("utf-8", "surrogatepass")
