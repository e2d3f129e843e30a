"""The engine behind HTTP: vLLM's OpenAI-compatible routes as a Starlette application."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator import answers
from warmprefix_tools.emulator.answers import AnswerPayloads, ComposedAnswer, Json, compose_answer
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine, Generation
from warmprefix_tools.emulator.request_bodies import ChatCompletionRequest, TokenizeRequest
from warmprefix_tools.emulator.tokenizer import encode, render_chat
from warmprefix_tools.emulator.vllm_metrics import EmulatorMetrics

try:
    from pydantic import BaseModel, ValidationError
    from starlette.applications import Starlette
    from starlette.datastructures import MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["create_app"]


def create_app(config: EmulatorConfig | None = None) -> Starlette:
    """Return an ASGI application with an engine of its own, the `EmulatorEngine` `app.state.engine`.

    Serve it with one worker and in one event loop, because the cache is in the process.
    """
    config = EmulatorConfig() if config is None else config
    metrics = EmulatorMetrics(config)
    engine = EmulatorEngine(config, observer=metrics)
    metrics.watch(engine)
    api = _Api(engine, metrics)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
        ],
        middleware=[Middleware(_MarksResponses)],
        exception_handlers={HTTPException: _error_response},
    )
    app.state.engine = engine
    return app


class _RefusedError(HTTPException):
    """A request that is refused, in OpenAI's shape and vLLM's words."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(status, message)
        self.kind = kind
        self.param = param


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=BaseModel)


class _Api:
    """The routes, one method per route."""

    def __init__(self, engine: EmulatorEngine, metrics: EmulatorMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._config = engine.config
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        body = await _parsed(request, ChatCompletionRequest)
        self._require_model(body.model)
        prompt = render_chat(body.for_template())
        answer = compose_answer(prompt, self._new_token_limit(len(prompt), body.new_token_limit))
        frame = AnswerPayloads(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), self._config.model)
        if body.stream:
            return _EventStream(self._events(body, prompt, answer, frame))
        completion = await _unless_disconnected(request.receive, self._completion(body, prompt, answer, frame))
        return JSONResponse(completion)  # None is not delivered, because the client has left

    async def models(self, request: Request) -> Response:
        return JSONResponse(answers.model_list(self._config.model, self._config.context_limit, self._created))

    async def tokenize(self, request: Request) -> Response:
        body = await _parsed(request, TokenizeRequest)
        self._require_model(body.model)
        if body.prompt is not None:
            tokens = encode(body.prompt)
        else:
            tokens = render_chat(body.for_template(), add_generation_prompt=body.add_generation_prompt)
        return JSONResponse({"count": len(tokens), "max_model_len": self._config.context_limit, "tokens": tokens})

    async def reset_prefix_cache(self, request: Request) -> Response:
        if not self._engine.cache.reset():
            raise _RefusedError(409, "Nothing was reset: requests are running.", kind="ConflictError")
        return Response()

    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def _completion(
        self, body: ChatCompletionRequest, prompt: list[int], answer: ComposedAnswer, frame: AnswerPayloads
    ) -> Json:
        async with self._engine.generate(prompt, answer, body.cache_salt) as generation:
            async for _ in generation:
                pass
        completion = frame.completion(answer.text, answer.finish_reason, _usage(prompt, generation))
        return {**completion, "prompt_token_ids": prompt} if body.return_token_ids else completion

    async def _events(
        self, body: ChatCompletionRequest, prompt: list[int], answer: ComposedAnswer, frame: AnswerPayloads
    ) -> AsyncGenerator[bytes, None]:
        async with self._engine.generate(prompt, answer, body.cache_salt) as generation:
            first = frame.delta({"role": "assistant", "content": ""})
            yield _event({**first, "prompt_token_ids": prompt} if body.return_token_ids else first)
            async for piece in generation:
                finish_reason = answer.finish_reason if generation.complete else None
                yield _event(frame.delta({"content": piece}, finish_reason))
        if body.wants_usage_chunk:
            yield _event(frame.usage_chunk(_usage(prompt, generation)))
        yield b"data: [DONE]\n\n"

    def _require_model(self, model: str | None) -> None:
        if model not in (None, self._config.model):
            raise _RefusedError(404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model")

    def _new_token_limit(self, prompt_tokens: int, asked: int | None) -> int:
        limit = self._config.context_limit
        wanted = 1 if asked is None else asked
        if prompt_tokens + wanted > limit:
            raise _RefusedError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted}"
                f" output tokens and your prompt contains at least {prompt_tokens} input tokens, for a total of"
                f" at least {prompt_tokens + wanted} tokens. Please reduce the length of the input prompt or"
                " the number of requested output tokens.",
                param="input_tokens",
            )
        return limit - prompt_tokens if asked is None else asked


async def _parsed(request: Request, model: type[BodyT]) -> BodyT:
    try:
        return model.model_validate_json(await request.body())
    except ClientDisconnect as error:
        raise _RefusedError(400, "The request ended before its body did.") from error
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        fields = [".".join(map(str, problem["loc"])) for problem in problems]
        message = "; ".join(
            f"{field}: {problem['msg']}" if field else problem["msg"]
            for field, problem in zip(fields, problems, strict=True)
        )
        raise _RefusedError(400, message, param=fields[0] or None) from error


def _usage(prompt: list[int], generation: Generation) -> Json:
    return answers.usage(len(prompt), generation.cached_tokens, generation.generated_tokens)


def _event(payload: Json) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


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


class _MarksResponses:
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


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    kind, param = (error.kind, error.param) if isinstance(error, _RefusedError) else ("HTTPError", None)
    body = answers.error(error.status_code, error.detail, kind, param)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)
