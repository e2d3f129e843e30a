"""Laboratories: stores that several workers share, and the faults that strike them while they are in use."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from fault_proxy import Delay, Dribble, FaultProxy, Reorder, Stall, Swallow, Truncate
from redis_servers import Clock, Server, wait_until
from warmprefix.stores import Conversation, MemorySeenStore, Operation, RecordBounds, SeenStore, Snapshot
from warmprefix_redis import RedisSeenStore

__all__ = ["Laboratory", "Lease", "MemoryLaboratory", "RedisLaboratory"]

T = TypeVar("T")


class Lease(NamedTuple):
    """The time at which a plan was made."""

    time: float
    """On the store's clock."""
    jumps: int
    """Number of jumps of that clock until then."""


class Laboratory:
    """Maker of a store for each worker, which also breaks the servers and connections behind them.

    Args:
        seed: Decides on faults and their length.
        faults: "none", "all", or a part of the names of the possible faults.
        lossy: True if the store may lose records, or restore old ones.
        asymmetric: True if one worker may be cut off while others are not.
    """

    _lease_ttl = 100.0

    def __init__(self, seed: int, faults: str, *, lossy: bool, asymmetric: bool) -> None:
        self.faults: Counter[str] = Counter()
        """Number of times that each fault began."""
        self._rng = random.Random(f"faults {seed}")
        self._named = faults
        self._lossy = lossy
        self._asymmetric = asymmetric

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def store(self, worker: int) -> SeenStore:
        """Return a store for one worker; called again when the worker is replaced."""
        raise NotImplementedError

    def begin_fault(self) -> float:
        """Begin a fault, unless there are none; return for how many seconds it should last."""
        if self._named == "none":
            return 0.0
        possible = self._possible_faults()
        faults = {name: begin for name, begin in possible.items() if self._named == "all" or self._named in name}
        if not faults:
            raise ValueError(f"faults must be 'none', 'all' or a part of one of {', '.join(possible)}")
        name = self._rng.choice(list(faults))
        self.faults[name] += 1
        faults[name]()
        return self._rng.choice([0.0, 0.03, 0.1, 0.3])

    def end_fault(self) -> None:
        """End the fault."""
        self.repair()

    def repair(self) -> None:
        """Repair everything."""
        raise NotImplementedError

    def may_lose_worker(self) -> bool:
        """Return whether a worker may die now, with all that only it has recorded; called right before it dies."""
        return True

    def wait(self, rng: random.Random) -> None:
        """Let the store's time pass."""

    @property
    def lease(self) -> Lease:
        """Lease of a plan that is made now."""
        raise NotImplementedError

    def holds(self, lease: Lease) -> bool:
        """Return whether the store must still have the lease of the plan."""
        return not self._lossy and self.lease.time < lease.time + self._lease_ttl and self.lease.jumps == lease.jumps

    def close(self) -> None:
        pass

    def _possible_faults(self) -> Mapping[str, Callable[[], None]]:
        raise NotImplementedError

    def _struck(self, workers: Sequence[T]) -> Sequence[T]:
        """Return the workers that a fault strikes: all of them, or some."""
        if not self._asymmetric:
            return workers
        return self._rng.sample(workers, self._rng.randrange(1, len(workers) + 1))


# -- in memory -----------------------------------------------------------------------------------------------------


class MemoryLaboratory(Laboratory):
    """A laboratory with one `MemorySeenStore`; requests and replies get lost on their way."""

    def __init__(self, seed: int, faults: str, *, lossy: bool, asymmetric: bool) -> None:
        super().__init__(seed, faults, lossy=lossy, asymmetric=asymmetric)
        self._now = 0.0
        self._shared = MemorySeenStore(
            max_conversations=15 if lossy else 10_000,
            bounds=RecordBounds(max_blocks=40, ttl=1_000 if lossy else 1e12, lease_ttl=self._lease_ttl),
            clock=lambda: self._now,
        )
        self._faulties: dict[int, _Faulty] = {}

    def store(self, worker: int) -> SeenStore:
        if self._named == "none":
            return self._shared
        faulty = self._faulties[worker] = _Faulty(self._shared)
        return faulty

    def wait(self, rng: random.Random) -> None:
        self._now += rng.choice((1.0, 30.0, 99.0, 101.0, 1_001.0))

    @property
    def lease(self) -> Lease:
        return Lease(self._now, 0)

    def repair(self) -> None:
        for store in self._faulties.values():
            store.fault = "none"

    def _possible_faults(self) -> Mapping[str, Callable[[], None]]:
        faults: dict[str, Callable[[], None]] = {
            "question lost": lambda: self._break("before"),
            "answer lost": lambda: self._break("after"),
            "late": lambda: self._break("late"),
        }
        if self._lossy:
            faults["everything lost"] = self._shared.clear
        return faults

    def _break(self, fault: Literal["before", "after", "late"]) -> None:
        for store in self._struck(list(self._faulties.values())):
            store.fault = fault


