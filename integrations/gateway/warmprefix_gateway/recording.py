"""A log of requests, for `warmprefix doctor`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

__all__ = ["BodyRecorder"]

_MOST_WAITING_BYTES = 64 << 20


class BodyRecorder:
    """Appends requests to a file, in a thread of its own; the file holds their texts, so only its owner may read it.

    Each line is a JSON object: `time` in seconds, `tenant`, `session_id`, the `usage` that the upstream reported, and
    the client's `request`. What cannot be written, or would wait behind 64 MiB of others, is lost, and reported to
    `on_loss`.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, on_loss: Callable[[str, Exception], None]) -> None:
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)  # noqa: SIM115
        self._on_loss = on_loss
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "warmprefix-recorder")

    def record(
        self, content: bytes, *, time: float, tenant: str | None, session: str, usage: Mapping[str, object] | None
    ) -> None:
        """Append a request whose body is the JSON object `content`."""
        with self._lock:
            has_room = self._waiting_bytes + len(content) <= _MOST_WAITING_BYTES
            self._waiting_bytes += len(content) if has_room else 0
        if not has_room:
            self._on_loss("a request was not recorded", BlockingIOError())
            return
        about = {"time": time, "tenant": tenant, "session_id": session, "usage": usage}
        one_line = content.replace(b"\r", b" ").replace(b"\n", b" ")
        line = b'%s,"request":%s}\n' % (json.dumps(about).encode()[:-1], one_line)
        self._writer.submit(self._write, line).add_done_callback(self._written(len(content)))

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
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
