"""One request through a gateway: its body, its upstream, and its answer back to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any

from warmprefix.errors import MissingExtraError, NoAgentError
from warmprefix.openai import AnswerFacts, StreamedAnswer, WholeAnswer
from warmprefix.routing import Route
from warmprefix_gateway.office import Office
from warmprefix_gateway.outgoing import AskedPrompt, Outgoing, UnsaltableBodyError
from warmprefix_gateway.replies import error_body, is_messages

try:
    import aiohttp
    from multidict import CIMultiDict
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["ClientLeftError", "PassedRequest", "Receive", "Scope", "Send", "reply"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_PROMPT_PATHS = ("/chat/completions", "/completions", "/messages", "/responses")
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
_OURS = ("host", "expect", "x-warmprefix-references")
_REFUSED_FIELD = (400, 422)
_UNAVAILABLE = (502, 503)
_MESSAGES = {
    400: "the path is not valid",
    502: "no upstream answers",
    504: "the upstream did not answer in time",
}


class ClientLeftError(Exception):
    """The client closed its connection before the end of the answer."""


class _NoAnswerError(Exception):
    """An upstream failed before the first byte of its answer, so another one may be asked."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class _BodyRefusedError(Exception):
    """A body is not read to its end; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PassedRequest:
    """One request and its answer: call `run` once."""

    def __init__(
        self, office: Office, scope: Scope, headers: dict[str, str], tenant: str | None, receive: Receive, send: Send
    ) -> None:
        self._office = office
        self._metrics = office.metrics
        self._scope = scope
        self._path: str = scope["path"]
        self._headers = headers
        self._tenant = tenant
        self._receive = receive
        self._send = send
        self._body_is_read = asyncio.Event()
        self._asked: AskedPrompt | None = None
        self._route: Route | None = None
        self._tried: set[str] = set()
        """Upstreams that did not answer."""
        self._sent = b""
        """Body that went out last."""
        self._base: str | None = None
        """Upstream that was asked last."""
        self._status: int | None = None
        self._is_whole = False
        """True once its answer has come to its end."""
        self._facts: AnswerFacts | None = None
        """Contents of its answer, as far as it came."""
        self.has_begun = False
        """True once the client may have seen a part of the answer."""

    async def run(self) -> None:
        """Send the request to an upstream, and the answer to the client.

        Raises:
            ClientLeftError: The client left; the request to the upstream was cancelled.
        """
        if not self._path.startswith("/"):
            await self._fail(400, "path", "the path must begin with a slash")
            return
        is_prompt = self._scope["method"] == "POST" and self._path.rstrip("/").endswith(_PROMPT_PATHS)
        if not is_prompt:
            await self._until_client_leaves(self._pass_on())
            return
        try:
            content = await self._whole_body()
        except _BodyRefusedError as error:
            await self._fail(error.status, "size", str(error))
            return
        has_left = False
        try:
            self._asked = await self._office.ask(content, self._path, self._headers, self._tenant)
            await self._until_client_leaves(self._pass_prompt(content))
        except UnsaltableBodyError as error:
            await self._fail(400, "salt", f"{error} cannot be replaced, because the body cannot be written again")
        except ClientLeftError:
            has_left = True
            raise
        finally:
            self._record(has_left)
            self._office.abandon(self._asked)
            self._office.buffers.give_back(self._tenant, len(content))

    def _record(self, has_left: bool) -> None:
        """Record what was sent and what came, if anything was sent."""
        if self._asked is None or self._base is None:
            return
        facts = self._facts
        if has_left:
            outcome = "left"
        elif self._status is None:
            outcome = "unanswered"
        elif self._status >= 300 or (facts is not None and facts.failed):
            outcome = "failed"
        else:
            outcome = "answered" if self._is_whole else "broken"
        usage = None if facts is None else facts.usage or None
        try:
            self._office.record(
                self._asked, self._sent, upstream=self._base, status=self._status, outcome=outcome, usage=usage
            )
        except Exception as error:
            self._office.fail("a request was not recorded", error)

    # -- the client's side -------------------------------------------------------------------------------------

    async def _whole_body(self) -> bytes:
        """Read the body, whose bytes count as buffered from then on.

        Raises:
            _BodyRefusedError: It is too large, or there is no room for it now.
        """
        office, most = self._office, self._office.options.max_body_bytes
        length = self._headers.get("content-length", "")
        content = bytearray()
        is_whole = False
        try:
            if length.isascii() and length.isdigit() and int(length) > most:
                raise _BodyRefusedError(413, f"the body is larger than {most} bytes")
            async for piece in self._body():
                if not office.buffers.take(self._tenant, len(piece)):
                    raise _BodyRefusedError(429, "too many large requests at one time; try again")
                content += piece
                if len(content) > most:
                    raise _BodyRefusedError(413, f"the body is larger than {most} bytes")
            is_whole = True
        finally:
            if not is_whole:
                office.buffers.give_back(self._tenant, len(content))
        return bytes(content)

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self._body_is_read.set()
                return

    async def _until_client_leaves(self, work: Coroutine[Any, Any, None]) -> None:
        doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._client_leaves())
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClientLeftError
            doing.result()
        finally:
            for task in (doing, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, ClientLeftError):
                    await task

    async def _client_leaves(self) -> None:
        await self._body_is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _fail(self, status: int, reason: str, message: str) -> None:
        """Answer with an error of our own."""
        self._metrics.refused.labels(reason).inc()
        self._metrics.requests.labels(self._route_name, status).inc()
        self.has_begun = True
        await reply(self._send, status, b"application/json", error_body(self._path, status, message))

    @property
    def _route_name(self) -> str:
        return "other" if self._asked is None else self._asked.call.route

    # -- the upstream's side -----------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Send a request without a prompt, with its body as it comes, to one upstream."""
        has_body = "content-length" in self._headers or "transfer-encoding" in self._headers
        if not has_body:
            async for _ in self._body():
                pass
        base = self._office.upstreams.any_base()
        try:
            await self._ask(base, self._body() if has_body else None, None)
        except _NoAnswerError as error:
            await self._no_answer(base, error)

    async def _pass_prompt(self, content: bytes) -> None:
        """Send a request with a prompt; if an upstream fails before its first byte, to another one."""
        upstreams = self._office.upstreams
        while True:
            try:
                base = self._choose(len(content))
            except NoAgentError:
                await self._fail(503, "upstreams", "no upstream answers")
                return
            try:
                await self._ask_with_additions(base, content)
                return
            except _NoAnswerError as error:
                self._abandon()
                self._metrics.upstream_errors.labels(error.reason).inc()
                if error.reason == "connection":
                    upstreams.failed(base)
                self._tried.add(base)
                if error.status != 502 or not upstreams.others(self._tried):
                    await self._no_answer(base, error)
                    return
                self._metrics.retries.labels("upstream").inc()
            finally:
                self._abandon()

    def _choose(self, size: int) -> str:
        if self._asked is None or self._tried:  # the router would choose a busy upstream again
            return self._office.upstreams.any_base(self._tried)
        self._route = self._office.upstreams.route(self._asked.session, self._asked.parts, size // 4)
        return self._route.replica

    def _abandon(self) -> None:
        if self._route is not None:
            self._office.upstreams.abandon(self._route)
            self._route = None

    async def _no_answer(self, base: str, error: _NoAnswerError) -> None:
        if self._asked is None:
            self._metrics.upstream_errors.labels(error.reason).inc()
        await self._fail(error.status, "upstreams", _MESSAGES[error.status])

    async def _ask_with_additions(self, base: str, content: bytes) -> None:
        """Ask an upstream; if it refuses a field that we added, ask again without."""
        asked = self._asked
        if asked is None:
            await self._ask(base, content, None)
            return
        sent, model = asked.sent, asked.call.body.get("model")
        accepts = self._office.accepts_additions(base, model)
        if sent.content == sent.plain or accepts is False:
            await self._ask(base, sent.plain, sent._replace(hide_usage=False, marked=None))
            return
        status = await self._ask(base, sent.content, sent, retries=accepts is None)
        if accepts is None and status < 400:
            self._office.note_additions(base, model, True)
        elif accepts is None and status in _REFUSED_FIELD:
            self._metrics.retries.labels("field").inc()
            status = await self._ask(base, sent.plain, sent._replace(hide_usage=False, marked=None))
            if status < 400:
                self._office.note_additions(base, model, False)
                if sent.marked is not None and self._office.marker is not None:
                    self._office.marker.refused(sent.marked)

    async def _ask(
        self, base: str, data: bytes | AsyncIterator[bytes] | None, sent: Outgoing | None, *, retries: bool = False
    ) -> int:
        """Send one request, and the answer to the client unless `retries` allows another attempt; return its status.

        Raises:
            _NoAnswerError: The upstream failed, and the client has seen nothing yet.
        """
        try:
            try:
                return await self._ask_once(base, data, sent, retries)
            except aiohttp.ServerDisconnectedError:
                if self.has_begun or not isinstance(data, bytes):
                    raise
                # The upstream may have closed an idle connection just when it was used again.
                return await self._ask_once(base, data, sent, retries)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if self.has_begun:
                # The answer stays without its end, so that the server closes the connection and the client notices.
                self._metrics.upstream_errors.labels("broken").inc()
                return 502
            if isinstance(error, aiohttp.InvalidURL):
                raise _NoAnswerError("address", 400) from error
            if isinstance(error, asyncio.TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                raise _NoAnswerError("timeout", 504) from error
            raise _NoAnswerError("connection") from error

    async def _ask_once(
        self, base: str, data: bytes | AsyncIterator[bytes] | None, sent: Outgoing | None, retries: bool
    ) -> int:
        scope = self._scope
        upstreams = self._office.upstreams
        self._base, self._status = base, None
        if isinstance(data, bytes):
            self._sent = data
        url = upstreams.target(base, scope.get("raw_path") or self._path.encode(), scope["query_string"])
        async with self._office.client.request(
            scope["method"], url, data=data, headers=self._upstream_headers(), allow_redirects=False
        ) as answer:
            self._status = answer.status
            if retries and answer.status in _REFUSED_FIELD:
                await answer.read()
            elif answer.status in _UNAVAILABLE and self._asked is not None and upstreams.others({base, *self._tried}):
                raise _NoAnswerError("unavailable")
            else:
                self.has_begun = True
                await self._relay(answer, sent)
            return answer.status

    def _upstream_headers(self) -> CIMultiDict[str]:
        options = self._office.options
        named = {name.strip().lower() for name in self._headers.get("connection", "").split(",")}
        left_out = {*_HOP_BY_HOP, *_OURS, *named}
        if options.tenant_header is not None:
            left_out.add(options.tenant_header.lower())
        if self._office.hides_keys:
            left_out |= {"authorization", "x-api-key"}
        if self._body_is_read.is_set():
            left_out.add("content-length")  # it may have changed
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in self._scope["headers"]:
            if name.decode("latin-1").lower() not in left_out:
                headers.add(name.decode("latin-1"), value.decode("latin-1"))
        if options.upstream_key is not None:
            if is_messages(self._path):
                headers["x-api-key"] = options.upstream_key
            else:
                headers["Authorization"] = f"Bearer {options.upstream_key}"
        if self._asked is not None:
            headers["Accept-Encoding"] = "identity"  # so that the usage can be read
        return headers

    async def _relay(self, answer: aiohttp.ClientResponse, sent: Outgoing | None) -> None:
        """Send the answer to the client as it comes, and read the usage on the way."""
        kind = answer.headers.get("content-type", "").lower()
        streams = kind.startswith("text/event-stream")
        hides = sent is not None and sent.hide_usage and streams
        reader: StreamedAnswer | WholeAnswer | None = None
        if sent is not None and answer.status < 300 and "content-encoding" not in answer.headers:
            reader = StreamedAnswer(hide_usage=hides) if streams else WholeAnswer()
        headers = [
            (name, value)
            for name, value in answer.raw_headers
            if (lower := name.decode("latin-1").lower()) not in _HOP_BY_HOP
            and not (hides and lower == "content-length")
        ]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if reader is not None:
            self._facts = reader.facts
        try:
            async for chunk in answer.content.iter_any():
                data = chunk if reader is None else self._read(reader, chunk)
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
            rest = b"" if reader is None else reader.finish()
            self._is_whole = True
            await self._send({"type": "http.response.body", "body": rest})
        finally:
            self._settle(None if reader is None else reader.facts, answer.status, sent)
            self._metrics.requests.labels(self._route_name, answer.status).inc()

    def _read(self, reader: StreamedAnswer | WholeAnswer, chunk: bytes) -> bytes:
        data = reader.feed(chunk)
        if self._route is not None and reader.facts.started:
            self._office.upstreams.prefilled(self._route)
        return data

    def _settle(self, facts: AnswerFacts | None, status: int, sent: Outgoing | None) -> None:
        """Record what the answer reported. Never raises."""
        if self._asked is None or sent is None:
            return
        try:
            has_answered = facts is not None and facts.started and not facts.failed
            if self._route is not None:
                route, self._route = self._route, None
                if has_answered:
                    self._office.upstreams.commit(route)
                else:
                    self._office.upstreams.abandon(route)
            if sent.marked is not None and self._office.marker is not None:
                # An answer without usage has not failed: it does not show what became of its marks.
                usage = facts.usage if facts is not None and (has_answered or facts.usage) else None
                self._office.marker.report(sent.marked, usage)
            if has_answered and facts is not None:
                self._office.answered(self._asked, sent, facts)
        except Exception as error:
            self._office.fail("an answer could not be recorded", error)


async def reply(send: Send, status: int, kind: bytes, body: bytes) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
