"""Which servers a store has met, and whether what they remember can be trusted."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from warmprefix.forks import in_each_process
from warmprefix.stores.redis.codec import Server

__all__ = ["Journal", "Servers"]

_MAX_SERVERS = 256


class Journal:
    """The keys of the conversations that were to be forgotten last; thread-safe. Without repetition, oldest first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        in_each_process(self._renew_lock)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._size:
                self._keys.popitem(last=False)

    def recent(self) -> list[bytes]:
        with self._lock:
            return list(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Servers:
    """Servers by their identity, which is another after a restart and after a failover.

    One not met before may hold an older copy of the data: all of a conversation that it has is true, unless it lacks
    that the conversation was forgotten since. So it is trusted only after a while, in which every worker repeats what
    it asked to be forgotten, and once this one has done so at the end of that while: until then a connection may still
    lead to the server's predecessor. The first that a store meets is trusted at once if by its own account that while
    has passed.

    Thread-safe.

    Args:
        settle: That while, in seconds.
        journal: What to repeat.
        clock: Seconds from any origin, never backwards.
    """

    def __init__(self, settle: float, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle = settle
        self._journal = journal
        self._clock = clock
        in_each_process(self._renew_lock)
        self._met: OrderedDict[bytes, _Met] = OrderedDict()
        self._began: float | None = None

    @property
    def is_new(self) -> bool:
        """Whether it is still meeting its first, of a Cluster more than one; of those the uptime counts."""
        began = self._began
        return began is None or self._clock() - began <= self._settle

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def is_trusted(self, server: Server) -> bool:
        """Meet a server: it has answered. O(1)."""
        with self._lock:
            return self._meet(server).is_trusted

    def needs_repetition(self, server: Server) -> bool:
        """Whether the journal is to be repeated there now: when it is met, and again when it has settled."""
        with self._lock:
            met = self._meet(server)
            if met.is_trusted:
                return False
            return met.repeated is None or met.repeated < met.settles <= self._clock()

    def repeated(self, server: Server, began: float) -> None:
        """The journal was repeated there, all of it as it was at a moment of this object's clock."""
        with self._lock:
            if server.identity in self._met:
                self._met[server.identity].repeated = began

    def now(self) -> float:
        return self._clock()

    def _meet(self, server: Server) -> _Met:
        now = self._clock()
        if self._began is None:
            self._began = now
        met = self._met.get(server.identity)
        if met is None:
            has_settled = self.is_new and not server.promoted and server.uptime - 1 >= self._settle
            met = self._met[server.identity] = _Met(now if has_settled else now + self._settle)
            if len(self._met) > _MAX_SERVERS:
                self._met.popitem(last=False)
        if not met.is_trusted and now >= met.settles:
            met.is_trusted = len(self._journal) == 0 or (met.repeated is not None and met.repeated >= met.settles)
        return met


@dataclass(slots=True)
class _Met:
    settles: float
    """When it can be trusted at the earliest."""
    repeated: float | None = None
    """When the journal was repeated there last."""
    is_trusted: bool = False
