"""What a call's failure says: of the agent, and of another attempt."""

from __future__ import annotations

import email.utils
import math
import time

from warmprefix import MissingExtraError
from warmprefix_chain_of_agents.reading import SlowAnswerError

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

__all__ = ["asked_delay", "is_agents_own", "is_unreachable", "may_pass"]

_PASSING = frozenset({408, 409, 429})
"""Statuses below 500 that another attempt may not meet."""
_AGENTS_OWN = frozenset({401, 403, 404, 429, 502, 503, 504})
"""Statuses that tell of the endpoint, whatever it was asked: no key, no such model, too much to do, no engine."""


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
