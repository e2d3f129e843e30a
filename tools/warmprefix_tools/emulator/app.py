"""The engine behind HTTP, as a Starlette application: the routes of vLLM, OpenAI and Anthropic."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator import answers
from warmprefix_tools.emulator.answers import AnswerPayloads, ComposedAnswer, Json
from warmprefix_tools.emulator.anthropic_messages import MessagesApi, error_body
from warmprefix_tools.emulator.engine import EmulatorConfig, EmulatorEngine, Generation, Reader
from warmprefix_tools.emulator.openai_responses import ResponsesApi
from warmprefix_tools.emulator.request_bodies import AdvanceClockRequest, ChatCompletionRequest, TokenizeRequest
from warmprefix_tools.emulator.scripts import turns_of
from warmprefix_tools.emulator.serving import (
    EventStream,
    MarksResponses,
    RefusedError,
    data_event,
    parsed,
    planned_answer,
    require_model,
    unless_disconnected,
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
    api, messages = _Api(engine, metrics), MessagesApi(engine)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/responses", ResponsesApi(engine).create, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
            Route("/advance_clock", api.advance_clock, methods=["POST"]),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
        ],
        middleware=[Middleware(MarksResponses)],
        exception_handlers={HTTPException: _error_response},
    )
    app.state.engine = engine
    return app


class _Api:
    """The routes, one method per route."""

    def __init__(self, engine: EmulatorEngine, metrics: EmulatorMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._config = engine.config
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        body = await parsed(request, ChatCompletionRequest)
        require_model(self._config, body.model)
        prompt = body.prompt_for(self._engine.profile)
        turns = turns_of([{"role": message.role} for message in body.messages]) if body.tools else None
        text = None
        if self._engine.reader is not None and turns is None:
            text = self._engine.reader([message.for_template() for message in body.messages])
        answer = planned_answer(self._engine, prompt, body.new_token_limit, turns, text)
        frame = AnswerPayloads(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), self._config.model)
        if body.stream:
            return EventStream(self._events(body, prompt, answer, frame))
        completion = await unless_disconnected(request.receive, self._completion(body, prompt, answer, frame))
        return JSONResponse(completion)  # None is not delivered, because the client has left

    async def models(self, request: Request) -> Response:
        return JSONResponse(answers.model_list(self._config.model, self._config.context_limit, self._created))

    async def tokenize(self, request: Request) -> Response:
        body = await parsed(request, TokenizeRequest)
        require_model(self._config, body.model)
        if body.prompt is not None:
            tokens = encode(body.prompt)
        else:
            tokens = render_chat(body.for_template(), add_generation_prompt=body.add_generation_prompt)
        return JSONResponse({"count": len(tokens), "max_model_len": self._config.context_limit, "tokens": tokens})

    async def reset_prefix_cache(self, request: Request) -> Response:
        if not self._engine.cache.reset():
            raise RefusedError(409, "Nothing was reset: requests are running.", kind="ConflictError")
        return Response()

    async def advance_clock(self, request: Request) -> Response:
        body = await parsed(request, AdvanceClockRequest)
        self._engine.advance_clock(body.seconds)
        return Response()

    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def _completion(
        self, body: ChatCompletionRequest, prompt: MarkedPrompt, answer: ComposedAnswer, frame: AnswerPayloads
    ) -> Json:
        async with self._engine.generate(prompt, answer) as generation:
            async for _ in generation:
                pass
        completion = frame.completion(answer, self._usage(generation))
        return {**completion, "prompt_token_ids": prompt.tokens} if body.return_token_ids else completion

    async def _events(
        self, body: ChatCompletionRequest, prompt: MarkedPrompt, answer: ComposedAnswer, frame: AnswerPayloads
    ) -> AsyncGenerator[bytes, None]:
        async with self._engine.generate(prompt, answer) as generation:
            first = frame.delta({"role": "assistant", "content": ""})
            yield data_event({**first, "prompt_token_ids": prompt.tokens} if body.return_token_ids else first)
            async for piece in generation:
                finish_reason = answer.finish_reason if generation.complete else None
                if piece or not answer.calls:
                    yield data_event(frame.delta({"content": piece}, finish_reason))
            for delta in frame.call_deltas(answer.calls) if answer.calls else ():
                yield data_event(delta)
        if body.wants_usage_chunk:
            yield data_event(frame.usage_chunk(self._usage(generation)))
        yield b"data: [DONE]\n\n"

    def _usage(self, generation: Generation) -> Json:
        reports_writes = self._engine.profile.marks is not None
        return answers.usage(generation.use, generation.generated_tokens, reports_writes=reports_writes)


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if request.url.path.startswith("/v1/messages"):
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)
    kind, param = (error.kind, error.param) if isinstance(error, RefusedError) else ("HTTPError", None)
    body = answers.error(error.status_code, error.detail, kind, param)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)
