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

    So it does not depend on the plan: another one of the same requests asks the same. For the default messages it is of
    all that they are made of, blocks by their fingerprints; that takes a tenth of the time of making them. Other
    messages are made, so that it covers what they write around the blocks.

    Raises:
        TypeError: The messages are no JSON.
    """
    order = sorted(planned.order)
    if messages is PlannedRequest.messages:
        asked = _made_of(planned, order)
    else:
        asked = list(messages(replace(planned, order=tuple(order))))
    asked = [planned.id, planned.wording.scope.tenant, asked]
    return _digest(_canonical(f"the messages of request {planned.id!r}", asked)).digest()


def _made_of(planned: PlannedRequest, order: Sequence[int]) -> list[Any]:
    """What decides on the bytes of `PlannedRequest.messages`; what else does is under the journal's version."""
    wording, request = planned.wording, planned.request
    labels, templates = wording.labels, wording.templates
    keys = [request.blocks[position].fingerprint for position in order]
    blocks = [text for key in keys for text in (labels[key], key.hex())]
    return [wording.preamble, templates.order, templates.location, request.question, blocks]


def digest_of_requests(digests: Sequence[bytes]) -> str:
    """Of all of a batch, in whatever order."""
    return _digest(b"".join(sorted(digests))).hexdigest()


def digest_of_options(options: Mapping[str, Any]) -> str:
    """Of what every request is sent with, headers excepted: they say who asks, not what.

    Raises:
        TypeError: They are no JSON.
    """
    body = {name: value for name, value in options.items() if name != "extra_headers"}
    return _digest(_canonical("request options", body)).hexdigest()


def _canonical(what: str, value: object) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    except TypeError as error:
        raise TypeError(f"with a journal, {what} must be JSON: {error}") from error


def _digest(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