class _Faulty:
    """A worker's connection to a store: calls fail before or after they are made, or reach the store too late."""

    def __init__(self, store: SeenStore) -> None:
        self.fault: Literal["none", "before", "after", "late"] = "none"
        self._store = store
        self._late: list[Operation[Any]] = []

    def execute(self, operation: Operation[T]) -> T:
        while len(self._late) > (self.fault == "late"):  # on a connection that was given up
            self._store.execute(self._late.pop(0))
        if self.fault == "late":
            self._late.append(operation)
            raise TimeoutError("late")
        if self.fault == "before":
            raise ConnectionError("before")
        answer = self._store.execute(operation)
        if self.fault == "after":
            raise ConnectionError("after")
        return answer

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        return self._store.inspect(conversation)

    def clear(self) -> None:
        self._store.clear()


# -- in Redis ------------------------------------------------------------------------------------------------------


class RedisLaboratory(Laboratory):
    """A laboratory with a real server, and a proxy in front of it for each worker.

    Args:
        lease_ttl: Seconds in which a plan must be committed.
        ttl: Seconds that a record lives, on the server's clock.
        max_blocks: Blocks of a record.
        budget: Seconds that a call may take; several without faults, when only a busy machine makes it slow.
        flavour: A key of `redis_servers.binaries()`; None for the first.
    """

    def __init__(
        self,
        seed: int,
        faults: str,
        *,
        lossy: bool,
        asymmetric: bool,
        lease_ttl: float = 3.0,
        ttl: float = 86_400.0,
        max_blocks: int = 64,
        budget: float = 0.02,
        flavour: str | None = None,
    ) -> None:
        super().__init__(seed, faults, lossy=lossy, asymmetric=asymmetric)
        self._lease_ttl = lease_ttl
        self._ttl = ttl
        self._max_blocks = max_blocks
        self._budget = 5.0 if faults == "none" else budget
        self._flavour = flavour
        self._proxies: list[FaultProxy] = []
        self._clock = Clock()
        self._jumps = 0
        # The system keeps what a killed process has written, so no acknowledged write is lost.
        self._server = self._started()
        self._snapshot()

    def url(self, worker: int) -> str:
        """Return the address of the proxy of one worker."""
        while len(self._proxies) <= worker:
            self._proxies.append(FaultProxy(self._server.port, seed=self._rng.randrange(1 << 30)))
        return f"redis://127.0.0.1:{self._proxies[worker].port}"

    def store(self, worker: int) -> SeenStore:
        bounds = RecordBounds(lease_ttl=self._lease_ttl, max_blocks=self._max_blocks, ttl=self._ttl)
        return RedisSeenStore(self.url(worker), bounds=bounds, timeout=self._budget)

    @property
    def lease(self) -> Lease:
        return Lease(time.monotonic(), self._jumps)

    def holds(self, lease: Lease) -> bool:
        return super().holds(lease._replace(time=lease.time - 0.5))  # the two clocks are not read at the same moment

    def may_lose_worker(self) -> bool:
        return self._server.is_running and not self._server.is_paused

    def repair(self) -> None:
        self._server.resume()
        for proxy in self._proxies:
            proxy.heal()
        if not self._server.is_running:
            self._server.start()
        with self._server.client() as client:
            client.config_set("maxmemory", "0")
            client.replicaof("NO", "ONE")
            client.config_set("appendonly", "yes")
        if self._clock.offset:
            self._jump(-self._clock.offset)

    def end_fault(self) -> None:
        super().end_fault()
        if self._lossy and self._rng.random() < 0.5:
            self._snapshot()

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        self._server.close()
        self._clock.close()

    def _possible_faults(self) -> Mapping[str, Callable[[], None]]:
        random_bytes = self._rng.randrange(400)
        faults: dict[str, Callable[[], None]] = {
            "requests stall": lambda: self._break(requests=Stall()),
            "replies stall": lambda: self._break(replies=Stall()),
            "requests swallowed": lambda: self._break(requests=Swallow()),
            "replies swallowed": lambda: self._break(replies=Swallow()),
            "requests truncated": lambda: self._break(requests=Truncate(random_bytes)),
            "replies truncated": lambda: self._break(replies=Truncate(random_bytes)),
            "requests dribble": lambda: self._break(requests=Dribble()),
            "replies dribble": lambda: self._break(replies=Dribble()),
            "requests late": lambda: self._break(requests=Delay(0.015)),
            "replies late": lambda: self._break(replies=Delay(0.025)),
            "requests reordered": lambda: self._break(requests=Reorder(self._rng.choice([1, 16, 48, 120]))),
            "replies reordered": lambda: self._break(replies=Reorder(self._rng.choice([1, 16, 48]))),
            "connections dropped": self._drop,
            "connections refused": self._refuse,
            "clients killed": lambda: self._ask("CLIENT", "KILL", "TYPE", "normal"),
            "scripts flushed": lambda: self._ask("SCRIPT", "FLUSH"),
            "out of memory": lambda: self._ask("CONFIG", "SET", "maxmemory", "1"),
            "read-only": lambda: self._ask("REPLICAOF", "127.0.0.1", "1"),
            "stopped": self._server.pause,
            "killed, nothing lost": self._kill,
            "clock an hour ahead": lambda: self._jump(3_600),
            "clock an hour behind": lambda: self._jump(-3_600),
        }
        if self._lossy:
            faults["killed, everything lost"] = self._kill_and_lose
            faults["killed, restored from before"] = self._kill_and_restore
            faults["keys flushed"] = lambda: self._ask("FLUSHALL")
            faults["keys evicted"] = self._evict
            faults["failed over"] = self._fail_over
        return faults

    def _started(self, **config: str) -> Server:
        return Server(self._flavour, clock=self._clock, appendonly="yes", appendfsync="no", **config)

    def _break(self, **faults: Any) -> None:
        for proxy in self._struck(self._proxies):
            proxy.set(**faults)

    def _drop(self) -> None:
        for proxy in self._struck(self._proxies):
            proxy.drop()

    def _refuse(self) -> None:
        for proxy in self._struck(self._proxies):
            proxy.refuse()
            proxy.drop()

    def _ask(self, *command: str) -> None:
        with self._server.client() as client:
            client.execute_command(*command)

    def _jump(self, seconds: float) -> None:
        self._jumps += 1
        self._clock.jump(seconds)

    def _evict(self) -> None:
        with self._server.client() as client:
            keys = sorted(client.keys())
            for key in self._rng.sample(keys, len(keys) // 2):
                client.delete(key)

    def _snapshot(self) -> None:
        with self._server.client() as client:
            wait_until(lambda: not _is_writing(client.info("persistence")), "no child writes")
            client.save()

    def _kill(self) -> None:
        with self._server.client() as client:  # Redis ignores an append-only file that is not complete
            wait_until(lambda: not _is_writing(client.info("persistence")), "the append-only file stands")
        self._server.kill()

    def _kill_and_lose(self) -> None:
        self._server.kill()
        self._remove("dump.rdb", "appendonly.aof", "appendonlydir")
        self._server.start()
        self._snapshot()

    def _kill_and_restore(self) -> None:
        """Kill the server and restore the last snapshot, which may be many turns old."""
        self._server.kill()
        self._remove("appendonly.aof", "appendonlydir")
        self._server.config["appendonly"] = "no"
        try:
            self._server.start()
        finally:
            self._server.config["appendonly"] = "yes"

    def _fail_over(self) -> None:
        """Kill the server, and put a replica in its place that has all its data."""
        old = self._server
        self._server = self._started(replicaof=f"127.0.0.1 {old.port}")
        wait_until(self._is_replicated, "the replica has all data")
        old.close()
        del self._server.config["replicaof"]  # a restart must not look for the old one
        self._ask("REPLICAOF", "NO", "ONE")
        for proxy in self._proxies:
            proxy.upstream = self._server.port

    def _is_replicated(self) -> bool:
        with self._server.client() as client:
            return bool(client.info("replication")["master_link_status"] == "up")

    def _remove(self, *names: str) -> None:
        for name in names:
            path = self._server.directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _is_writing(info: Mapping[str, Any]) -> bool:
    return bool(info["loading"] or info["rdb_bgsave_in_progress"] or info["aof_rewrite_in_progress"])
