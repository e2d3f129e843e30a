"""Servers that a store has met, and whether their data can be trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from warmprefix.forks import fork_safe_lock
from warmprefix_redis.wire import ServerIdentity

__all__ = ["ForgetJournal", "ServerTrust"]

_MAX_SERVERS = 256


class ForgetJournal:
    """The keys of the conversations forgotten most recently, oldest first, each once. Thread-safe."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._lock = fork_safe_lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._size:
                self._keys.popitem(last=False)

    def recent(self) -> list[bytes]:
        """Return all keys, oldest first."""
        with self._lock:
            return list(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class ServerTrust:
    """Which servers can be trusted, by their identity, which changes with each restart and each failover.

    A new server may hold an older copy of the data. Everything in it is true, except that conversations may have been
    forgotten since. So a server is trusted only `settle` seconds after it was met, the time for every worker to replay
    its journal there; and once this store has replayed its own after that time, because until then a connection may
    still lead to the previous server. The first server that a store meets is trusted at once if by its own account it
    has run that long.

    Thread-safe.

    Args:
        settle: Seconds from meeting a server to trusting it.
        journal: The forgets to replay.
        clock: Seconds from any origin, never backwards.
    """

    def __init__(self, settle: float, journal: ForgetJournal, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._settle = settle
        self._journal = journal
        self._lock = fork_safe_lock()
        self._met: OrderedDict[bytes, _ServerState] = OrderedDict()
        self._began: float | None = None

    @property
    def is_new(self) -> bool:
        """True while this store meets its first server, or the first ones of a Cluster, whose uptime counts."""
        began = self._began
        return began is None or self.now() - began <= self._settle

    def is_trusted(self, server: ServerIdentity) -> bool:
        """Return whether a server that has just answered is trusted. O(1)."""
        with self._lock:
            return self._meet(server).is_trusted

    def needs_replay(self, server: ServerIdentity) -> bool:
        """Return whether to replay the journal there now: when the server is met, and again when it has settled."""
        with self._lock:
            met = self._meet(server)
            if met.is_trusted:
                return False
            return met.replayed is None or met.replayed < met.settles <= self.now()

    def replayed(self, server: ServerIdentity, began: float) -> None:
        """Record that the whole journal was replayed there, as of the time `began` of `now`."""
        with self._lock:
            if server.identity in self._met:
                self._met[server.identity].replayed = began

    def _meet(self, server: ServerIdentity) -> _ServerState:
        now = self.now()
        if self._began is None:
            self._began = now
        met = self._met.get(server.identity)
        if met is None:
            has_settled = self.is_new and not server.promoted and server.uptime - 1 >= self._settle
            met = self._met[server.identity] = _ServerState(now if has_settled else now + self._settle)
            if len(self._met) > _MAX_SERVERS:
                self._met.popitem(last=False)
        if not met.is_trusted and now >= met.settles:
            met.is_trusted = len(self._journal) == 0 or (met.replayed is not None and met.replayed >= met.settles)
        return met


@dataclass(slots=True)
class _ServerState:
    settles: float
    """Earliest time at which it can be trusted."""
    replayed: float | None = None
    """Time of the last replay there."""
    is_trusted: bool = False
