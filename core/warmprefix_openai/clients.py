"""HTTP clients with a link: how they send a request and read its body, for threads and for tasks.

`Exchange` decides the rest.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix_openai.answer import WholeAnswer
from warmprefix_openai.exchange import Exchange, Verdict
from warmprefix_openai.http_requests import with_body
from warmprefix_openai.primer import Primer
from warmprefix_openai.tracker import PlanTracker
from warmprefix_openai.writer import LinkWriter, Opening
from warmprefix_requests import OutgoingRequest

_log = logging.getLogger("warmprefix")

__all__ = ["linked_async_client", "linked_client"]

_NOT_CARRIED = "a turn without blocks could not be planned"


def linked_client(writer: LinkWriter, kind: Any, options: Mapping[str, Any]) -> Any:
    """Return a client of this kind, of httpx or httpx2, whose requests carry their plans.

    Its `send` is overridden because each request passes it once, with its redirects, its signature and its proxies
    inside. None stands for the OpenAI SDK's own kind.
    """
    kind = kind or _of_sdk("DefaultHttpxClient")

    def send(client: Any, request: Any, *, stream: bool = False, **given: Any) -> Any:
        opening = writer.open(request)
        if opening.carried is not None:
            opening = _carry(writer, request, opening)
        forward = partial(kind.send, client, stream=True, **given)
        if opening.exchange is None:
            return _permitted(writer, opening, forward)(opening.request, stream=stream)
        response = _send(writer, opening, opening.exchange, forward)
        if opening.kept is not None and response.status_code < 300:
            writer.tracker.touches.keep(opening.kept, opening.request, client, kind, given, is_async=False)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    return type("LinkClient", (kind,), {"send": send})(**options)


def linked_async_client(writer: LinkWriter, kind: Any, options: Mapping[str, Any]) -> Any:
    """Do the same as `linked_client`, for tasks."""
    kind = kind or _of_sdk("DefaultAsyncHttpxClient")

    async def send(client: Any, request: Any, *, stream: bool = False, **given: Any) -> Any:
        opening = writer.open(request)
        if opening.carried is not None:
            opening = await _acarry(writer, request, opening)
        forward = partial(kind.send, client, stream=True, **given)
        if opening.exchange is None:
            return await (await _apermitted(writer, opening, forward))(opening.request, stream=stream)
        response = await _asend(writer, opening, opening.exchange, forward)
        if opening.kept is not None and response.status_code < 300:
            writer.tracker.touches.keep(opening.kept, opening.request, client, kind, given, is_async=True)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response

    async def aclose(client: Any) -> None:
        await writer.tracker.touches.leave(client)
        await kind.aclose(client)

    return type("AsyncLinkClient", (kind,), {"send": send, "aclose": aclose})(**options)


def _carry(writer: LinkWriter, request: Any, opening: Opening) -> Opening:
    """Plan a turn without blocks, so that turns behind it find the record of those in front."""
    assert opening.carried is not None
    try:
        plan = writer.tracker.planner.plan([], **opening.carried.options)
    except Exception:
        writer.tracker.degrade(_NOT_CARRIED)
        return opening
    return writer.carried(request, opening, plan)


async def _acarry(writer: LinkWriter, request: Any, opening: Opening) -> Opening:
    assert opening.carried is not None
    try:
        plan = await writer.tracker.planner.aplan([], **opening.carried.options)
    except Exception:
        writer.tracker.degrade(_NOT_CARRIED)
        return opening
    return writer.carried(request, opening, plan)


def _of_sdk(name: str) -> Any:
    try:
        import openai  # clients of another kind do not need it
    except ImportError as error:
        raise MissingExtraError("openai", "openai") from error
    return getattr(openai, name)


def _send(writer: LinkWriter, opening: Opening, exchange: Exchange, forward: Callable[..., Any]) -> Any:
    """Send a request, and have its exchange read the answer. The caller reads the body of the response."""
    tracker, request = writer.tracker, opening.request
    try:
        forward = _permitted(writer, opening, forward)
        _prime(tracker.primer, exchange, request, forward)
        exchange.sending()
        response = forward(request)
        while (again := exchange.answered(response.status_code)) is not None:
            response.close()
            exchange.sending()
            response = forward(with_body(request, again))
    except BaseException as error:
        tracker.settle(exchange.end(error))
        raise
    response, verdict = _answered(exchange, response, tracker, _Body)
    tracker.settle(verdict)
    return response


async def _asend(
    writer: LinkWriter, opening: Opening, exchange: Exchange, forward: Callable[..., Awaitable[Any]]
) -> Any:
    """Do the same as `_send`, in a task: cancellation ends the exchange too."""
    tracker, request = writer.tracker, opening.request
    try:
        forward = await _apermitted(writer, opening, forward)
        await _aprime(tracker.primer, exchange, request, forward)
        exchange.sending()
        response = await forward(request)
        while (again := exchange.answered(response.status_code)) is not None:
            await response.aclose()
            exchange.sending()
            response = await forward(with_body(request, again))
    except BaseException as error:
        await tracker.asettle(exchange.end(error))
        raise
    response, verdict = _answered(exchange, response, tracker, _AsyncBody)
    await tracker.asettle(verdict)
    return response


def _permitted(writer: LinkWriter, opening: Opening, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, or what refuses the request in its place; the engine is asked whether it takes the salt."""
    if opening.salted is None:
        return forward
    salts, answers, failure = writer.salts, list[bytes](), None
    questions = salts.questions(opening.request)
    try:
        for question in questions:
            answers.append(salts.content(forward(question, stream=False)))
    except Exception as error:
        answers, failure = [], error
    refused = salts.decide(opening.request, opening.salted, answers, failure)
    return forward if refused is None else partial(_refused, refused)


