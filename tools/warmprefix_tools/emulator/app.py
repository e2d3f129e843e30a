"""The engine behind HTTP, as a Starlette application: the routes of vLLM, OpenAI and Anthropic."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from functools import partial

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator import answers
from warmprefix_tools.emulator.answers import AnswerPayloads, ComposedAnswer, Json
from warmprefix_tools.emulator.anthropic_messages import count_tokens, create_message, error_body
from warmprefix_tools.emulator.embeddings import create_embeddings
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine, Generation, Reader
from warmprefix_tools.emulator.openai_bodies import AdvanceClockRequest, ChatCompletionRequest, TokenizeRequest
from warmprefix_tools.emulator.openai_items import item_routes
from warmprefix_tools.emulator.openai_responses import create_response
from warmprefix_tools.emulator.scripts import turns_of
from warmprefix_tools.emulator.serving import (
    MarksResponses,
    RefusedError,
    data_event,
    parsed,
    planned_answer,
    respond,
)
from warmprefix_tools.emulator.tokenizer import encode, render_chat
from warmprefix_tools.emulator.vllm_metrics import EmulatorMetrics

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["create_app"]


def create_app(config: EmulatorConfig | None = None, reader: Reader | None = None) -> Starlette:
    """Return an ASGI application with an engine of its own, the `EmulatorEngine` `app.state.engine`.

    Serve it with one worker and in one event loop, because the cache is in the process.
    """
    config = EmulatorConfig() if config is None else config
    metrics = EmulatorMetrics(config)
    engine = EmulatorEngine(config, observer=metrics, reader=reader)
    metrics.watch(engine)
    created = int(time.time())

    async def models(request: Request) -> Response:
        return JSONResponse(answers.model_list(config.model, config.context_limit, created))

    async def health(request: Request) -> Response:
        return Response()

    async def exposition(request: Request) -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    posts = {
        "/v1/chat/completions": _create_chat,
        "/v1/embeddings": create_embeddings,
        "/v1/responses": create_response,
        "/v1/messages": create_message,
        "/v1/messages/count_tokens": count_tokens,
        "/tokenize": _tokenize,
        "/reset_prefix_cache": _reset_prefix_cache,
        "/advance_clock": _advance_clock,
    }
    app = Starlette(
        routes=[
            *(Route(path, partial(answer, engine), methods=["POST"]) for path, answer in posts.items()),
            *item_routes(engine),
            *(Route("/v1/models", models), Route("/metrics", exposition)),
            *(Route(path, health) for path in ("/", "/health")),  # some clients ask for `HEAD /` first
        ],
        middleware=[Middleware(MarksResponses)],
        exception_handlers={HTTPException: _error_response},
    )
    app.state.engine = engine
    return app


async def _create_chat(engine: EmulatorEngine, request: Request) -> Response:
    body = await parsed(request, ChatCompletionRequest, engine.config)
    if engine.config.refuses_priorities and body.priority is not None:
        return _refused_priority(body.stream)
    prompt = body.prompt_for(engine.profile)
    turns = turns_of([{"role": message.role} for message in body.messages]) if body.tools else None
    text = None
    if engine.reader is not None:
        text = engine.reader([message.for_template() for message in body.messages])
    answer = planned_answer(engine, prompt, body.new_token_limit, turns, text, body=await request.body())
    shown: Json = {"prompt_token_ids": prompt.tokens} if body.return_token_ids else {}
    form = _ChatFormat(engine, body.wants_usage_chunk, shown)
    return await respond(request, engine, prompt, answer, form, body.stream)


def _refused_priority(stream: bool | None) -> Response:
    """Return SGLang's refusal, which is an event if the answer was to be streamed."""
    message = "Using priority is disabled for this server. Please send a new request without a priority."
    if not stream:
        body = {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
        return JSONResponse(body, status_code=503)
    error = {"object": "error", "message": message, "type": "SERVICE_UNAVAILABLE", "param": None, "code": 503}
    return Response(data_event({"error": error}) + b"data: [DONE]\n\n", media_type="text/event-stream")


class _ChatFormat:
    """The shapes of one chat completion; `shown` is added to the whole answer, or to its first chunk."""

    def __init__(self, engine: EmulatorEngine, has_usage_chunk: bool, shown: Json) -> None:
        self._payloads = AnswerPayloads(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), engine.config.model)
        self._reports_writes = engine.profile.marks is not None
        self._has_usage_chunk = has_usage_chunk
        self._shown = shown

    def whole(self, answer: ComposedAnswer, generation: Generation) -> Json:
        return {**self._payloads.completion(answer, self._usage(generation)), **self._shown}

    async def events(self, answer: ComposedAnswer, generation: Generation) -> AsyncGenerator[bytes, None]:
        first = self._payloads.delta({"role": "assistant", "content": ""})
        yield data_event({**first, **self._shown})
        async for piece in generation:
            finish_reason = answer.finish_reason if generation.complete else None
            if piece or not answer.calls:
                yield data_event(self._payloads.delta({"content": piece}, finish_reason))

    def end(self, answer: ComposedAnswer, generation: Generation) -> Iterator[bytes]:
        for delta in self._payloads.call_deltas(answer.calls) if answer.calls else ():
            yield data_event(delta)
        if self._has_usage_chunk:
            yield data_event(self._payloads.usage_chunk(self._usage(generation)))
        yield b"data: [DONE]\n\n"

    def _usage(self, generation: Generation) -> Json:
        return answers.usage(generation.use, generation.generated_tokens, reports_writes=self._reports_writes)


async def _tokenize(engine: EmulatorEngine, request: Request) -> Response:
    body = await parsed(request, TokenizeRequest, engine.config)
    if body.prompt is not None:
        tokens = encode(body.prompt)
    else:
        tokens = render_chat(body.for_template(), add_generation_prompt=body.add_generation_prompt)
    return JSONResponse({"count": len(tokens), "max_model_len": engine.config.context_limit, "tokens": tokens})


async def _reset_prefix_cache(engine: EmulatorEngine, request: Request) -> Response:
    if not engine.cache.reset():
        raise RefusedError(409, "Nothing was reset: requests are running.", kind="ConflictError")
    return Response()


async def _advance_clock(engine: EmulatorEngine, request: Request) -> Response:
    body = await parsed(request, AdvanceClockRequest, engine.config)
    engine.advance_clock(body.seconds)
    return Response()


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)
    refused = error if isinstance(error, RefusedError) else RefusedError(0, "", kind="HTTPError")
    body = answers.error(error.status_code, error.detail, refused.kind, refused.param, refused.code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)
