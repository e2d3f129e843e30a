"""Asking one request: streamed, put together, and sent again where that can help."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from warmprefix.batch.plan import PlannedRequest
from warmprefix.errors import MissingExtraError
from warmprefix.openai.batch_runner.asked import Messages
from warmprefix.openai.batch_runner.assembly import Assembly
from warmprefix.openai.batch_runner.results import BatchResult
from warmprefix.retries import Retries

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["Asker", "Outcome"]

_PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may not meet."""

_OF_ALL = frozenset({401, 402, 403, 404, 405})
"""Statuses that say more of key, model or address than of the one request."""


class Outcome(NamedTuple):
    """What asking came to."""

    result: BatchResult
    cause: Exception | None = None
    """What it failed with."""
    concerns_all: bool = False
    """Whether every other request would probably fail alike: nobody is there, or nothing is permitted."""


class _BrokenStreamError(Exception):
    """An answer began and did not come to its end."""


class _EngineError(Exception):
    """The engine said in the stream that it failed, with the status that it would have failed with before."""

    def __init__(self, error: object) -> None:
        told = error if isinstance(error, dict) else {"message": error}
        super().__init__(told.get("message"))
        self.code = told.get("code")


class Asker:
    """Asks one model through one client, all requests with the same options."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        options: Mapping[str, Any],
        *,
        messages: Messages,
        retries: Retries,
        timeout: float | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`timeout` is for a whole attempt, in seconds; None leaves it to the client, which bounds each silence.

        Raises:
            TypeError: `client` is none that can be awaited.
        """
        if not isinstance(client, openai.AsyncOpenAI):
            raise TypeError(f"client must be an openai.AsyncOpenAI, got {type(client).__name__}")
        # It would not send again what broke off midway, nor tell how often it sent; so all of that is done here. And
        # its own objects would cost more time for every token than everything else together.
        self._create = client.with_options(max_retries=0).chat.completions.with_streaming_response.create
        self._options = {"stream_options": {"include_usage": True}, **options, "model": model, "stream": True}
        self._messages = messages
        self._retries = retries
        self._timeout = timeout
        self._sleep = sleep

    async def ask(self, planned: PlannedRequest, prefilled: Callable[[], object]) -> Outcome:
        """Ask until there is an answer or no hope; `prefilled` is called when the first token comes.

        What fails outside the engine's answers, such as an option that the client does not know, is raised as it is.
        """
        options = self._options_of(planned)
        for attempt in itertools.count(1):
            try:
                completion, ttft = await _within(self._timeout, self._attempt(options, prefilled))
                return Outcome(BatchResult(planned, completion, None, attempt, ttft))
            except (openai.APIError, _BrokenStreamError, _EngineError, TimeoutError, UnicodeError) as error:
                status = _status(error)
                if attempt > self._retries.count or not _may_pass(error, status):
                    message = f"{type(error).__name__.strip('_')}: {error}"
                    result = BatchResult(planned, None, message, attempt, None)
                    return Outcome(result, error, _concerns_all(error, status))
                delay = self._retries.delay(attempt, _asked_delay(error))
            await self._sleep(delay)
        raise AssertionError

    def _options_of(self, planned: PlannedRequest) -> dict[str, Any]:
        options = {**self._options, "messages": list(self._messages(planned))}
        if planned.cache_salt is not None:
            options["extra_body"] = {**(options.get("extra_body") or {}), "cache_salt": planned.cache_salt}
        if self._timeout is not None:
            options["timeout"] = self._timeout
        return options

    async def _attempt(
        self, options: Mapping[str, Any], prefilled: Callable[[], object]
    ) -> tuple[dict[str, Any], float | None]:
        """The answer, and the seconds that its first token took."""
        sent = time.perf_counter()
        ttft: float | None = None
        assembly = Assembly()
        async with self._create(**options) as response:
            lines = _lines(response.iter_bytes())
            while (chunk := await _next(lines)) is not None:
                assembly.add(chunk)
                if ttft is None and assembly.started:
                    ttft = time.perf_counter() - sent
                    prefilled()
        if not assembly.complete:
            raise _BrokenStreamError("the stream ended before the answer did")
        return assembly.completion(), ttft


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a stream. That of httpx also ends one at U+2028 and its like, which JSON may hold as they are."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _next(lines: AsyncIterator[bytes]) -> dict[str, Any] | None:
    """The next chunk of a stream of server-sent events, each of one line, as everybody sends them; None at the end."""
    try:
        async for line in lines:
            name, _, data = line.partition(b":")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                await _drained(lines)
                return None
            chunk = json.loads(data)
            break
        else:
            return None
    except Exception as error:  # of a network, of what is no JSON: whatever it is, it came in place of the answer
        raise _BrokenStreamError(f"the stream broke: {type(error).__name__}: {error}") from error
    if not isinstance(chunk, dict):
        raise _BrokenStreamError("the stream broke: a chunk is no JSON object")
    if chunk.get("error"):
        raise _EngineError(chunk["error"])
    return chunk


async def _drained(lines: AsyncIterator[bytes]) -> None:
    """Read to the end, so that the connection can be used again; but do not wait for one that never comes."""
    with contextlib.suppress(TimeoutError):
        await _within(0.1, _all_of(lines))


async def _all_of(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        pass


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


def _status(error: Exception) -> int | None:
    """The HTTP status, that of an error told in the stream included."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    try:
        return None if status is None else int(status)
    except (TypeError, ValueError):  # such as "insufficient_quota"
        return None


def _out_of_quota(error: Exception) -> bool:
    return getattr(error, "code", None) == "insufficient_quota"


def _may_pass(error: Exception, status: int | None) -> bool:
    if isinstance(error, UnicodeError) or _out_of_quota(error):
        return False
    return status is None or status in _PASSING or status >= 500


def _concerns_all(error: Exception, status: int | None) -> bool:
    return _unreachable(error) or status in _OF_ALL or _out_of_quota(error)


def _unreachable(error: Exception) -> bool:
    """Whether no connection came about; a server that is slow to answer is there."""
    if isinstance(error, openai.APITimeoutError):
        return type(error.__cause__).__name__ == "ConnectTimeout"
    return isinstance(error, openai.APIConnectionError)


def _asked_delay(error: Exception) -> float | None:
    """What the server's `Retry-After` says, in seconds from now."""
    response = getattr(error, "response", None)
    asked: str | None = None if response is None else response.headers.get("retry-after")
    if asked is None:
        return None
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except ValueError:
        return None
