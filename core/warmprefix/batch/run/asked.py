"""What a batch asks, as a digest: two runs with the same one may share a journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warmprefix.batch.plan import PlannedRequest

__all__ = ["Messages", "digest_of_options", "digest_of_request", "digest_of_requests"]

Messages = Callable[[PlannedRequest], Sequence[Mapping[str, Any]]]
"""Makes the chat that asks a request."""


def digest_of_request(planned: PlannedRequest, messages: Messages) -> bytes:
    """Of its id, its tenant, and its messages with the blocks in relevance order.

    So it covers what `messages` writes around them, and does not depend on the plan: another one of the same requests
    asks the same.
    """
    as_given = replace(planned, order=tuple(sorted(planned.order)))
    asked = [planned.id, planned.wording.scope.tenant, list(messages(as_given))]
    return _digest(_canonical(f"the messages of request {planned.id!r}", asked)).digest()


def digest_of_requests(digests: Sequence[bytes]) -> str:
    """Of all of a batch, in whatever order."""
    return _digest(b"".join(sorted(digests))).hexdigest()


def digest_of_options(options: Mapping[str, Any]) -> str:
    """Of what every request is sent with, headers excepted: they say who asks, not what."""
    body = {name: value for name, value in options.items() if name != "extra_headers"}
    return _digest(_canonical("request options", body)).hexdigest()


def _canonical(what: str, value: object) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=True, separators=(",", ":")).encode("ascii")
    except TypeError as error:
        raise TypeError(f"with a journal, {what} must be JSON: {error}") from error


def _digest(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
