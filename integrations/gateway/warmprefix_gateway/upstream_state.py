"""What a gateway has seen of each upstream: whether it answers, its errors, and how long its first bytes take."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from warmprefix.errors import MissingExtraError

try:
    import aiohttp
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["Durations", "FirstByteTimer", "FirstByteTimes", "UpstreamState", "reason_of", "written_time"]

_LATEST = 1_000


class Durations:
    """The latest of a series of durations, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def __bool__(self) -> bool:
        return bool(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)

    def percentile(self, share: float) -> float:
        """Return the duration that this share of them does not exceed. O(n log n).

        Raises:
            IndexError: There is no duration.
        """
        return sorted(self._latest)[max(-int(-share * len(self._latest) // 1) - 1, 0)]


class FirstByteTimes(NamedTuple):
    """Seconds until the first byte of an answer."""

    gateway: float
    """From the client's last byte to the request to the upstream, and from the answer's first byte to the client."""
    upstream: float
    """From the request to the upstream to the first byte of the answer's body."""


class FirstByteTimer:
    """Measures a request from its last byte on; of several attempts, the last one counts as the upstream's."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prepared = self._asked = self._arrived = 0.0

    def ask(self) -> None:
        self._asked = time.perf_counter()
        self._prepared = self._prepared or self._asked

    def arrive(self) -> None:
        """Note the first piece of the answer."""
        self._arrived = time.perf_counter()

    def end(self) -> FirstByteTimes:
        """Return the times when the first piece was passed on."""
        own = self._prepared - self._began + time.perf_counter() - self._arrived
        return FirstByteTimes(own, self._arrived - self._asked)


@dataclass(slots=True)
class UpstreamState:
    """One upstream, as its requests and checks have found it. Times are seconds since 1970."""

    base: str
    clock: Callable[[], float] = time.time
    answers: bool = True
    changed_at: float | None = None
    """When it stopped to answer, or did so again; None if it always did."""
    requests: int = 0
    in_flight: int = 0
    errors: int = 0
    last_error: str = ""
    last_error_at: float | None = None
    first_bytes: Durations = field(default_factory=Durations)
    """Times from a request to the first byte of its answer's body."""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request for as long as it runs."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def fail(self, reason: str) -> None:
        """Count an error."""
        self.errors += 1
        self.last_error, self.last_error_at = reason, self.clock()

    def change(self, answers: bool) -> None:
        """Note that it answers again, or does not answer any more."""
        self.answers = answers
        self.changed_at = self.clock()


def reason_of(error: BaseException) -> str:
    """Return why a request failed, without anything of the request."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the name of its host was not found"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return type(error).__name__


def written_time(seconds: float) -> str:
    """Return a time in UTC.

    >>> written_time(0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
