"""Answers that the gateway gives itself, in the shape of the route's own errors."""

from __future__ import annotations

import json

__all__ = ["error_body", "is_messages"]

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def is_messages(path: str) -> bool:
    """Return True for a route of Anthropic's API."""
    return path.rstrip("/").endswith(("/messages", "/messages/count_tokens"))


def error_body(path: str, status: int, message: str) -> bytes:
    """Return the body of an error, in Anthropic's shape for its routes and in OpenAI's for all others.

    >>> error_body("/v1/chat/completions", 502, "no upstream answers")
    b'{"error": {"message": "no upstream answers", "type": "api_error", "param": null, "code": 502}}'
    """
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if is_messages(path):
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