async def _apermitted(
    writer: LinkWriter, opening: Opening, forward: Callable[..., Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:
    """Do the same as `_permitted`, in a task."""
    if opening.salted is None:
        return forward
    salts, answers, failure = writer.salts, list[bytes](), None
    questions = salts.questions(opening.request)
    try:
        for question in questions:
            answers.append(salts.content(await forward(question, stream=False)))
    except Exception as error:
        answers, failure = [], error
    refused = salts.decide(opening.request, opening.salted, answers, failure)
    return forward if refused is None else partial(_arefused, refused)


def _refused(content: bytes, request: Any, **_: object) -> Any:
    """Return a response of the request's own HTTP library that refuses it."""
    library = import_module(type(request).__module__.partition(".")[0])
    return library.Response(400, headers={"content-type": "application/json"}, content=content, request=request)


async def _arefused(content: bytes, request: Any, **_: object) -> Any:
    return _refused(content, request)


def _prime(primer: Primer, exchange: Exchange, request: Any, forward: Callable[[Any], Any]) -> None:
    """Send the primes of a request, whose failures do not matter to it."""
    for prime, attempt in exchange.primes:
        due: OutgoingRequest | None = attempt.request
        while due is not None:
            status, answer = None, WholeAnswer()
            try:
                response = forward(with_body(request, due))
                try:
                    answer.feed(response.read())
                    status = response.status_code
                finally:
                    response.close()
            except Exception:
                _log.debug("a prime failed", exc_info=True)
            answer.finish()
            tokens = answer.facts.tokens
            due = primer.answered(prime, attempt, status, tokens.prompt_tokens, tokens.cached_tokens)


async def _aprime(primer: Primer, exchange: Exchange, request: Any, forward: Callable[[Any], Awaitable[Any]]) -> None:
    for prime, attempt in exchange.primes:
        due: OutgoingRequest | None = attempt.request
        while due is not None:
            status, answer = None, WholeAnswer()
            try:
                response = await forward(with_body(request, due))
                try:
                    answer.feed(await response.aread())
                    status = response.status_code
                finally:
                    await response.aclose()
            except Exception:
                _log.debug("a prime failed", exc_info=True)
            answer.finish()
            tokens = answer.facts.tokens
            due = primer.answered(prime, attempt, status, tokens.prompt_tokens, tokens.cached_tokens)


def _answered(
    exchange: Exchange, response: Any, tracker: PlanTracker, body: type[_Body | _AsyncBody]
) -> tuple[Any, Verdict | None]:
    """Return the response to hand out, and the verdict if it does not depend on the body."""
    try:
        verdict = exchange.head(response.status_code, response.headers)
        if verdict is not None:
            return response, verdict
        if response.is_closed:
            return _remade_whole(exchange, response), exchange.end()
        _pass_through(response, exchange, tracker, body)
    except Exception:
        tracker.degrade("an answer can't be read")
        return response, exchange.end()
    return response, None


def _remade_whole(exchange: Exchange, response: Any) -> Any:
    """Read a response that had its body from the start, such as one from a cache."""
    body = exchange.feed(response.content) + exchange.finish()
    if body == response.content:
        return response
    headers = [pair for pair in response.headers.raw if pair[0].lower() not in (b"content-length", b"content-encoding")]
    return type(response)(response.status_code, headers=headers, content=body, extensions=response.extensions)


def _pass_through(response: Any, exchange: Exchange, tracker: PlanTracker, body: type[_Body | _AsyncBody]) -> None:
    """Make the response's body pass through the exchange."""
    stream, headers = response.stream, response.headers
    is_encoded = headers.get("content-encoding", "identity") != "identity"
    source = stream
    if is_encoded:
        # The exchange reads, and may cut, decoded bytes; so the application gets them decoded.
        source = body.decoded(type(response)(response.status_code, headers=headers, stream=stream))
    # Clients accept a stream of their own HTTP stack's class only.
    base = next(base for base in type(stream).__mro__ if base.__name__ == body.kind)
    response.stream = type(body.__name__, (body, base), {})(stream, source, exchange, tracker)
    if is_encoded:
        del headers["content-encoding"]
    if is_encoded or exchange.cuts:
        headers.pop("content-length", None)


class _PassingBody:
    """The bytes of a body between the exchange and the client. The exchange ends when the body does.

    The verdict at the end of the body is settled when the client closes it, as it does after the end: closing may
    still fail, or be cancelled.
    """

    def __init__(self, stream: Any, exchange: Exchange, tracker: PlanTracker) -> None:
        self._stream = stream
        self._exchange = exchange
        self._tracker = tracker
        self._ready = b""
        self._held = b""
        """The last event of a stream, held back until the client asks for it."""

    def _read(self, data: bytes) -> None:
        self._ready, self._held = self._exchange.split_before_end(self._exchange.feed(data))

    def _next(self) -> bytes:
        """Return the bytes to hand out now; empty if more have to be read first."""
        if self._ready:
            ready, self._ready = self._ready, b""
            return ready
        if self._held:
            self._exchange.passes_end()
        held, self._held = self._held, b""
        return held

    def __del__(self) -> None:
        self._tracker.settle(self._exchange.end())


class _Body(_PassingBody):
    """A body that threads read."""

    kind = "SyncByteStream"
    decoded = staticmethod(methodcaller("iter_bytes"))

    def __init__(self, stream: Any, source: Any, exchange: Exchange, tracker: PlanTracker) -> None:
        super().__init__(stream, exchange, tracker)
        self._source: Iterator[bytes] = iter(source)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not (passed := self._next()):
            try:
                data = next(self._source)
            except StopIteration:
                if rest := self._exchange.finish():
                    return rest
                raise
            except BaseException as error:
                self._tracker.settle(self._exchange.end(error))
                raise
            self._read(data)
            if self._exchange.is_decided:  # the oldest SDKs raise the reported error and close nothing
                self._tracker.settle(self._exchange.end())
        return passed

    def close(self) -> None:
        try:
            self._stream.close()
        except BaseException as error:
            self._tracker.settle(self._exchange.end(error))
            raise
        self._tracker.settle(self._exchange.end())


class _AsyncBody(_PassingBody):
    """A body that tasks read."""

    kind = "AsyncByteStream"
    decoded = staticmethod(methodcaller("aiter_bytes"))

    def __init__(self, stream: Any, source: Any, exchange: Exchange, tracker: PlanTracker) -> None:
        super().__init__(stream, exchange, tracker)
        self._source: AsyncIterator[bytes] = aiter(source)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not (passed := self._next()):
            try:
                data = await anext(self._source)
            except StopAsyncIteration:
                if rest := self._exchange.finish():
                    return rest
                raise
            except BaseException as error:
                await self._tracker.asettle(self._exchange.end(error))
                raise
            self._read(data)
            if self._exchange.is_decided:
                await self._tracker.asettle(self._exchange.end())
        return passed

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        except BaseException as error:
            await self._tracker.asettle(self._exchange.end(error))
            raise
        await self._tracker.asettle(self._exchange.end())
