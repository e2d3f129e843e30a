"""The two ways of sending, and of reading a body: for threads and for tasks. All that is known is in `Exchange`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from warmprefix.openai.exchange import Exchange, Verdict
from warmprefix.openai.wire import AsyncInner, Request, Response, SyncInner

if TYPE_CHECKING:
    from typing_extensions import Self

    from warmprefix.openai.link import EngineLink

__all__ = ["AsyncLinkTransport", "LinkTransport", "asend", "send"]


class LinkTransport:
    """A transport around another one."""

    def __init__(self, link: EngineLink, inner: SyncInner) -> None:
        self._link = link
        self._inner = inner

    def handle_request(self, request: Any) -> Any:
        request, exchange = self._link.open(request)
        if exchange is None:
            return self._inner.handle_request(request)
        return send(self._link, exchange, request, self._inner.handle_request)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: Any = None, error: Any = None, traceback: Any = None) -> None:
        self._inner.__exit__(kind, error, traceback)


class AsyncLinkTransport:
    """`LinkTransport`, for tasks."""

    def __init__(self, link: EngineLink, inner: AsyncInner) -> None:
        self._link = link
        self._inner = inner

    async def handle_async_request(self, request: Any) -> Any:
        request, exchange = self._link.open(request)
        if exchange is None:
            return await self._inner.handle_async_request(request)
        return await asend(self._link, exchange, request, self._inner.handle_async_request)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, kind: Any = None, error: Any = None, traceback: Any = None) -> None:
        await self._inner.__aexit__(kind, error, traceback)


def send(link: EngineLink, exchange: Exchange, request: Request, forward: Callable[[Request], Any]) -> Any:
    """Send a request that has a plan. Its body is read by whoever gets the response."""
    exchange.sending()
    try:
        response = forward(request)
    except BaseException as error:
        link.settle(exchange.end(error))
        raise
    response, verdict = _answered(exchange, response, link, _Body)
    link.settle(verdict)
    return response


async def asend(
    link: EngineLink, exchange: Exchange, request: Request, forward: Callable[[Request], Awaitable[Any]]
) -> Any:
    """`send`, for tasks: cancellation ends the exchange too."""
    exchange.sending()
    try:
        response = await forward(request)
    except BaseException as error:
        await link.asettle(exchange.end(error))
        raise
    response, verdict = _answered(exchange, response, link, _AsyncBody)
    await link.asettle(verdict)
    return response


def _answered(
    exchange: Exchange, response: Response, link: EngineLink, body: type[_Body] | type[_AsyncBody]
) -> tuple[Any, Verdict | None]:
    """The response to hand out, and what follows if its body is not waited for."""
    try:
        verdict = exchange.head(response.status_code, response.headers)
        if verdict is not None:
            return response, verdict
        if response.is_closed:
            return _remade_whole(exchange, response), exchange.end()
        _pass_through(response, exchange, link, body)
    except Exception:
        link.failed("an answer can't be read")
        return response, exchange.end()
    return response, None


def _remade_whole(exchange: Exchange, response: Response) -> Response:
    """A response that had its body from the start, such as one from a cache."""
    body = exchange.feed(response.content) + exchange.finish()
    if body == response.content:
        return response
    headers = [pair for pair in response.headers.raw if pair[0].lower() not in (b"content-length", b"content-encoding")]
    remade: Any = response.__class__
    result: Response = remade(response.status_code, headers=headers, content=body, extensions=response.extensions)
    return result


def _pass_through(
    response: Response, exchange: Exchange, link: EngineLink, body: type[_Body] | type[_AsyncBody]
) -> None:
    """Have the response's body read by way of the exchange."""
    stream, headers = response.stream, response.headers
    is_encoded = headers.get("content-encoding", "identity") != "identity"
    source = stream
    if is_encoded:
        # What is read, and may be cut, is what was encoded; whoever gets the response finds it decoded already.
        as_it_came: Any = response.__class__
        source = body.decoded(as_it_came(response.status_code, headers=headers, stream=stream))
    # Clients accept a stream of their own HTTP stack's class only.
    base = next(base for base in type(stream).__mro__ if base.__name__ == body.kind)
    response.stream = type(body.__name__, (body, base), {})(stream, source, exchange, link)
    if is_encoded:
        del headers["content-encoding"]
    if is_encoded or exchange.cuts:
        headers.pop("content-length", None)


class _HeldEnd:
    """The last event of a stream, held back until the client asks for it."""

    _exchange: Exchange
    _held = b""

    def _held_end(self) -> bytes:
        self._exchange.passes_end()
        held, self._held = self._held, b""
        return held


class _Body(_HeldEnd):
    """A body that is read by way of an exchange, which ends with it: read, broken off, closed, or let go of."""

    kind = "SyncByteStream"
    decoded = staticmethod(methodcaller("iter_bytes"))

    def __init__(self, stream: Any, source: Any, exchange: Exchange, link: EngineLink) -> None:
        self._exchange = exchange
        self._link = link
        self._stream = stream
        self._source: Iterator[bytes] = iter(source)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._held:
            return self._held_end()
        while True:
            try:
                data = next(self._source)
            except StopIteration:
                # Settled when the client closes the body, as it does after its end: closing may still fail.
                if rest := self._exchange.finish():
                    return rest
                raise
            except BaseException as error:
                self._link.settle(self._exchange.end(error))
                raise
            passed, self._held = self._exchange.split_before_end(self._exchange.feed(data))
            if self._exchange.is_decided:  # the oldest SDKs raise what they are told and close nothing
                self._link.settle(self._exchange.end())
            if passed:
                return passed
            if self._held:
                return self._held_end()

    def close(self) -> None:
        try:
            self._stream.close()
        except BaseException as error:
            self._link.settle(self._exchange.end(error))
            raise
        self._link.settle(self._exchange.end())

    def __del__(self) -> None:
        self._link.settle(self._exchange.end())


class _AsyncBody(_HeldEnd):
    """`_Body`, for tasks."""

    kind = "AsyncByteStream"
    decoded = staticmethod(methodcaller("aiter_bytes"))

    def __init__(self, stream: Any, source: Any, exchange: Exchange, link: EngineLink) -> None:
        self._exchange = exchange
        self._link = link
        self._stream = stream
        self._source: AsyncIterator[bytes] = aiter(source)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._held:
            return self._held_end()
        while True:
            try:
                data = await anext(self._source)
            except StopAsyncIteration:
                # Settled when the client closes the body, as it does after its end: closing may still be cancelled.
                if rest := self._exchange.finish():
                    return rest
                raise
            except BaseException as error:
                await self._link.asettle(self._exchange.end(error))
                raise
            passed, self._held = self._exchange.split_before_end(self._exchange.feed(data))
            if self._exchange.is_decided:
                await self._link.asettle(self._exchange.end())
            if passed:
                return passed
            if self._held:
                return self._held_end()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        except BaseException as error:
            await self._link.asettle(self._exchange.end(error))
            raise
        await self._link.asettle(self._exchange.end())

    def __del__(self) -> None:
        self._link.settle(self._exchange.end())
