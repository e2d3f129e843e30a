"""`SaltCheck`: whether an engine takes a tenant's salt, which decides about the tenant's requests. No I/O.

Tenants whose salt an engine ignores would share its cache, and could measure what others have asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from warmprefix_requests.engine_salts import Engine, recognised_engine
from warmprefix_requests.outgoing import PromptRoute

__all__ = ["SaltCheck"]

_ENGINE_SECONDS = 60.0
"""Time after which an engine is asked again: another one may run at its address."""
_MAX_ENGINES = 64
_UNKNOWN = (Engine(), 0.0)
_REFUSAL = (
    "warmprefix: this engine ignores cache_salt on this route, or is not known to take it there, so tenants would share"
    " a cache"
)


class SaltCheck:
    """The engines that tenants' requests went to. Each is asked once a minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, tuple[Engine, float]] = {}

    def questions(self, request: Any) -> list[Any]:
        """Return the requests of httpx that show the engine behind a request; none if it is known."""
        base = _base(request)
        if self._clock() < self._engines.get(base, _UNKNOWN)[1]:
            return []
        headers = [(name, value) for name, value in request.headers.raw if not name.lower().startswith(b"content-")]
        kind, urls = type(request), (f"{base}/v1/models", f"{base}/version")
        return [kind("GET", url, headers=headers, extensions=request.extensions) for url in urls]

    def decide(self, request: Any, route: PromptRoute, answers: Sequence[bytes] = ()) -> bytes | None:
        """Return the error to answer in place of the engine; None if the request may go out.

        If the engine was not recognised, only Messages are refused, because SGLang ignores their salt.

        Args:
            request: The tenant's request, of httpx.
            route: Its route.
            answers: The contents of the answers to the questions, in their order; an empty one stands for none.
        """
        base = _base(request)
        if answers:
            if len(self._engines) >= _MAX_ENGINES:
                self._engines.clear()
            self._engines[base] = recognised_engine(*answers), self._clock() + _ENGINE_SECONDS
        engine, _ = self._engines.get(base, _UNKNOWN)
        takes = engine.takes_salt(route)
        if takes or (takes is None and route != "messages"):
            return None
        hint = "; use chat completions" if engine.takes_salt("chat") is not False and route != "chat" else ""
        error = {"type": "invalid_request_error", "message": f"{_REFUSAL}{hint}"}
        return json.dumps({"type": "error", "error": error}).encode()


def _base(request: Any) -> str:
    """Return the address of an engine, which ends in front of its `/v1`."""
    url = request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}{url.path.rpartition('/v1/')[0]}"
