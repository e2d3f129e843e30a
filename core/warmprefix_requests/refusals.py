"""Which of the fields that we add an endpoint refuses, and the requests to send after a refusal. No I/O."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from warmprefix.forks import fork_safe_lock
from warmprefix_requests.outgoing import OutgoingRequest

__all__ = ["REFUSALS", "Attempt", "FieldRefusals"]

_MOST_STATES = 4_096
_KEPT_SECONDS = 600.0
_NEEDED = 2
"""One request may be refused for a reason of its own that the plain one happens not to have."""

_OF_REQUEST = "tools"
"""Kind of fields that an endpoint may refuse in one request and take in another: changes of tools in its history."""

REFUSALS = (400, 422)
"""Statuses of a request that has a field which the endpoint does not take; SGLang refuses a priority with 503, too."""


class _FieldState(NamedTuple):
    until: float
    is_accepted: bool
    refused: tuple[bytes, ...]
    """Digests of different bodies that were refused with the fields and accepted without them."""


class FieldRefusals:
    """Remembers which optional fields an endpoint takes, for each model and tenant. Thread-safe.

    What one tenant's requests show never changes those of another one. A state is kept for ten minutes, and then found
    out again. The least recently noted state goes first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: OrderedDict[bytes, _FieldState] = OrderedDict()
        self._lock = fork_safe_lock()

    def attempt(self, request: OutgoingRequest, endpoint: str, tenant: str | None = None) -> Attempt:
        """Return the first attempt at a request, without its optional fields if the endpoint refuses them."""
        return Attempt(self, request, endpoint, tenant)

    def refuses(self, endpoint: str, model: object, tenant: str | None, fields: Sequence[str]) -> bool:
        """Return True if a request with these optional fields need not be tried."""
        return self.accepts(_key(endpoint, model, tenant, fields)) is False

    def takes(self, endpoint: str, model: object, tenant: str | None, fields: Sequence[str]) -> bool:
        """Return True if a request with these optional fields was answered lately."""
        return self.accepts(_key(endpoint, model, tenant, fields)) is True

    def accepts(self, key: bytes) -> bool | None:
        """Return whether the endpoint takes the fields of an attempt; None if that is open."""
        state = self._states.get(key)
        if state is None or self._clock() >= state.until:
            return None
        if state.is_accepted:
            return True
        return False if len(state.refused) >= _NEEDED else None

    def accepted(self, key: bytes) -> None:
        """Note that a request with these fields was answered."""
        self._note(key, _FieldState(self._clock() + _KEPT_SECONDS, True, ()))

    def refused(self, key: bytes, content: bytes) -> None:
        """Note that a request was refused with these fields, and answered without them.

        It counts once two requests of different `content` were refused, and none was accepted between them.
        """
        now = self._clock()
        state = self._states.get(key)
        earlier = state.refused if state is not None and now < state.until else ()
        digest = blake2b(content, digest_size=16).digest()
        self._note(key, _FieldState(now + _KEPT_SECONDS, False, tuple(dict.fromkeys([*earlier, digest]))[:_NEEDED]))

    def _note(self, key: bytes, state: _FieldState) -> None:
        with self._lock:
            self._states[key] = state
            self._states.move_to_end(key)
            while len(self._states) > _MOST_STATES:
                self._states.popitem(last=False)


class Attempt:
    """The attempts at one request: with its optional fields, and without them after a refusal."""

    def __init__(self, refusals: FieldRefusals, request: OutgoingRequest, endpoint: str, tenant: str | None) -> None:
        self._refusals = refusals
        self._key = _key(endpoint, request.body.get("model"), tenant, request.optional)
        accepts = refusals.accepts(self._key) if request.plain is not None else True
        self.request = request.plain if accepts is False and request.plain is not None else request
        """The request to send now."""
        self.is_open = accepts is None or (accepts and _OF_REQUEST in request.optional)
        """True if it is not known whether the endpoint takes the fields."""
        self.is_refused = False
        """True if the endpoint refused the fields, and answered the request without them."""
        self._is_repeated = False

    def answered(self, status: int) -> OutgoingRequest | None:
        """Note the status of the answer to `request`.

        Returns:
            The request to send instead, which is the new `request`, if the endpoint may have refused optional fields.
        """
        plain = self.request.plain
        is_refusal = status in REFUSALS or (status == 503 and self.is_open and "retention" in self.request.optional)
        if plain is not None and is_refusal:
            self.request, self.is_open, self._is_repeated = plain, False, True
            return plain
        if status < 400 and plain is not None:
            self._refusals.accepted(self._key)
        elif status < 400 and self._is_repeated:
            self.is_refused = True
            self._refusals.refused(self._key, self.request.content)
        return None


def _key(endpoint: str, model: object, tenant: str | None, fields: Sequence[str]) -> bytes:
    about = endpoint, model if isinstance(model, str) else None, tenant, tuple(fields)
    return blake2b(repr(about).encode("utf-8", "surrogatepass"), digest_size=16).digest()
