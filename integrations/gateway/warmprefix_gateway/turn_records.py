"""Records of the responses that upstreams keep, so that requests can continue them, in memory or in Redis."""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from typing import NamedTuple, Protocol

from warmprefix.fair_lru import FairLru
from warmprefix_requests import StoredHistory

__all__ = ["KeptValues", "MemoryValues", "Seal", "SealedValues", "StoredTurn", "TurnRecords"]

_MAX_BYTES = 128 << 20
_MAX_AGE_SECONDS, _MAX_SKEW_SECONDS = 28 * 86_400.0, 86_400.0
"""Time after which a history's first response may be gone: APIs keep one for 30 days."""
_MAX_ID_CHARACTERS = 1_024
_VERSION = 1


class KeptValues(Protocol):
    """Stores bytes by name. All methods raise `StoreError` if the store does not answer."""

    async def get(self, name: bytes, *, renew: bool = False) -> bytes | None: ...

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None: ...

    async def delete(self, name: bytes) -> None: ...


class MemoryValues:
    """Values in this process. When there is no more room, the tenant with the most loses its oldest ones.

    A name begins with its tenant's digest, 16 bytes.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._values: FairLru[bytes, bytes] = FairLru()
        self._max_bytes = max_bytes

    async def get(self, name: bytes, *, renew: bool = False) -> bytes | None:
        return self._values.use(name)

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None:
        if only_present and self._values.get(name) is None:
            return
        self._values.put(name, value, name[:16], len(name) + len(value) + 200)
        self._values.use(name)
        while self._values.size > self._max_bytes:
            self._values.evict()

    async def delete(self, name: bytes) -> None:
        self._values.pop(name)


class Seal:
    """Encrypts values, and binds them to their names.

    The cipher is an exclusive or with SHAKE256 of key and nonce; keyed BLAKE2b authenticates nonce, name and text.
    """

    def __init__(self, secret: bytes) -> None:
        keys = blake2b(blake2b(secret).digest(), person=b"warmprefix turns").digest()
        self._cipher_key, self._seal_key = keys[:32], keys[32:]

    def sealed(self, name: bytes, text: bytes) -> bytes:
        """Return a text that only those with the secret can read."""
        nonce = secrets.token_bytes(16)
        mixed = self._mixed(nonce, text)
        return b"".join((bytes([_VERSION]), nonce, self._seal(name, nonce, mixed), mixed))

    def opened(self, name: bytes, sealed: bytes) -> bytes | None:
        """Return the text; None if it was not sealed with this secret for this name."""
        if len(sealed) < 33 or sealed[0] != _VERSION:
            return None
        nonce, seal, text = sealed[1:17], sealed[17:33], sealed[33:]
        return self._mixed(nonce, text) if hmac.compare_digest(seal, self._seal(name, nonce, text)) else None

    def _mixed(self, nonce: bytes, text: bytes) -> bytes:
        stream = shake_256(self._cipher_key + nonce).digest(len(text))
        return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")

    def _seal(self, name: bytes, nonce: bytes, text: bytes) -> bytes:
        return blake2b(b"%d:%b%b%b" % (len(name), name, nonce, text), key=self._seal_key, digest_size=16).digest()


class SealedValues:
    """Values that only gateways with the same secret can read or write.

    What was not sealed with this secret for its name counts as missing.
    """

    def __init__(self, values: KeptValues, secret: bytes) -> None:
        self._values = values
        self._seal = Seal(secret)

    async def get(self, name: bytes, *, renew: bool = False) -> bytes | None:
        sealed = await self._values.get(name, renew=renew)
        return None if sealed is None else self._seal.opened(name, sealed)

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None:
        await self._values.put(name, self._seal.sealed(name, value), only_present=only_present)

    async def delete(self, name: bytes) -> None:
        await self._values.delete(name)


class StoredTurn(NamedTuple):
    """A response that an upstream keeps."""

    upstream: str
    """Address of the upstream that gave it."""
    session: str
    """Key of its session."""
    first: str
    """Id of the first response of its history."""
    began: float
    """Seconds since 1970 when that one was given."""
    history: StoredHistory | None
    """What its history holds; None if it is not known in full."""


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """The response that a request continues, and what is needed of its history."""

    turn: StoredTurn
    texts: Mapping[str, str | None]
    """The references in its history, and the texts that they stand for; None for one that is gone."""


class TurnRecords:
    """The records of one gateway, or of all that share a Redis server. A record is written once and never changes.

    A history also has a mark. A deletion removes it, and without it nothing in the history counts: a deleted response
    may be missing in the middle of others. Nothing is found by another tenant.
    """

    def __init__(self, values: KeptValues, clock: Callable[[], float] = time.time) -> None:
        self._values = values
        self._clock = clock

    async def find(self, tenant: str | None, id: str) -> FoundTurn | None:
        """Return the record of a response; None if there is none.

        Raises:
            StoreError: The store does not answer.
        """
        if not 0 < len(id) <= _MAX_ID_CHARACTERS:
            return None
        turn = _decoded(await self._values.get(_name(tenant, "turn", id)))
        if turn is None:
            return None
        references = {} if turn.history is None else turn.history.references
        keys = list(dict.fromkeys(references.values()))
        mark = await self._values.get(_name(tenant, "history", turn.first))
        # One at a time: many texts at once would let each other, and other tenants' records, wait for too long.
        found = [await self._values.get(_name(tenant, "text", key), renew=True) for key in keys]
        if mark is None or not -_MAX_SKEW_SECONDS <= self._clock() - turn.began <= _MAX_AGE_SECONDS:
            turn = turn._replace(history=None)
        read = [None if text is None else text.decode("utf-8", "surrogatepass") for text in found]
        texts = dict(zip(keys, read, strict=True))
        return FoundTurn(turn, {reference: texts[key] for reference, key in references.items()})

    async def keep(self, tenant: str | None, id: str, turn: StoredTurn, texts: Mapping[str, str]) -> None:
        """Write the record of a response, and the texts, by their keys, that new references in it stand for.

        Raises:
            StoreError: The store does not answer.
        """
        if not 0 < len(id) <= _MAX_ID_CHARACTERS:
            return
        for key, text in texts.items():
            await self._values.put(_name(tenant, "text", key), text.encode("utf-8", "surrogatepass"))
        await self._values.put(_name(tenant, "history", turn.first), b"1", only_present=turn.first != id)
        await self._values.put(_name(tenant, "turn", id), _encoded(turn))

    async def forget(self, tenant: str | None, id: str) -> None:
        """Forget a response that is deleted, and what its history holds.

        Raises:
            StoreError: The store does not answer.
        """
        name = _name(tenant, "turn", id)
        turn = _decoded(await self._values.get(name))
        if turn is not None:
            await self._values.delete(_name(tenant, "history", turn.first))
            await self._values.delete(name)


def _name(tenant: str | None, kind: str, id: str) -> bytes:
    party = b"" if tenant is None else b"=" + tenant.encode("utf-8", "surrogatepass")
    return blake2b(party, digest_size=16).digest() + f"{kind}:{id}".encode("utf-8", "surrogatepass")


def _encoded(turn: StoredTurn) -> bytes:
    about = json.dumps([*turn[:4], turn.history is not None]).encode()
    return b"%b\n%b" % (about, b"" if turn.history is None else turn.history.encode())


def _decoded(content: bytes | None) -> StoredTurn | None:
    if content is None:
        return None
    about, _, encoded = content.partition(b"\n")
    upstream, session, first, began, is_known = json.loads(about)
    history = None
    if is_known:
        with suppress(ValueError):  # of another version
            history = StoredHistory.decode(encoded)
    return StoredTurn(upstream, session, first, began, history)
