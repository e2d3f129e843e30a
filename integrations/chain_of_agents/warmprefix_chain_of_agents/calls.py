"""One agent's call: streamed, bounded in time, and made again where that can help."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from warmprefix import MissingExtraError
from warmprefix.openai import Retries
from warmprefix_chain_of_agents.agents import Speaker
from warmprefix_chain_of_agents.failures import asked_delay, is_agents_own, is_unreachable, may_pass
from warmprefix_chain_of_agents.memory import Message
from warmprefix_chain_of_agents.reading import BrokenAnswerError, NoTextError, Reading, SlowAnswerError
from warmprefix_chain_of_agents.results import Usage

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

__all__ = ["Call", "CallFailedError", "Reply"]

OnText = Callable[[str], None]


class Reply(NamedTuple):
    """An answer that is text."""

    text: str
    usage: Usage
    ttft: float | None
    attempts: int
    finish_reason: str


class CallFailedError(Exception):
    """The last attempt failed too, or no other could help; the failure itself is its cause."""

    def __init__(self, error: Exception, attempts: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts
        self.unreachable = is_unreachable(error)
        """Whether the agent is to be taken for dead."""
        self.agents_own = is_agents_own(error)
        """Whether it is no matter of what was asked."""


class Call:
    """Calls agents on behalf of one run."""

    def __init__(
        self,
        threads: Executor,
        *,
        timeout: float | None,
        retries: Retries,
        on_retry: Callable[[Speaker, Exception], None],
    ) -> None:
        """Tell how.

        Args:
            threads: Where clients that can't be awaited are asked.
            timeout: Seconds for a whole attempt; None leaves it to the client, which bounds each silence in any case.
            retries: When to try again.
            on_retry: Is told of each attempt that will be followed by another.
        """
        self._threads = threads
        self._timeout = timeout
        self._retries = retries
        self._on_retry = on_retry

    async def __call__(
        self, speaker: Speaker, messages: Sequence[Message], cache_salt: str | None, on_text: OnText | None = None
    ) -> Reply:
        """Ask until there is an answer or no hope.

        Args:
            speaker: Whom.
            messages: What.
            cache_salt: The tenant's, if there is one and the agent takes it.
            on_text: Is given the answer's text as it comes. What was given can't be taken back, so from its first
                call on there is no other attempt.

        Raises:
            CallFailedError: See there. What fails outside the engine's answers, such as an option that the client does
                not know, is raised as it is.
        """
        options = self._options(speaker, messages, cache_salt)
        for attempt in itertools.count(1):
            told = _Told(on_text)
            try:
                if isinstance(speaker.client, openai.AsyncOpenAI):
                    answering = self._awaited(speaker.client, options, told)
                else:
                    answering = self._in_thread(speaker.client, options, told)
                reading, ttft = await answering
                return Reply(reading.text(), reading.usage, ttft, attempt, reading.finish_reason)
            except (openai.APIError, BrokenAnswerError, NoTextError, TimeoutError, UnicodeError) as error:
                if attempt > self._retries.count or told.anything or not may_pass(error):
                    raise CallFailedError(error, attempt) from error
                self._on_retry(speaker, error)
                delay = self._retries.delay(attempt, asked_delay(error))
            await asyncio.sleep(delay)
        raise AssertionError

    def _options(self, speaker: Speaker, messages: Sequence[Message], cache_salt: str | None) -> dict[str, Any]:
        options = {
            "stream_options": {"include_usage": True},
            **speaker.options,
            "model": speaker.model,
            "messages": list(messages),
            "stream": True,
        }
        if cache_salt is not None:
            options["extra_body"] = {**(options.get("extra_body") or {}), "cache_salt": cache_salt}
        if self._timeout is not None:
            options["timeout"] = _bounded(speaker.client.timeout, self._timeout)
        return options

    async def _awaited(
        self, client: openai.AsyncOpenAI, options: dict[str, Any], told: _Told
    ) -> tuple[Reading, float | None]:
        heard: float | None = None

        async def attempt() -> tuple[Reading, float | None]:
            nonlocal heard
            sent, ttft, reading = time.perf_counter(), None, Reading()
            async with await client.with_options(max_retries=0).chat.completions.create(**options) as stream:
                async for chunk in _chunks(aiter(stream)):
                    told(reading.add(chunk))
                    if reading.started:
                        heard = time.perf_counter()
                        ttft = heard - sent if ttft is None else ttft
            return reading, ttft

        try:
            return await _within(self._timeout, attempt())
        except TimeoutError as error:
            # Silent for half of the time, it has stopped.
            if heard is None or self._timeout is None or time.perf_counter() - heard > self._timeout / 2:
                raise
            raise SlowAnswerError(str(error)) from error

    async def _in_thread(
        self, client: openai.OpenAI, options: dict[str, Any], told: _Told
    ) -> tuple[Reading, float | None]:
        """As `_awaited`. On cancellation the thread is left alone: it closes its stream when the next chunk comes."""
        loop, left = asyncio.get_running_loop(), threading.Event()

        def attempt() -> tuple[Reading, float | None]:
            sent, ttft, reading = time.perf_counter(), None, Reading()
            late = None if self._timeout is None else sent + self._timeout
            with client.with_options(max_retries=0).chat.completions.create(**options) as stream:
                for chunk in _chunks_until(late, iter(stream)):
                    if left.is_set():
                        break
                    if text := reading.add(chunk):
                        with suppress(RuntimeError):  # the loop was closed since: nobody listens any more
                            loop.call_soon_threadsafe(told, text)
                    if ttft is None and reading.started:
                        ttft = time.perf_counter() - sent
            return reading, ttft

        try:
            return await loop.run_in_executor(self._threads, partial(contextvars.copy_context().run, attempt))
        finally:
            left.set()


class _Told:
    """Passes text on to whoever wants it, and knows whether it has."""

    def __init__(self, on_text: OnText | None) -> None:
        self._on_text = on_text
        self.anything = False

    def __call__(self, text: str) -> None:
        if text and self._on_text is not None:
            self.anything = True
            self._on_text(text)


def _bounded(own: Any, seconds: float) -> openai.Timeout:
    """A client's own time-outs, which tell soon who can't be connected to, but none longer than this.

    They may be one number, None, or an object of whichever HTTP package the client was given it from.
    """
    phases = {name: getattr(own, name, own) for name in ("connect", "read", "write", "pool")}
    return openai.Timeout(**{name: seconds if phase is None else min(phase, seconds) for name, phase in phases.items()})


_Chunk = TypeVar("_Chunk")


async def _chunks(stream: AsyncIterator[_Chunk]) -> AsyncIterator[_Chunk]:
    """The chunks; whatever comes in their place, of a network or of what is no JSON, broke the answer."""
    while True:
        try:
            chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except Exception as error:
            raise _broken(error) from error
        yield chunk


def _chunks_until(late: float | None, stream: Iterator[_Chunk]) -> Iterator[_Chunk]:
    """`_chunks`, for threads, which look at the clock at each chunk; between two the client's time-out ends them."""
    while True:
        try:
            chunk = next(stream)
        except StopIteration:
            return
        except Exception as error:
            if late is not None and time.perf_counter() >= late:
                raise TimeoutError("no whole answer in time") from error
            raise _broken(error) from error
        if late is not None and time.perf_counter() >= late:
            raise SlowAnswerError("no whole answer in time")
        yield chunk


def _broken(error: Exception) -> Exception:
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        return error  # the engine itself said in the stream that it failed, and perhaps with which status
    return BrokenAnswerError(f"the stream broke: {type(error).__name__}: {error}")


_T = TypeVar("_T")


async def _within(seconds: float | None, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`, at most so long. Unlike `asyncio.wait_for` of Python 3.10 and 3.11, it swallows no cancellation."""
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
        if done:
            return task.result()
        raise TimeoutError(f"no whole answer in {seconds:g} s")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
