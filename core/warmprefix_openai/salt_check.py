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

_ENGINE_SECONDS, _NO_ANSWER_SECONDS = 60.0, 5.0
"""Time after which an engine is asked again, as another one may run at its address: after an answer, and without one.
"""
_QUESTION_SECONDS = 5.0
"""Longest time of each step of a question."""
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
        base, now = _base(request), self._clock()
        engine, until = self._engines.get(base, _UNKNOWN)
        if now < until:
            return []
        if base in self._engines:  # requests beside this one do not ask too
            self._engines[base] = engine, now + _NO_ANSWER_SECONDS
        headers = [(name, value) for name, value in request.headers.raw if not name.lower().startswith(b"content-")]
        given = request.extensions.get("timeout", {})
        timeout = {name: min(_QUESTION_SECONDS, seconds or _QUESTION_SECONDS) for name, seconds in given.items()}
        kind, extensions = type(request), {**request.extensions, "timeout": timeout}
        path = _path(request)
        urls = [request.url.copy_with(raw_path=path + end) for end in (b"/v1/models", b"/version")]
        return [kind("GET", url, headers=headers, extensions=extensions) for url in urls]

    @staticmethod
    def content(response: Any) -> bytes:
        """Return what an answer to a question says; empty if the engine may say something else later."""
        known: dict[int, bytes] = {200: response.content, 404: b"{}"}
        return known.get(response.status_code, b"")

    def decide(
        self, request: Any, route: PromptRoute, answers: Sequence[bytes] = (), failure: Exception | None = None
    ) -> bytes | None:
        """Return the error to answer in place of the engine; None if the request may go out.

        If the engine was not recognised, only Messages are refused, because SGLang ignores their salt.

        Args:
            request: The tenant's request, of httpx.
            route: Its route.
            answers: The contents of the answers to the questions, in their order; an empty one stands for none.
            failure: Why a question failed. It is raised if the request may not go out.
        """
        base = _base(request)
        engine, _ = self._engines.get(base, _UNKNOWN)
        if answers:
            models, version = answers
            found = recognised_engine(models, version)
            if models and (version or found.name != engine.name):  # a busy engine is still the same
                engine = found
            self._keep(base, engine, _ENGINE_SECONDS if all(answers) else _NO_ANSWER_SECONDS)
        takes = engine.takes_salt(route)
        if takes or (takes is None and route != "messages"):
            if failure is not None:  # the next requests do not ask, and so do not wait for it too
                self._keep(base, engine, _NO_ANSWER_SECONDS)
            return None
        if failure is not None:
            raise failure
        hint = "; use chat completions" if engine.takes_salt("chat") is not False and route != "chat" else ""
        error = {"type": "invalid_request_error", "message": f"{_REFUSAL}{hint}"}
        return json.dumps({"type": "error", "error": error}).encode()

    def _keep(self, base: str, engine: Engine, seconds: float) -> None:
        if len(self._engines) >= _MAX_ENGINES:
            self._engines.clear()
        self._engines[base] = engine, self._clock() + seconds


def _base(request: Any) -> str:
    """Return the address of an engine, which ends in front of its `/v1`."""
    return f"{request.url.scheme}://{request.url.netloc.decode('ascii')}{_path(request).decode('ascii')}"


def _path(request: Any) -> bytes:
    return bytes(request.url.raw_path.partition(b"?")[0].rpartition(b"/v1/")[0])
