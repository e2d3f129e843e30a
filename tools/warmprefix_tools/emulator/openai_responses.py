"""OpenAI's Responses API: `POST /v1/responses`, streamed or not. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from itertools import count

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator.answers import ComposedAnswer, Json, ToolCall
from warmprefix_tools.emulator.engine import EmulatorEngine, Generation
from warmprefix_tools.emulator.responses_bodies import ResponsesRequest
from warmprefix_tools.emulator.scripts import turns_of
from warmprefix_tools.emulator.serving import (
    EventStream,
    named_event,
    parsed,
    planned_answer,
    require_model,
    unless_disconnected,
)

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["ResponsesApi"]


class ResponsesApi:
    """The route."""

    def __init__(self, engine: EmulatorEngine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        body = await parsed(request, ResponsesRequest)
        require_model(self._engine.config, body.model)
        prompt = body.prompt_for(self._engine.profile)
        turns = turns_of(body.input) if body.tools and isinstance(body.input, list) else 0 if body.tools else None
        answer = planned_answer(self._engine, prompt, body.max_output_tokens, turns)
        frame = _ResponsePayloads(self._engine.config.model, body)
        if body.stream:
            return EventStream(self._events(prompt, answer, frame))
        return JSONResponse(await unless_disconnected(request.receive, self._response(prompt, answer, frame)))

    async def _response(self, prompt: MarkedPrompt, answer: ComposedAnswer, frame: _ResponsePayloads) -> Json:
        async with self._engine.generate(prompt, answer) as generation:
            async for _ in generation:
                pass
        return frame.ended(answer, generation)

    async def _events(
        self, prompt: MarkedPrompt, answer: ComposedAnswer, frame: _ResponsePayloads
    ) -> AsyncGenerator[bytes, None]:
        number = count()

        def event(kind: str, **fields: object) -> bytes:
            return named_event({"type": f"response.{kind}", "sequence_number": next(number), **fields})

        place: Json = {"item_id": frame.message_id, "output_index": 0, "content_index": 0}
        async with self._engine.generate(prompt, answer) as generation:
            yield event("created", response=frame.in_progress())
            yield event("in_progress", response=frame.in_progress())
            has_text = bool(answer.text) or not answer.calls
            if has_text:
                yield event("output_item.added", output_index=0, item=frame.message("in_progress", []))
                yield event("content_part.added", **place, part=_text_part(""))
            async for piece in generation:
                if piece:
                    yield event("output_text.delta", **place, delta=piece, logprobs=[])
        response = frame.ended(answer, generation)
        if has_text:
            yield event("output_text.done", **place, text=answer.text, logprobs=[])
            yield event("content_part.done", **place, part=_text_part(answer.text))
            yield event("output_item.done", output_index=0, item=response["output"][0])
        for index, item in enumerate(response["output"][has_text:], int(has_text)):
            here: Json = {"item_id": item["id"], "output_index": index}
            yield event(
                "output_item.added", output_index=index, item={**item, "arguments": "", "status": "in_progress"}
            )
            yield event("function_call_arguments.delta", **here, delta=item["arguments"])
            yield event("function_call_arguments.done", **here, arguments=item["arguments"], name=item["name"])
            yield event("output_item.done", output_index=index, item=item)
        yield event(response["status"], response=response)


class _ResponsePayloads:
    """The payloads of one response, which share its ids and its time."""

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self.message_id = f"msg_{uuid.uuid4().hex}"
        self._common: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "prompt_cache_key": body.prompt_cache_key,
            "tools": body.tools or [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0,
            "top_p": 1.0,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": {},
            "error": None,
            "incomplete_details": None,
        }

    def in_progress(self) -> Json:
        """Return the response before its first token."""
        return {**self._common, "status": "in_progress", "output": [], "usage": None}

    def message(self, status: str, content: list[Json]) -> Json:
        """Return the only item of the output."""
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def ended(self, answer: ComposedAnswer, generation: Generation) -> Json:
        """Return the whole response."""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        has_text = bool(answer.text) or not answer.calls
        message = [self.message(status, [_text_part(answer.text)])] if has_text else []
        use, generated = generation.use, generation.generated_tokens
        return {
            **self._common,
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": [*message, *map(_call_item, answer.calls)],
            "usage": {
                "input_tokens": use.tokens,
                "input_tokens_details": {"cached_tokens": use.read, "cache_write_tokens": sum(use.written)},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": use.tokens + generated,
            },
        }


def _call_item(call: ToolCall) -> Json:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
