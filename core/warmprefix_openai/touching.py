"""`LinkTouches`: sends the touches of a link behind its requests, on a thread or in tasks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from warmprefix.errors import log_failure
from warmprefix.forks import in_each_process
from warmprefix.plan import ContextPlan
from warmprefix.ticker import Ticker
from warmprefix_openai.answer import WholeAnswer
from warmprefix_openai.http_requests import with_body, without_body
from warmprefix_requests import OutgoingRequest
from warmprefix_requests.touches import DueTouch, Toucher

__all__ = ["KeptCall", "LinkTouches", "TouchWay"]

_log = logging.getLogger("warmprefix")

_THREAD = "warmprefix-touches"
_IDLE_SECONDS = 3_600.0
"""The thread is woken for each touch."""
_STEP_SECONDS = 10.0
"""Longest time of each step of a touch."""


class KeptCall(NamedTuple):
    """A request to keep once the engine has answered it."""

    plan: ContextPlan
    outgoing: OutgoingRequest
    """Without the fields that an endpoint may refuse."""


class TouchWay(NamedTuple):
    """How to send once more where a request went."""

    client: weakref.ref[Any]
    """Of httpx or httpx2. It is not kept open."""
    kind: Any
    """The client's class without the link."""
    request: Any
    """A request of the same library, without a body."""
    options: Mapping[str, Any]
    """Those of the client's `send`."""
    loop: weakref.ref[asyncio.AbstractEventLoop] | None
    """The client's event loop; None for a blocking one."""

    def goes_by_thread(self) -> bool:
        """Return True if the client blocks, and is open."""
        return self.loop is None and self._is_open

    def goes_in(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Return True if this is the loop of the client, which is open."""
        return self.loop is not None and loop is not None and self.loop() is loop and self._is_open

    @property
    def _is_open(self) -> bool:
        client = self.client()
        return client is not None and not client.is_closed


class LinkTouches:
    """Sends the touches that are due after each commit. Thread-safe. No error of a touch leaves it.

    A touch goes out through the application's own client, while that is open: on a daemon thread for a blocking one,
    and in a task of the client's loop otherwise. A forked process starts with nothing.
    """

    def __init__(self, toucher: Toucher[TouchWay]) -> None:
        """Send nothing yet; the thread starts with the first touch through a blocking client."""
        self.toucher = toucher
        self._errors = 0
        in_each_process(self._renew)

    def _renew(self) -> None:
        self._choosing = threading.Lock()
        self._due: DueTouch[TouchWay] | None = None
        """For the thread."""
        self._tasks: dict[asyncio.Task[None], TouchWay] = {}
        self._ticker = Ticker(self._send_due, _do_nothing, _THREAD)

    def keep(
        self, call: KeptCall, request: Any, client: Any, kind: Any, options: Mapping[str, Any], *, is_async: bool
    ) -> None:
        """Keep a request that the engine has answered. Never raises."""
        loop = None
        try:
            if is_async:
                loop = weakref.ref(asyncio.get_running_loop())
            way = TouchWay(weakref.ref(client), kind, without_body(request, _STEP_SECONDS), options, loop)
            self.toucher.keep(call.plan, call.outgoing, str(request.url), way)
        except RuntimeError:
            _log.debug("no touches in another kind of event loop than asyncio's")
        except Exception:
            self._failed("a request could not be kept for touches")

    def served(self, plan: ContextPlan) -> None:
        """Send what is due after a commit, without waiting for it. Never raises; a finalizer may call it."""
        if not self._choosing.acquire(blocking=False):
            return
        try:
            self.toucher.served(plan)
            loop = _running_loop()
            due = self.toucher.due(lambda way: way.goes_by_thread() or way.goes_in(loop))
            if due is not None and due.way.loop is None:
                self._due = due
                self._ticker.start()
                self._ticker.wake()
            elif due is not None and loop is not None:
                self._start_task(loop, due)
        except Exception:
            self._failed("a touch could not be sent")
        finally:
            self._choosing.release()

    def close(self) -> None:
        """End the touches in flight: cancel tasks, and wait a second for the thread. Usable again. Idempotent."""
        ticker, self._ticker = self._ticker, Ticker(self._send_due, _do_nothing, _THREAD)
        self._due = None
        ticker.stop(timeout=1.0)
        for task in list(self._tasks):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def leave(self, client: Any) -> None:
        """End the tasks that send through a client, which is about to be closed."""
        loop = _running_loop()
        tasks = [task for task, way in list(self._tasks.items()) if way.client() is client and task.get_loop() is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_due(self) -> float:
        """Send what is due, and what is due after that, on the thread."""
        ticker = self._ticker
        due, self._due = self._due, None
        while due is not None:
            outgoing: OutgoingRequest | None = due.attempt.request
            while outgoing is not None:
                status, content = None, b""
                try:
                    client = due.way.client()
                    if client is not None and not client.is_closed:
                        request = with_body(due.way.request, outgoing)
                        response = due.way.kind.send(client, request, **due.way.options)
                        status, content = response.status_code, response.content
                except Exception:
                    _log.debug("a touch failed", exc_info=True)
                outgoing = self._answered(due, status, content)
            due = None if self._ticker is not ticker else self._next_due(None)
        return _IDLE_SECONDS

    def _start_task(self, loop: asyncio.AbstractEventLoop, due: DueTouch[TouchWay]) -> None:
        task = loop.create_task(self._send_in_task(loop, due), name=_THREAD)
        with contextlib.suppress(AttributeError):  # a loop that is closed before it ends loses nothing
            task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - as `asyncio.gather` does
        self._tasks[task] = due.way
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _send_in_task(self, loop: asyncio.AbstractEventLoop, first: DueTouch[TouchWay]) -> None:
        due: DueTouch[TouchWay] | None = first
        while due is not None:
            outgoing: OutgoingRequest | None = due.attempt.request
            while outgoing is not None:
                status, content = None, b""
                try:
                    client = due.way.client()
                    if client is not None and not client.is_closed:
                        request = with_body(due.way.request, outgoing)
                        response = await due.way.kind.send(client, request, **due.way.options)
                        status, content = response.status_code, response.content
                except Exception:
                    _log.debug("a touch failed", exc_info=True)
                except BaseException:
                    self._answered(due, None, b"")
                    raise
                outgoing = self._answered(due, status, content)
            due = self._next_due(loop)

    def _next_due(self, loop: asyncio.AbstractEventLoop | None) -> DueTouch[TouchWay] | None:
        try:
            return self.toucher.due(TouchWay.goes_by_thread if loop is None else lambda way: way.goes_in(loop))
        except Exception:
            self._failed("a touch could not be chosen")
            return None

    def _answered(self, due: DueTouch[TouchWay], status: int | None, content: bytes) -> OutgoingRequest | None:
        try:
            answer = WholeAnswer()
            answer.feed(content)
            answer.finish()
            tokens = answer.facts.tokens
            return self.toucher.answered(due, status, tokens.prompt_tokens, tokens.cached_tokens)
        except Exception:
            self._failed("a touch's answer could not be reported")
            return None

    def _failed(self, what: str) -> None:
        self._errors += 1
        log_failure(_log, what, first=self._errors == 1)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _do_nothing() -> None:
    """End a thread whose link is gone."""
