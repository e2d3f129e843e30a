"""Anthropic's Messages API: `POST /v1/messages`, streamed or not, and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import CacheUse, MarkedPrompt, is_hosted
from warmprefix_tools.emulator.answers import ComposedAnswer, Json, ToolCall
from warmprefix_tools.emulator.anthropic_bodies import CountTokensRequest, MessagesRequest
from warmprefix_tools.emulator.engine import EmulatorEngine, Generation
from warmprefix_tools.emulator.scripts import turns_of
from warmprefix_tools.emulator.serving import named_event, parsed, planned_answer, respond

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["count_tokens", "create_message", "error_body"]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {404: "not_found_error", 503: "overloaded_error"}


def error_body(status: int, message: str) -> Json:
    """Return a refusal in Anthropic's shape."""
    kind = _ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{uuid.uuid4().hex}"}


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


async def create_message(engine: EmulatorEngine, request: Request) -> Response:
    """Answer `POST /v1/messages`."""
    body = await parsed(request, MessagesRequest, engine.config)
    prompt = _prompt(engine, request, body)
    turns = turns_of([{"role": turn.role} for turn in body.messages]) if body.tools else None
    answer = planned_answer(engine, prompt, body.max_tokens, turns, body=await request.body())
    return await respond(request, engine, prompt, answer, _MessageFormat(engine), body.stream)


async def count_tokens(engine: EmulatorEngine, request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens`."""
    body = await parsed(request, CountTokensRequest, engine.config)
    return JSONResponse({"input_tokens": len(_prompt(engine, request, body).tokens)})


def _prompt(engine: EmulatorEngine, request: Request, body: CountTokensRequest) -> MarkedPrompt:
    key = request.headers.get("x-api-key") or request.headers.get("authorization")
    salt = key if is_hosted(engine.profile) else body.cache_salt
    return body.prompt_for(engine.profile, salt, request.headers.get("anthropic-beta", ""))


class _MessageFormat:
    """The shapes of one message."""

    def __init__(self, engine: EmulatorEngine) -> None:
        self._lifetimes = () if engine.profile.marks is None else engine.profile.marks.lifetimes
        self._frame: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": engine.config.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, answer: ComposedAnswer, generation: Generation) -> Json:
        texts = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        return {
            **self._frame,
            "content": [*texts, *[_tool_use(call, json.loads(call.arguments)) for call in answer.calls]],
            "stop_reason": _STOP_REASONS[answer.finish_reason],
            "usage": self._usage(generation.use, generation.generated_tokens),
        }

    async def events(self, answer: ComposedAnswer, generation: Generation) -> AsyncGenerator[bytes, None]:
        yield named_event("message_start", message={**self._frame, "usage": self._usage(generation.use, 1)})
        yield named_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield named_event("ping")
        async for piece in generation:
            if piece:
                yield named_event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def end(self, answer: ComposedAnswer, generation: Generation) -> Iterator[bytes]:
        yield named_event("content_block_stop", index=0)
        for number, call in enumerate(answer.calls, 1):
            part = {"type": "input_json_delta", "partial_json": call.arguments}
            yield named_event("content_block_start", index=number, content_block=_tool_use(call, {}))
            yield named_event("content_block_delta", index=number, delta=part)
            yield named_event("content_block_stop", index=number)
        end = {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        yield named_event("message_delta", delta=end, usage=self._usage(generation.use, generation.generated_tokens))
        yield named_event("message_stop")

    def _usage(self, use: CacheUse, output_tokens: int) -> Json:
        written = dict(zip(self._lifetimes, use.written, strict=False))
        return {
            "input_tokens": use.uncached,
            "cache_creation_input_tokens": sum(use.written),
            "cache_read_input_tokens": use.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written.get(300.0, 0),
                "ephemeral_1h_input_tokens": written.get(3600.0, 0),
            },
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }
