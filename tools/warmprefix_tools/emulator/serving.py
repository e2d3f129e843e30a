"""What the routes of all APIs share: bodies, refusals, event streams, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator import answers
from warmprefix_tools.emulator.answers import ComposedAnswer, Json, compose_answer, scripted_answer
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine, Generation

try:
    from pydantic import BaseModel, ValidationError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc
try:
    from starlette.datastructures import MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = [
    "AnswerFormat",
    "MarksResponses",
    "RefusedError",
    "data_event",
    "named_event",
    "parsed",
    "planned_answer",
    "respond",
    "validated",
]

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=BaseModel)


class RefusedError(HTTPException):
    """A request that is refused, in OpenAI's shape and vLLM's words."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, message)
        self.kind = kind
        self.param = param
        self.code = code


async def parsed(request: Request, model: type[BodyT], config: EmulatorConfig) -> BodyT:
    """Return the request's body, or refuse it with the first invalid field; another model is refused too."""
    try:
        body = model.model_validate_json(await request.body())
    except ClientDisconnect as error:
        raise RefusedError(400, "The request ended before its body did.") from error
    except ValidationError as error:
        raise _refusal_of(error, ()) from error
    name = getattr(body, "model", None)
    if name not in (None, config.model):
        raise RefusedError(404, f"The model `{name}` does not exist.", kind="NotFoundError", param="model")
    return body


def validated(model: type[BodyT], value: object, path: Sequence[str | int]) -> BodyT:
    """Return a part of a body at this path as a model, or refuse it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal_of(error, path) from error


def _refusal_of(error: ValidationError, path: Sequence[str | int]) -> RefusedError:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    fields = [".".join(map(str, (*path, *problem["loc"]))) for problem in problems]
    message = "; ".join(
        f"{field}: {problem['msg']}" if field else problem["msg"]
        for field, problem in zip(fields, problems, strict=True)
    )
    return RefusedError(400, message, param=fields[0] or None)


def planned_answer(
    engine: EmulatorEngine,
    prompt: MarkedPrompt,
    most_tokens: int | None,
    turns: int | None = None,
    text: str | None = None,
    body: bytes = b"",
) -> ComposedAnswer:
    """Return the answer to a prompt, or refuse it if both together exceed the context limit.

    For a script, `turns` is the number of answers in the history of a request with tools, None without tools, and
    `body` the request's body. `text` is the answer of a reader; None without one.
    """
    limit, prompt_tokens = engine.config.context_limit, len(prompt.tokens)
    wanted = 1 if most_tokens is None else most_tokens
    if prompt_tokens + wanted > limit:
        raise RefusedError(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested {wanted}"
            f" output tokens and your prompt contains at least {prompt_tokens} input tokens, for a total of"
            f" at least {prompt_tokens + wanted} tokens. Please reduce the length of the input prompt or"
            " the number of requested output tokens.",
            param="input_tokens",
        )
    most = limit - prompt_tokens if most_tokens is None else most_tokens
    scripted = None if engine.script is None else engine.script.answer(turns, most, body)
    if scripted is None and text is not None:
        scripted = scripted_answer(text, (), most)
    return scripted or compose_answer(prompt.tokens, most)


class AnswerFormat(Protocol):
    """The shape of one answer in an API."""

    def whole(self, answer: ComposedAnswer, generation: Generation) -> Json:
        """Return an answer that is not streamed."""
        ...

    def events(self, answer: ComposedAnswer, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream while tokens are generated."""
        ...

    def end(self, answer: ComposedAnswer, generation: Generation) -> Iterable[bytes]:
        """Return the events behind the last token; the request holds no KV blocks any more."""
        ...


async def respond(
    request: Request,
    engine: EmulatorEngine,
    prompt: MarkedPrompt,
    answer: ComposedAnswer,
    form: AnswerFormat,
    stream: bool | None,
) -> Response:
    """Generate an answer, and return it in this form, streamed or whole."""

    async def events() -> AsyncGenerator[bytes, None]:
        async with engine.generate(prompt, answer) as generation:
            async for event in form.events(answer, generation):
                yield event
        for event in form.end(answer, generation):
            yield event

    async def whole() -> Json:
        async with engine.generate(prompt, answer) as generation:
            async for _ in generation:
                pass
        return form.whole(answer, generation)

    if stream:
        return _EventStream(events())
    return JSONResponse(await _unless_disconnected(request.receive, whole()))  # None if the client has left


def data_event(payload: Json) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def named_event(kind: str, **fields: object) -> bytes:
    """Return one server-sent event whose name is the type in its payload."""
    return f"event: {kind}\n".encode() + data_event({"type": kind, **fields})


class _EventStream(StreamingResponse):
    """Server-sent events whose generator is closed, and its KV blocks freed, as soon as the client leaves.

    Starlette's own class leaves that to the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await _unless_disconnected(receive, self.stream_response(send))


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`, or cancel it and return None as soon as ASGI's `receive` reports a disconnect.

    The request's body must have been read. When this returns or raises, `work` is over, its cleanup included: an
    engine must not keep KV blocks for a client that has left.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class MarksResponses:
    """Middleware that marks every response, and answers requests that the server's shutdown cancels."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-warmprefix-emulator"] = "1"
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:
            if not started:
                body = answers.error(503, "The emulator was stopped.", "ServiceUnavailableError")
                await JSONResponse(body, status_code=503)(scope, receive, send_marked)
