"""Emulated engines and published routers, each in a process of its own, for `real_routers.py`.

    python benchmarks/router_processes.py KV_BLOCKS SPEED

As a script it serves one emulator that publishes the KV events of its cache, until its input ends.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx

from kv_publisher import KvPublisher, removed, stored
from warmprefix_tools.caches import KvSequence, PrefixCache, simulated
from warmprefix_tools.caches.kv_blocks import BlockPool, KvBlock, chained_hashes, root_hash
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

BASE = EmulatorConfig()
START_SECONDS = 60.0


@dataclass(frozen=True)
class Engine:
    """An emulator that runs."""

    url: str
    events: str
    replay: str

    def counter(self, name: str) -> float:
        """Return a counter of its metrics, over all labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextmanager
def engines(count: int, kv_blocks: int, speed: float) -> Iterator[list[Engine]]:
    """Run emulators with empty caches, `speed` times as fast as the emulator's default."""
    command = [sys.executable, __file__, str(kv_blocks), str(speed)]
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        started = []
        for process in processes:
            assert process.stdout is not None
            started.append(Engine(**json.loads(process.stdout.readline())))
        yield started


@contextmanager
def router(programs: Path, kind: str, policy: str, serving: Sequence[Engine], model: str) -> Iterator[str]:
    """Run a router of vLLM or SGLang in front of the engines, and return its URL.

    Args:
        programs: The folder with `sglang-router` or `vllm-router` and its Python.
        kind: "sglang" or "vllm".
        policy: Its name, with options behind it.
        serving: The engines.
        model: What they serve.
    """
    port, metrics = free_ports(2)
    name, *options = policy.split()
    launch = [str(programs / "python"), "-m", f"{kind}_router.launch_router", "--host", "127.0.0.1"]
    launch += ["--port", str(port), "--prometheus-port", str(metrics), "--worker-urls", *[one.url for one in serving]]
    launch += ["--policy", name, *options]
    if name == "kv_aware":
        launch += ["--kv-event-model", model, "--kv-event-block-size", str(BASE.block_size)]
        launch += chain.from_iterable(["--kv-event-source", f"{one.url}={one.events}"] for one in serving)
        launch += chain.from_iterable(["--kv-event-replay-source", f"{one.url}={one.replay}"] for one in serving)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(launch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(url, process, model)
            yield url
        finally:
            process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes], model: str) -> None:
    """Wait until a router answers."""
    body = {"model": model, "messages": [{"role": "user", "content": "Ready?"}], "max_tokens": 1}
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.post(f"{url}/v1/chat/completions", json=body, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} does not answer")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


# -- an emulator with KV events ----------------------------------------------------------------------------------------


class PublishingPool(BlockPool):
    """Publishes the blocks that it evicts."""

    def __init__(self, num_blocks: int, publisher: KvPublisher) -> None:
        super().__init__(num_blocks)
        self._publisher = publisher

    def drop_keys(self, block: KvBlock) -> None:
        if block.keys:
            self._publisher.publish(removed(*map(number_of, block.keys)))
        super().drop_keys(block)


class PublishingCache(PrefixCache):
    """Publishes the blocks that it computes, as vLLM does."""

    publisher: KvPublisher

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self._pool = PublishingPool(num_blocks, self.publisher)

    def _store(self, sequence: KvSequence) -> None:
        parent, tail = sequence.parent_hash, list(sequence.tail)
        super()._store(sequence)
        hashes = [number_of(key) for key in chained_hashes(parent, tail, self.block_size)]
        if hashes:
            before = None if parent == root_hash(None) else number_of(parent)
            self.publisher.publish(stored(hashes, before, tail[: len(hashes) * self.block_size], self.block_size))


def number_of(key: bytes) -> int:
    """Return a KV block's number in events."""
    return int.from_bytes(key[:8], "big")


def main() -> None:
    kv_blocks, speed = int(sys.argv[1]), float(sys.argv[2])
    config = EmulatorConfig(
        kv_blocks=kv_blocks,
        prefill_rate=BASE.prefill_rate * speed,
        base_ttft_ms=BASE.base_ttft_ms / speed,
        decode_rate=BASE.decode_rate * speed,
    )
    with KvPublisher(topic="") as publisher:
        PublishingCache.publisher = publisher
        setattr(simulated, "PrefixCache", PublishingCache)  # noqa: B010 - the emulator's cache from here on
        with EmulatorServer(config) as server:
            print(json.dumps({"url": server.url, "events": publisher.endpoint, "replay": publisher.replay_endpoint}))
            sys.stdout.flush()
            sys.stdin.read()


if __name__ == "__main__":
    main()
