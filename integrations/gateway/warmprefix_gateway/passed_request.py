"""One request through a gateway: its body, its upstream, and its answer back to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any

from warmprefix.errors import MissingExtraError, NoAgentError
from warmprefix_gateway.body_encodings import ReadAnswer, reader_of
from warmprefix_gateway.echo_watch import EchoedAnswer
from warmprefix_gateway.gateway_options import EchoHandling
from warmprefix_gateway.http_messages import (
    ClientAnswer,
    Send,
    answer_headers,
    error_body,
    reply,
)
from warmprefix_gateway.office import Office
from warmprefix_gateway.outgoing import AskedPrompt
from warmprefix_gateway.request_body import ClientLeftError, Receive, RequestBody
from warmprefix_gateway.routes import RouteKind
from warmprefix_gateway.tenant_bodies import BodyRefusedError
from warmprefix_gateway.upstreams import FirstByteTimer, reason_of
from warmprefix_openai import AnswerFacts, StreamedAnswer, is_stream
from warmprefix_requests import Echoes, OutgoingRequest
from warmprefix_requests.refusals import REFUSALS
from warmprefix_routing import Route

try:
    import aiohttp
except ImportError as exc:
    raise MissingExtraError("serve", "aiohttp") from exc

__all__ = ["PassedRequest", "Scope"]

Scope = MutableMapping[str, Any]

_PROMPT_PATHS = ("/chat/completions", "/completions", "/messages", "/responses")
_UNAVAILABLE = (502, 503)
_SHARED = "the upstream's engine does not keep tenants apart on this route"
_MESSAGES = {
    400: "the path or a header is not valid",
    502: "no upstream answers",
    503: "no upstream answers",
    504: "the upstream did not answer in time",
}

_AnswerReader = ReadAnswer | EchoedAnswer


class _NoAnswerError(Exception):
    """An upstream failed before the first byte of its answer, so another one may be asked."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.reason = reason
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
        self._headers = dict(headers)
        self._tenant = tenant
        self._send = send
        self._body = RequestBody(office, tenant, receive)
        self._unread: bytes | None = None
        """Body that goes out with its compression."""
        self._asked: AskedPrompt | None = None
        self._timer = FirstByteTimer()
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
        self._is_prefilled = False
        """True once the router has recorded that the prompt is computed."""
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
        kind = self._route_kind()
        if kind is None:
            await self._fail(404, "route", "this route is not open; the gateway's operator can allow it")
            return
        has_left = False
        try:
            if kind == "other":
                await self._body.until_client_leaves(self._pass_on())
                return
            content, plain = await self._read_body()
            if kind == "embedding":
                sent = await self._office.salted_embedding(plain, self._headers, self._tenant or "")
                await self._body.until_client_leaves(self._pass_on(sent))
                return
            await self._body.until_client_leaves(self._prepare_and_pass(content, plain))
        except BodyRefusedError as error:
            await self._fail(error.status, error.reason, str(error))
        except NoAgentError:
            await self._fail(503, "upstreams", _MESSAGES[503])
        except ClientLeftError:
            has_left = True
            raise
        finally:
            self._record(has_left)
            self._abandon()
            self._office.abandon(self._asked)
            self._body.release()

    def _route_kind(self) -> RouteKind | None:
        """Return the kind of the route; None if it is closed to tenants."""
        method, path = self._scope["method"], self._raw_path.decode("latin-1")
        kind: RouteKind | None = "other" if self._tenant is None else self._office.routes.kind(method, path)
        is_prompt = method == "POST" and self._path.rstrip("/").endswith(_PROMPT_PATHS)
        return "prompt" if is_prompt and kind is not None else kind

    @property
    def _raw_path(self) -> bytes:
        raw_path: bytes = self._scope.get("raw_path") or self._path.encode()
        return raw_path

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

    async def _read_body(self) -> tuple[bytes, bytes]:
        """Return the body as it came, and without its compression, if that can be read.

        Raises:
            BodyRefusedError: It is too large, there is no room for it, or it is a tenant's and cannot be read.
            ClientLeftError: The client left before its end.
        """
        content = await self._body.whole(self._headers.get("content-length", ""))
        plain = await self._body.decoded(content, self._headers.get("content-encoding", ""))
        if plain is None and self._tenant is not None:
            raise BodyRefusedError(415, "encoding", "the body must be plain, or one whole gzip, deflate or zstd")
        if plain is None:
            return content, content
        self._headers.pop("content-encoding", None)
        return content, plain

    async def _fail(self, status: int, reason: str, message: str) -> None:
        """Answer with an error of our own."""
        self._metrics.refused.labels(reason).inc()
        self._metrics.requests.labels(self._route_name, status).inc()
        self.has_begun = True
        self._body.release()
        await reply(self._send, status, b"application/json", error_body(self._path, status, message))

    @property
    def _route_name(self) -> str:
        return "other" if self._asked is None else self._asked.call.route

    # -- the upstream's side -----------------------------------------------------------------------------------

    async def _pass_on(self, content: bytes | None = None) -> None:
        """Send a request without a prompt to one upstream, with this body, or with the client's as it comes."""
        data: bytes | AsyncIterator[bytes] | None = content
        if content is None and ("content-length" in self._headers or "transfer-encoding" in self._headers):
            data = self._body.pieces()
        elif content is None:
            async for _ in self._body.pieces():
                pass
        if content is None:
            keeper = await self._office.histories.upstream_of(self._tenant, self._scope["method"], self._path)
            base = keeper or self._office.upstreams.any_base()
        else:
            base = await self._choose(len(content))
        try:
            await self._ask(base, data, None)
        except _NoAnswerError as error:
            self._metrics.upstream_errors.labels(error.reason).inc()
            await self._fail(error.status, "upstreams", _MESSAGES[error.status])

    async def _prepare_and_pass(self, content: bytes, plain: bytes) -> None:
        self._timer = FirstByteTimer()
        self._asked = await self._office.ask(plain, self._path, self._headers, self._tenant)
        if self._asked is None:
            self._unread = plain = content
        await self._pass_prompt(plain)

    async def _pass_prompt(self, content: bytes) -> None:
        """Send a request with a prompt; if an upstream fails before its first byte, to another one."""
        upstreams = self._office.upstreams
        while True:
            base = await self._choose(len(content))
            try:
                await self._ask_with_additions(base, content)
                return
            except _NoAnswerError as error:
                self._abandon()
                self._metrics.upstream_errors.labels(error.reason).inc()
                if error.reason == "connection":
                    upstreams.failed(base, reason_of(error.__cause__ or error))
                self._tried.add(base)
                if error.status != 502 or self._only or not upstreams.others(self._tried):
                    await self._fail(error.status, "upstreams", _MESSAGES[error.status])
                    return
                self._metrics.retries.labels("upstream").inc()

    async def _choose(self, size: int) -> str:
        """Return an upstream that was not tried and keeps tenants apart; raise an error without one."""
        upstreams, asked, shared = self._office.upstreams, self._asked, set[str]()
        route = "embeddings" if asked is None else asked.call.route
        while not self._tried or (not self._only and upstreams.others(self._tried)):
            if asked is None or self._tried:  # the router would choose a busy upstream again
                base = upstreams.any_base(self._tried)
            else:
                self._route = upstreams.route(asked.session, asked.parts, size // 4, self._only)
                base = self._route.replica
            if await self._office.separates(base, self._tenant, route):
                self._office.chosen(asked, base)
                return base
            self._abandon()
            self._tried.add(base)
            shared.add(base)
        if shared and (self._only or shared == upstreams.states.keys()):
            hint = "; use chat completions" if route in ("messages", "responses") else ""
            raise BodyRefusedError(400, "salt", _SHARED + hint)
        raise NoAgentError

    @property
    def _only(self) -> str | None:
        """The only upstream that can answer, as it keeps what the request continues."""
        return None if self._asked is None else self._asked.upstream

    def _abandon(self) -> None:
        if self._route is not None:
            self._office.upstreams.abandon(self._route)
            self._route = None

    async def _ask_with_additions(self, base: str, content: bytes) -> None:
        """Ask an upstream; if it refuses a field that we added, ask again without."""
        asked = self._asked
        if asked is None:
            await self._ask(base, content, None)
            return
        attempt = self._office.refusals.attempt(asked.sent, base, self._tenant)
        if attempt.request is not asked.sent:
            self._drop_marks(asked.sent)
        is_open = attempt.is_open
        status = await self._ask(base, attempt.request.encode(), attempt.request, retries=is_open)
        if is_open and (plain := attempt.answered(status)) is not None:
            self._metrics.retries.labels("field").inc()
            self._drop_marks(asked.sent)
            attempt.answered(await self._ask(base, plain.encode(), plain))

    def _drop_marks(self, sent: OutgoingRequest) -> None:
        """Note that a request goes out without its marks."""
        if sent.marked is not None and self._office.marker is not None:
            self._office.marker.report(sent.marked, None)

    async def _ask(
        self,
        base: str,
        data: bytes | AsyncIterator[bytes] | None,
        sent: OutgoingRequest | None,
        *,
        retries: bool = False,
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
            if not isinstance(error, aiohttp.InvalidURL):
                self._office.upstreams.states[base].fail(reason_of(error))
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
        self, base: str, data: bytes | AsyncIterator[bytes] | None, sent: OutgoingRequest | None, retries: bool
    ) -> int:
        scope = self._scope
        upstreams = self._office.upstreams
        self._base, self._status = base, None
        if isinstance(data, bytes):
            self._sent = data
        url = upstreams.target(base, self._raw_path, scope["query_string"])
        try:
            left_out = {"content-length"} if self._body.is_read else set()  # it may have changed
            if isinstance(data, bytes) and data is not self._unread:
                left_out.add("content-encoding")  # the body goes out plain
            beta = None if sent is None else sent.beta
            headers = self._office.upstream_headers(scope["headers"], self._path, self._tenant, left_out, beta)
            if self._asked is not None:
                headers["Accept-Encoding"] = "identity"  # so that the usage can be read, and hidden
        except ValueError as error:
            raise _NoAnswerError("headers", 400) from error
        with upstreams.states[base].asked():
            self._timer.ask()
            async with self._office.client.request(
                scope["method"], url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                self._status = answer.status
                if answer.status >= 500:
                    upstreams.states[base].fail(f"status {answer.status}")
                is_unavailable = answer.status in _UNAVAILABLE and self._asked is not None
                if retries and answer.status in REFUSALS:
                    await answer.read()
                elif is_unavailable and not self._only and upstreams.others({base, *self._tried}):
                    raise _NoAnswerError("unavailable")
                else:
                    await self._relay(answer, sent)
                return answer.status

    async def _relay(self, answer: aiohttp.ClientResponse, sent: OutgoingRequest | None) -> None:
        """Send the answer to the client as it comes, and read the usage on the way.

        Raises:
            _NoAnswerError: It has a status or a header that no server can send.
        """
        reader: _AnswerReader | None = None
        if sent is not None and answer.status < 300:
            asked = self._asked is not None and self._asked.call.streams
            streams = is_stream(answer.headers.get("content-type", ""), asked=asked)
            texts = None if self._asked is None or self._asked.found is None else self._asked.found.texts
            reader = _reader_of(answer, streams, sent, texts or {}, self._office.options.echoes)
        hides = isinstance(reader, StreamedAnswer) and sent is not None and sent.hides_usage
        watched = reader if isinstance(reader, EchoedAnswer) else None
        try:
            headers = answer_headers(answer.raw_headers, without_length=hides or watched is not None)
        except ValueError as error:
            raise _NoAnswerError("answer") from error
        if not 200 <= answer.status < 600:
            raise _NoAnswerError("answer")
        self.has_begun, is_first, status = True, True, answer.status
        kept = None if reader is None else self._office.histories.kept_answer(self._asked, sent, self._base)
        streams = isinstance(reader, StreamedAnswer) or (watched is not None and watched.streams)
        client = ClientAnswer(self._send, answer.status, headers, holds=kept is not None and not streams)
        if watched is None or watched.streams:
            await client.start()
        if reader is not None:
            self._facts = reader.facts
        try:
            async for chunk in answer.content.iter_any():
                if is_first:
                    self._timer.arrive()
                data = chunk if reader is None else self._read(reader, chunk)
                if kept is not None and reader is not None:
                    await kept.record(reader.facts)  # before the client has all of it, and can continue it
                await client.send(data)
                if is_first:
                    is_first = False
                    self._note_first_byte(answer.status)
            rest = b"" if reader is None else reader.finish()
            if kept is not None and reader is not None:
                await kept.record(reader.facts)
            self._is_whole = True
            self._body.release()  # the client's next request may come before this one has ended
            if watched is not None and watched.refused and not client.has_started:
                self._metrics.refused.labels("echo").inc()
                status = 502
                await reply(self._send, status, b"application/json", error_body(self._path, status, watched.refusal))
            else:
                await client.finish(rest)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            await client.break_off(b"" if watched is None else watched.held())
            raise
        finally:
            if watched is not None:
                self._office.count_echoes(watched)
            self._settle(None if reader is None else reader.facts, sent)
            self._metrics.requests.labels(self._route_name, status).inc()

    def _note_first_byte(self, status: int) -> None:
        if self._asked is not None and status < 300 and self._base is not None:
            times = self._timer.end()
            self._office.upstreams.added.add(times.gateway)
            self._office.upstreams.states[self._base].first_bytes.add(times.upstream)

    def _read(self, reader: _AnswerReader, chunk: bytes) -> bytes:
        data = reader.feed(chunk)
        if isinstance(reader, EchoedAnswer) and reader.waits and not self._body.takes(len(chunk)):
            data = reader.give_up()
        if not self._is_prefilled and self._route is not None and reader.facts.started:
            self._is_prefilled = True
            self._office.upstreams.prefilled(self._route)
        return data

    def _settle(self, facts: AnswerFacts | None, sent: OutgoingRequest | None) -> None:
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
                target = self._raw_path, self._scope["query_string"]
                self._office.answered(self._asked, sent, facts, self._base, target)
        except Exception as error:
            self._office.fail("an answer could not be recorded", error)


def _reader_of(
    answer: aiohttp.ClientResponse,
    streams: bool,
    sent: OutgoingRequest,
    earlier: Mapping[str, str | None],
    handling: EchoHandling,
) -> _AnswerReader:
    """Return the reader of an answer; `earlier` has references in the history that the upstream keeps."""
    reader = reader_of(answer.headers.get("content-encoding", ""), streams, hide_usage=sent.hides_usage)
    echoes = Echoes(earlier)
    if sent.rewritten is not None:
        echoes.add(sent.rewritten.echoes.texts)
    are_lost = None in earlier.values()
    return EchoedAnswer(reader, echoes, handling, are_lost) if echoes and handling != "pass" else reader
