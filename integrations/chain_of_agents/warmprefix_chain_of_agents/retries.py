"""When a call that failed is made again, and when it never is."""

from __future__ import annotations

import email.utils
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from warmprefix import MissingExtraError
from warmprefix_chain_of_agents.reading import SlowAnswerError

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

__all__ = ["Retries", "asked_delay", "is_agents_own", "is_unreachable", "may_pass"]

_PASSING = frozenset({408, 409, 429})
"""Statuses below 500 that another attempt may not meet."""
_AGENTS_OWN = frozenset({401, 403, 404, 429, 502, 503, 504})
"""Statuses that tell of the endpoint, whatever it was asked: no key, no such model, too much to do, no engine."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential back-off with full jitter: each wait is drawn from zero to a limit that doubles.

    >>> retries = Retries(random=lambda: 0.5)
    >>> [retries.delay(failures, None) for failures in (1, 2, 3, 12)]
    [0.25, 0.5, 1.0, 15.0]

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` is negative, or the waits are.
    """

    count: int = 2
    """Attempts after the first."""
    first: float = 0.5
    """Limit of the first wait, in seconds."""
    longest: float = 30.0
    """Limit of any wait, in seconds; one that the server asks for included."""
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)
    """Draws from [0, 1)."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise TypeError(f"count must be an int, got {type(self.count).__name__}")
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, got {self.count}")
        if not 0 <= self.first <= self.longest < math.inf:
            raise ValueError(f"waits must be finite, 0 or more, and first <= longest, got {self.first}, {self.longest}")

    def delay(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after so many failures, 1 or more; `asked` is what the server wants, by `Retry-After`.

        That is kept, with the first wait's jitter on top, so that those who were sent away together do not come back
        together.
        """
        if asked is not None:
            return min(self.longest, asked + self.random() * self.first)
        return self.random() * min(self.longest, self.first * 2.0 ** min(failures - 1, 64))


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later: no connection, no answer in time, or a status that says so."""
    if isinstance(error, UnicodeError) or getattr(error, "code", None) == "insufficient_quota":
        return False
    status = _status(error)
    return status is None or status in _PASSING or status >= 500


def is_unreachable(error: Exception) -> bool:
    """Whether nobody answered at all, or nobody in time: then the agent is taken for dead. One that is slow is not."""
    return isinstance(error, openai.APIConnectionError | TimeoutError) and not isinstance(error, SlowAnswerError)


def is_agents_own(error: Exception) -> bool:
    """Whether the agent would have refused any document, so that another one may well read this."""
    return _status(error) in _AGENTS_OWN


def asked_delay(error: Exception) -> float | None:
    """What the server's `Retry-After` says, in seconds from now."""
    response = getattr(error, "response", None)
    asked: str | None = None if response is None else response.headers.get("retry-after")
    if asked is None:
        return None
    try:
        seconds = float(asked)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(asked).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _status(error: Exception) -> int | None:
    """The HTTP status, that of an error told amid a stream included."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    try:
        return None if status is None else int(status)
    except (TypeError, ValueError):  # such as "server_error"
        return None
