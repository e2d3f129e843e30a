"""A log of what went out and what came back, for `warmprefix doctor`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from warmprefix import ContextBlock

__all__ = ["BodyRecorder", "RecordedExchange"]

_MOST_WAITING_BYTES = 64 << 20


class RecordedExchange(NamedTuple):
    """One request to an upstream, and what came back."""

    time: float
    """Seconds since 1970."""
    tenant: str | None
    session: str
    upstream: str | None
    """Address of the upstream that was asked last; None without any."""
    status: int | None
    """Status of its answer; None without an answer."""
    outcome: str
    """`answered`, `failed` (the upstream reported an error), `broken`, `left` (by the client) or `unanswered`."""
    usage: Mapping[str, object] | None
    """As the upstream reported it."""
    sent: bytes
    """The body as it went to the upstream, a JSON object."""
    client: bytes
    """The body as it came from the client."""
    context: Sequence[str] = ()
    """Blocks of the retrieved context in it, in the client's order."""


class BodyRecorder:
    """Appends exchanges to a file, in a thread of its own; the file holds their texts, so only its owner may read it.

    Each line is a JSON object with the fields of a `RecordedExchange`: `time`, `tenant`, `session_id`, `upstream`,
    `status`, `outcome`, `usage`, and the body that was sent as `request`. Where the client sent something else,
    `client_patch` makes its body of that one (RFC 6902). Where a context was found, `context` has the name and the
    tokens of each block, in the client's order. What cannot be written, or would wait behind 64 MiB of others, is lost,
    and reported to `on_loss`.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, on_loss: Callable[[str, Exception], None]) -> None:
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)  # noqa: SIM115
        self._on_loss = on_loss
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "warmprefix-recorder")

    def record(self, exchange: RecordedExchange) -> None:
        """Append an exchange. Returns at once."""
        size = len(exchange.sent) + (len(exchange.client) if exchange.client is not exchange.sent else 0)
        with self._lock:
            has_room = self._waiting_bytes + size <= _MOST_WAITING_BYTES
            self._waiting_bytes += size if has_room else 0
        if not has_room:
            self._on_loss("a request was not recorded", BlockingIOError())
            return
        self._writer.submit(self._write, exchange).add_done_callback(self._written(size))

    def _write(self, exchange: RecordedExchange) -> None:
        rest = memoryview(_line(exchange))
        while rest:
            rest = rest[self._file.write(rest) :]

    def _written(self, size: int) -> Callable[[Future[None]], None]:
        def done(writing: Future[None]) -> None:
            with self._lock:
                self._waiting_bytes -= size
            error = writing.exception()
            if isinstance(error, Exception):
                self._on_loss("a request was not recorded", error)

        return done

    def close(self) -> None:
        """Write what is waiting, and close the file."""
        self._writer.shutdown()
        self._file.close()


def _line(exchange: RecordedExchange) -> bytes:
    about: dict[str, object] = {
        "time": exchange.time,
        "tenant": exchange.tenant,
        "session_id": exchange.session,
        "upstream": exchange.upstream,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "usage": exchange.usage,
    }
    if exchange.context:
        blocks = map(ContextBlock, exchange.context)
        about["context"] = [[block.fingerprint.hex(), block.tokens] for block in blocks]
    if exchange.client != exchange.sent:
        patch = list(_patch(json.loads(exchange.sent), json.loads(exchange.client), ""))
        if patch:
            about["client_patch"] = patch
    one_line = exchange.sent.replace(b"\r", b" ").replace(b"\n", b" ")
    return b'%s,"request":%s}\n' % (json.dumps(about).encode()[:-1], one_line)


def _patch(sent: Any, client: Any, path: str) -> Iterator[dict[str, object]]:
    """Yield the operations of RFC 6902 that make the client's body of the one that was sent."""
    if isinstance(sent, dict) and isinstance(client, dict):
        for name in sent | client:
            at = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
            if name not in client:
                yield {"op": "remove", "path": at}
            elif name not in sent:
                yield {"op": "add", "path": at, "value": client[name]}
            else:
                yield from _patch(sent[name], client[name], at)
    elif isinstance(sent, list) and isinstance(client, list) and len(sent) == len(client):
        for index, (one, other) in enumerate(zip(sent, client, strict=True)):
            yield from _patch(one, other, f"{path}/{index}")
    elif type(sent) is not type(client) or sent != client:
        yield {"op": "replace", "path": path, "value": client}
