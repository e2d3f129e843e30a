"""Asking an engine: one streamed chat completion at a time, with the `openai` package, and retried by `stamina`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_openai.completion import AnswerError, BrokenStreamError, ChatAnswer, ChatReader
from warmprefix_openai.retry import Retries, may_pass, retry_after

try:
    import openai
    import stamina
except ImportError as exc:
    raise MissingExtraError("openai", exc.name or "openai") from exc

__all__ = ["CallFailedError", "ChatAsker", "SlowAnswerError", "ask_with_retries", "could_not_connect"]

_FAILURES = (openai.APIError, AnswerError, TimeoutError, UnicodeError)
"""Failures of a call. Any other exception, such as for an unknown option of the client, is the caller's error."""

_DRAIN_SECONDS = 0.1

_T = TypeVar("_T")


class SlowAnswerError(TimeoutError):
    """An answer was not complete in time, though tokens were still coming: its engine is alive."""


class CallFailedError(WarmprefixError):
    """A call failed for good: its last attempt failed too, or no other could help. The failure is its cause."""

    def __init__(self, error: Exception, attempts: int) -> None:
        super().__init__(str(error))
        self.error = error
        """The failure of the last attempt."""
        self.attempts = attempts
        """Number of attempts."""


class ChatAsker:
    """Asks through one client of the `openai` package. The client's own retries are off."""

    def __init__(
        self,
        client: openai.AsyncOpenAI | openai.OpenAI,
        *,
        timeout: float | None = None,
        threads: Executor | None = None,
    ) -> None:
        """Prepare the client.

        Args:
            client: Anything else raises a TypeError, as does a blocking client without `threads`.
            timeout: Seconds for a whole answer; None leaves it to the client, which bounds each silence.
            threads: Where a blocking client runs.
        """
        if not isinstance(client, openai.AsyncOpenAI | openai.OpenAI):
            raise TypeError(f"client must be an openai.OpenAI or openai.AsyncOpenAI, got {type(client).__name__}")
        if isinstance(client, openai.OpenAI) and threads is None:
            raise TypeError("client must be an openai.AsyncOpenAI, got OpenAI")
        self._awaited = isinstance(client, openai.AsyncOpenAI)
        # The raw stream: the SDK's own objects cost more time per token than everything else together, and they would
        # hide the fields of engines.
        once: Any = client.with_options(max_retries=0)
        self._create = once.chat.completions.with_streaming_response.create
        self._timeout = timeout
        self._timeouts = None if timeout is None else _bounded(client.timeout, timeout)
        self._threads = threads

    async def ask(
        self,
        options: Mapping[str, Any],
        *,
        on_start: Callable[[], object] | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> ChatAnswer:
        """Send one request and read its answer. Cancelling it closes the connection.

        The thread of a blocking client is not waited for: it closes its stream when the next bytes come.

        Args:
            options: As `chat_options` makes them.
            on_start: Called in the event loop at the first token.
            on_text: Called in the event loop with each piece of text of the first choice.

        Raises:
            AnswerError: The stream broke, or the engine reported an error in it.
            TimeoutError: The answer was not complete in time; a `SlowAnswerError` if tokens were still coming.
            openai.APIError: The engine refused the request, or could not be reached.
        """
        if self._timeouts is not None:
            options = {**options, "timeout": self._timeouts}
        if self._awaited:
            reading = _TimedReader(self._timeout, on_start, on_text)
            return await _within(self._timeout, self._read_in_task(options, reading), reading.timed_out)
        loop, left = asyncio.get_running_loop(), threading.Event()

        def read() -> ChatAnswer:
            reading = _TimedReader(self._timeout, on_start, on_text)
            return self._read_in_thread(options, reading, loop, left)

        try:
            return await loop.run_in_executor(self._threads, contextvars.copy_context().run, read)
        finally:
            left.set()

    async def _read_in_task(self, options: Mapping[str, Any], reading: _TimedReader) -> ChatAnswer:
        async with self._create(**options) as response:
            pieces = aiter(response.iter_bytes())
            while not reading.facts.ended:
                try:
                    data = await anext(pieces)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    raise _broken(error) from error
                reading.report(reading.feed(data))
            else:
                # Read to the end of the body, so that the connection can be used again; but not for long.
                with contextlib.suppress(Exception):
                    await _within(_DRAIN_SECONDS, _drained(pieces), TimeoutError)
        return reading.answer()

    def _read_in_thread(
        self, options: Mapping[str, Any], reading: _TimedReader, loop: asyncio.AbstractEventLoop, left: threading.Event
    ) -> ChatAnswer:
        with self._create(**options) as response:
            pieces = iter(response.iter_bytes())
            while not reading.facts.ended and not left.is_set():
                try:
                    data = next(pieces, None)
                except Exception as error:
                    raise (reading.timed_out() if reading.is_late else _broken(error)) from error
                if data is None:
                    break
                text = reading.feed(data)
                with contextlib.suppress(RuntimeError):  # the loop was closed since
                    loop.call_soon_threadsafe(reading.report, text)
                if reading.is_late:
                    raise reading.timed_out()
            else:
                with contextlib.suppress(Exception):
                    next(pieces, None)
        return reading.answer()


class _TimedReader(ChatReader):
    """Reader of one answer that reports its progress and its delay."""

    def __init__(
        self, timeout: float | None, on_start: Callable[[], object] | None, on_text: Callable[[str], object] | None
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._on_start = on_start
        self._on_text = on_text
        self._began = time.perf_counter()

    @property
    def is_late(self) -> bool:
        """True if the time for the answer is over, and it is not complete."""
        over = self._timeout is not None and time.perf_counter() - self._began >= self._timeout
        return over and not self.facts.ended

    def report(self, text: str) -> None:
        """Pass the first token and the text on. Called in the event loop."""
        if self.facts.started and self._on_start is not None:
            self._on_start()
            self._on_start = None
        if text and self._on_text is not None:
            self._on_text(text)

    def timed_out(self) -> TimeoutError:
        message = f"no whole answer in {self._timeout:g} s"
        # After a silence of half the time, the engine has stopped.
        stopped = self.latest is None or time.perf_counter() - self.latest > (self._timeout or 0) / 2
        return TimeoutError(message) if stopped else SlowAnswerError(message)


async def ask_with_retries(
    ask: Callable[[], Awaitable[_T]],
    retries: Retries,
    *,
    may_retry: Callable[[Exception], bool] = may_pass,
    on_retry: Callable[[Exception], object] | None = None,
) -> tuple[_T, int]:
    """Await `ask()` until it returns; return its result and the number of attempts.

    `on_retry` is called with each failure that another attempt follows. A `Retry-After` of the server counts.

    Raises:
        CallFailedError: There is no result. An exception that is no failure of a call is raised as it is.
    """
    failures = attempts = 0

    def wait(error: Exception) -> float | bool:
        nonlocal failures
        if not isinstance(error, _FAILURES) or not may_retry(error):
            return False
        failures += 1
        if on_retry is not None and failures <= retries.count:
            on_retry(error)
        # stamina's own backoff adds a jitter that does not grow; clients refused together would return together.
        headers = getattr(getattr(error, "response", None), "headers", {})
        return retries.delay(failures, retry_after(headers))

    try:
        async for attempt in stamina.retry_context(wait, attempts=retries.count + 1, timeout=None):
            with attempt:
                attempts = attempt.num
                return await ask(), attempts
    except _FAILURES as error:
        raise CallFailedError(error, attempts) from error
    raise AssertionError("unreachable")


def could_not_connect(error: Exception) -> bool:
    """Return True if no connection came about; a server that is slow to answer is there."""
    if isinstance(error, openai.APITimeoutError):
        return type(error.__cause__).__name__ == "ConnectTimeout"
    return isinstance(error, openai.APIConnectionError)


def _bounded(own: Any, seconds: float) -> openai.Timeout:
    """Return a client's own time-outs, such as for connecting, but none longer than this.

    They may be one number, None, or an object of the HTTP package that the client was made with.
    """
    phases = {name: getattr(own, name, own) for name in ("connect", "read", "write", "pool")}
    return openai.Timeout(**{name: seconds if phase is None else min(phase, seconds) for name, phase in phases.items()})


def _broken(error: Exception) -> BrokenStreamError:
    return BrokenStreamError(f"the stream broke: {type(error).__name__}: {error}")


async def _drained(pieces: Any) -> None:
    async for _ in pieces:
        pass


async def _within(seconds: float | None, work: Coroutine[Any, Any, _T], timed_out: Callable[[], Exception]) -> _T:
    """Await `work` for at most this long. `asyncio.wait_for` of Python 3.10 and 3.11 can swallow a cancellation."""
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
        if done:
            return task.result()
        raise timed_out()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
