"""A server's description of itself, and warnings to its operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

__all__ = ["ServerReport", "address_of", "ask_server"]

_ALMOST_FULL = 0.8


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server that serves keys."""

    address: str
    flavour: str
    """`"redis"` or `"valkey"`."""
    version: str
    mode: str
    """`"standalone"` or `"cluster"`."""
    role: str
    """`"primary"` or `"replica"`."""
    replicas: int
    """Connected to it."""
    uptime_seconds: int
    used_memory: int
    """Bytes."""
    max_memory: int | None
    """Bytes; None without a limit."""
    machine_memory: int | None
    """Bytes; None where INFO lacks it."""
    eviction_policy: str
    evicted_keys: int
    """Since it started."""
    persistence: str
    """Such as `"RDB and AOF"`, or `"none"`; `"unknown"`, or `"AOF, else unknown"`, where CONFIG is forbidden."""
    saves: bool
    """True if its last attempts to save worked."""
    keys: int
    """In this database, of this application or any other."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences, each with a problem and its solution."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.role == "replica":
            yield "It is a replica, which takes no writes: give planners the primary, the Sentinels or the Cluster."
        if _version(self.version) < (6, 2):
            yield "It is older than Redis 6.2, the first version that works."
        if self.eviction_policy.endswith("-random"):
            yield (
                f"It evicts at random ({self.eviction_policy}), conversations in use as readily as finished ones:"
                " set maxmemory-policy to allkeys-lru or volatile-lru."
            )
        if self.max_memory is not None and self.eviction_policy == "noeviction" and self._is_short_of(self.max_memory):
            yield (
                f"It has used {self.used_memory / self.max_memory:.0%} of maxmemory and evicts nothing (noeviction);"
                " when it is full, no turn is remembered: set maxmemory-policy to allkeys-lru or volatile-lru."
            )
        if self.max_memory is None and self.machine_memory and self._is_short_of(self.machine_memory):
            yield (
                f"It has used {self.used_memory / self.machine_memory:.0%} of the machine's memory and has no limit:"
                " set maxmemory."
            )
        if not self.saves:
            yield "Its last attempt to save failed; until one works, it may refuse all writes. Look at its log."

    def _is_short_of(self, memory: int) -> bool:
        return self.used_memory >= _ALMOST_FULL * memory


def address_of(client: Any) -> str:
    """Return the address of a client's one server; Sentinels are asked for the master's."""
    pool = client.connection_pool
    if hasattr(pool, "get_master_address"):
        host, port = pool.get_master_address()
        return f"{host}:{port}"
    options = pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def ask_server(client: Any, address: str) -> ServerReport:
    """Return one server's report. Raises what redis-py raises."""
    info: Mapping[str, Any] = client.info()
    is_valkey = info.get("server_name") == "valkey" or "valkey_version" in info
    return ServerReport(
        address=address,
        flavour="valkey" if is_valkey else "redis",
        version=str(info["valkey_version" if is_valkey else "redis_version"]),
        mode="cluster" if info.get("cluster_enabled") else "standalone",
        role="primary" if info["role"] == "master" else "replica",
        replicas=int(info.get("connected_slaves", 0)),
        uptime_seconds=int(info["uptime_in_seconds"]),
        used_memory=int(info["used_memory"]),
        max_memory=int(info["maxmemory"]) or None,
        machine_memory=int(info.get("total_system_memory", 0)) or None,
        eviction_policy=str(info["maxmemory_policy"]),
        evicted_keys=int(info["evicted_keys"]),
        persistence=_persistence(client, info),
        saves=info.get("rdb_last_bgsave_status", "ok") == "ok" and info.get("aof_last_write_status", "ok") == "ok",
        keys=int(client.dbsize()),
    )


def _persistence(client: Any, info: Mapping[str, Any]) -> str:
    aof = bool(info.get("aof_enabled"))
    try:
        rdb = bool(client.config_get("save").get("save"))
    except ResponseError:  # an ACL forbids it, or the command was renamed
        return "AOF, else unknown" if aof else "unknown"
    return {(False, False): "none", (True, False): "RDB", (False, True): "AOF", (True, True): "RDB and AOF"}[rdb, aof]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
