"""What the routes of all APIs share: bodies, refusals, event streams, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator import answers
from warmprefix_tools.emulator.answers import ComposedAnswer, Json, compose_answer, scripted_answer
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine

try:
    from pydantic import BaseModel, ValidationError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc
try:
    from starlette.datastructures import MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = [
    "EventStream",
    "MarksResponses",
    "RefusedError",
    "data_event",
    "named_event",
    "parsed",
    "planned_answer",
    "require_model",
    "unless_disconnected",
    "validated",
]

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=BaseModel)


class RefusedError(HTTPException):
    """A request that is refused, in OpenAI's shape and vLLM's words."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(status, message)
        self.kind = kind
        self.param = param


async def parsed(request: Request, model: type[BodyT]) -> BodyT:
    """Return the request's body, or refuse it with the first invalid field."""
    try:
        return model.model_validate_json(await request.body())
    except ClientDisconnect as error:
        raise RefusedError(400, "The request ended before its body did.") from error
    except ValidationError as error:
        raise _refusal_of(error, ()) from error


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


def require_model(config: EmulatorConfig, model: str | None) -> None:
    """Refuse a request for another model."""
    if model not in (None, config.model):
        raise RefusedError(404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model")


def planned_answer(
    engine: EmulatorEngine,
    prompt: MarkedPrompt,
    most_tokens: int | None,
    turns: int | None = None,
    text: str | None = None,
) -> ComposedAnswer:
    """Return the answer to a prompt, or refuse it if both together exceed the context limit.

    `turns` is the number of answers in the history of a request with tools, for a scripted answer; None without tools.
    `text` is the answer of a reader; None without one.
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
    scripted = None if turns is None or engine.script is None else engine.script.answer(turns, most)
    if scripted is None and text is not None:
        scripted = scripted_answer(text, (), most)
    return scripted or compose_answer(prompt.tokens, most)


def data_event(payload: Json) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def named_event(payload: Json) -> bytes:
    """Return one server-sent event whose name is the payload's type."""
    return b"event: " + str(payload["type"]).encode() + b"\n" + data_event(payload)


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed, and its KV blocks freed, as soon as the client leaves.

    Starlette's own class leaves that to the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await unless_disconnected(receive, self.stream_response(send))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
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
