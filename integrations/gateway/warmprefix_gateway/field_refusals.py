"""Which of the fields that a gateway adds an upstream refuses: remembered by tenant, and forgotten after a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

__all__ = ["AddedFields", "FieldRefusals"]

_MOST_STATES = 4_096
_KEPT_SECONDS = 600.0
_NEEDED = 2
"""One request may be refused for a reason of its own that the plain one happens not to have."""


class AddedFields(NamedTuple):
    """Fields that were added to a request, and where it goes."""

    base: str
    model: object
    tenant: str | None
    fields: tuple[str, ...]


class _FieldState(NamedTuple):
    until: float
    is_accepted: bool
    refused: tuple[bytes, ...]
    """Digests of different bodies that were refused with the fields and accepted without them."""


class FieldRefusals:
    """Remembers whether an upstream takes the fields that were added for a model, for each tenant.

    A state is kept for ten minutes, and then found out again. The least recently noted state goes first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: OrderedDict[bytes, _FieldState] = OrderedDict()

    def accepts(self, added: AddedFields) -> bool | None:
        """Return whether the upstream takes these fields; None if that is open."""
        state = self._states.get(_key(added))
        if state is None or self._clock() >= state.until:
            return None
        if state.is_accepted:
            return True
        return False if len(state.refused) >= _NEEDED else None

    def accepted(self, added: AddedFields) -> None:
        """Note that a request with these fields was answered."""
        self._note(_key(added), _FieldState(self._clock() + _KEPT_SECONDS, True, ()))

    def refused(self, added: AddedFields, content: bytes) -> None:
        """Note that a request was refused, and answered with `content` as its body, which lacks these fields.

        It counts once two different bodies were refused, and none was accepted between them.
        """
        key, now = _key(added), self._clock()
        state = self._states.get(key)
        earlier = state.refused if state is not None and now < state.until else ()
        digest = blake2b(content, digest_size=16).digest()
        self._note(key, _FieldState(now + _KEPT_SECONDS, False, tuple(dict.fromkeys([*earlier, digest]))[:_NEEDED]))

    def _note(self, key: bytes, state: _FieldState) -> None:
        self._states[key] = state
        self._states.move_to_end(key)
        while len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)


def _key(added: AddedFields) -> bytes:
    model = added.model if isinstance(added.model, str) else None
    return blake2b(repr(added._replace(model=model)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
