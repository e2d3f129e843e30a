"""A publisher of KV events like an engine's, which can also fail on demand."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

__all__ = ["KvPublisher", "removed", "stored"]

_END = (-1).to_bytes(8, "big", signed=True)


def stored(
    hashes: Sequence[int | bytes], parent: int | bytes | None, tokens: Sequence[int], size: int, **fields: object
) -> dict[str, object]:
    """Return a `BlockStored` as vLLM sends it since 0.24."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        **fields,
    }


def removed(*hashes: int | bytes, **fields: object) -> dict[str, object]:
    """Return a `BlockRemoved` as vLLM sends it since 0.24."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **fields}


class KvPublisher:
    """Publishes on a free port, and answers replay requests on another. One thread publishes at a time.

    Args:
        topic: Topic of every message.
        rank: Data-parallel rank in the batches.
        buffer: Number of batches that can be replayed.
        replays: True to answer replay requests.
        sends_topic: True to send the topic with answers, as vLLM does since 0.26.
        port: Port to publish at; 0 for a free one. `replay_port` likewise.
    """

    def __init__(
        self,
        *,
        topic: str = "kv@engine",
        rank: int | None = 0,
        buffer: int = 10_000,
        replays: bool = True,
        sends_topic: bool = True,
        port: int = 0,
        replay_port: int = 0,
    ) -> None:
        self.sequence = 0
        """Number of the next batch."""
        self.replay_requests: list[int] = []
        """First number of each replay request."""
        self.replays = replays
        self._topic = topic.encode()
        self._rank = rank
        self._sends_topic = sends_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.XPUB)  # like PUB, but it receives subscriptions
        self._publisher.linger = 0
        self._publisher.sndhwm = 0
        self._publisher.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = f"tcp://127.0.0.1:{_port(self._publisher)}"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.replay_endpoint = f"tcp://127.0.0.1:{_port(self._router)}"
        self._open = True
        self._thread = threading.Thread(target=self._answer, name="kv-publisher", daemon=True)
        self._thread.start()

    def wait_for_subscriber(self, timeout: float = 10.0) -> None:
        """Wait for a subscriber; earlier messages are not delivered."""
        if not self._publisher.poll(int(timeout * 1_000)):
            raise TimeoutError("no subscriber within the timeout")
        self._publisher.recv()

    def publish(self, *events: Any, sent: bool = True, kept: bool = True, at: float | None = None) -> None:
        """Publish one batch, or lose it on its way (`sent`), or leave it out of replays (`kept`)."""
        batch = [time.time() if at is None else at, list(events), self._rank]
        self.publish_payload(msgspec.msgpack.encode(batch), sent=sent, kept=kept)

    def publish_payload(self, payload: bytes, *, sent: bool = True, kept: bool = True) -> None:
        """Publish any payload."""
        number, self.sequence = self.sequence, self.sequence + 1
        with self._lock:
            if kept:
                self._buffer.append((number, payload))
        if sent:
            self.send_frames(self._topic, number.to_bytes(8, "big"), payload)

    def send_frames(self, *frames: bytes) -> None:
        """Send any message."""
        self._publisher.send_multipart(frames)

    def restart(self) -> None:
        """Count from 0 again with nothing to replay, as a new process does."""
        self.sequence = 0
        with self._lock:
            self._buffer.clear()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._publisher.close(0)
        self._router.close(0)
        self._context.term()

    def __enter__(self) -> KvPublisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self) -> None:
        while self._open:
            if not self._router.poll(20):
                continue
            client, empty, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replay_requests.append(first)
            if not self.replays:
                continue
            topic = [self._topic] if self._sends_topic else []
            with self._lock:
                kept = [item for item in self._buffer if item[0] >= first]
            for number, payload in kept:
                self._router.send_multipart([client, empty, *topic, number.to_bytes(8, "big"), payload])
            self._router.send_multipart([client, empty, *([b""] if self._sends_topic else []), _END, b""])


def _port(bound: zmq.Socket[bytes]) -> int:
    return int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
