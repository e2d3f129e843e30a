"""The routes that a gateway opens to tenants. Everything else is refused, because engines do not check who asks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

__all__ = ["RouteKind", "Routes"]

RouteKind = Literal["prompt", "embedding", "other"]
"""A body that gets the tenant's salt and is counted; one that gets the salt alone; one that passes as it comes."""

_PART = r"[\w~@:+-][\w.~@:+-]*"
"""A part of a path that no server reads in another way: not percent-encoded, not empty, no dots in front, no `;`."""
_PATH = re.compile(rf"(?:/{_PART}(?:%2[Ff]{_PART})*)+", re.ASCII)
_BASE = rf"(?:/openai|/anthropic|/openai/deployments/{_PART})?(?:/v[12])?"

_TABLE: tuple[tuple[str, RouteKind, str], ...] = (
    ("POST", "prompt", r"/(?:chat/completions|completions|messages|responses)"),
    ("POST", "embedding", r"/(?:embeddings|rerank|score)"),
    # These render or count a prompt. They compute nothing with the model, so they leave no trace in its cache.
    ("POST", "other", r"/(?:tokenize|detokenize|messages/count_tokens)"),
    ("GET", "other", r"/(?:health|ping|version|models(?:/.+)?)"),
)


class Routes:
    """Routes that are open to tenants.

    Args:
        allowed: Further routes, each a path or a method and a path, such as `GET /v1/files/*`. A `*` stands for
            characters of one part of the path.

    Raises:
        ValueError: A route has another form.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = [_pattern(text) for text in allowed]

    def kind(self, method: str, raw_path: str) -> RouteKind | None:
        """Return the kind of a route; None if it is closed. The path is as it goes out, not decoded."""
        if not _PATH.fullmatch(raw_path):
            return None
        asked = "GET" if method == "HEAD" else method
        for opened, kind, ends in _TABLE:
            if opened == asked and re.fullmatch(_BASE + ends, raw_path, re.ASCII):
                return kind
        if any(only in ("", asked) and pattern.fullmatch(raw_path) for only, pattern in self._allowed):
            return "other"
        return None


def _pattern(text: str) -> tuple[str, re.Pattern[str]]:
    """Return the method of an allowed route, empty for any, and the pattern of its path."""
    method, _, path = text.rpartition(" ")
    if not re.fullmatch(r"[A-Z]*", method) or not _PATH.fullmatch(path.replace("*", "x")):
        raise ValueError(f"a route must be a path, or a method and a path, such as 'GET /v1/files/*', got {text!r}")
    return method, re.compile(re.escape(path).replace(r"\*", "[^/%]*"))  # servers read %2F as a slash
