"""OpenAI's Responses API: `POST /v1/responses`, streamed or not, behind what the API has stored."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import count

from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import is_hosted
from warmprefix_tools.emulator.answers import ComposedAnswer, Json, ToolCall
from warmprefix_tools.emulator.engine import EmulatorEngine, Generation
from warmprefix_tools.emulator.openai_bodies import ResponsesRequest
from warmprefix_tools.emulator.openai_items import INVALID, not_found_as, owner_of, unknown
from warmprefix_tools.emulator.parted_prompts import PartedMessage, render_parts
from warmprefix_tools.emulator.scripts import turns_of
from warmprefix_tools.emulator.serving import RefusedError, named_event, parsed, planned_answer, respond
from warmprefix_tools.emulator.stored_items import StoredConversation, StoredResponse, with_ids

try:
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as exc:
    raise MissingExtraError("cli", "starlette") from exc

__all__ = ["create_response"]


async def create_response(engine: EmulatorEngine, request: Request) -> Response:
    """Answer `POST /v1/responses`."""
    body = await parsed(request, ResponsesRequest, engine.config)
    owner, store = owner_of(request), engine.items
    before, conversation = _continued(engine, owner, body)
    history = list(conversation.items) if conversation is not None else []
    if before is not None:
        with not_found_as(_previous_not_found(engine, body)):
            history = store.history(before)
    messages, fixed = body.messages_for(engine.profile, history)
    wanted = 1 if body.max_output_tokens is None else body.max_output_tokens
    if body.truncation == "auto":
        messages = _truncated(messages, fixed, engine.config.context_limit - wanted)
    prompt = body.rendered(engine.profile, messages)
    turns = turns_of([*history, *body.items]) if body.tools else None
    text = None if engine.reader is None else engine.reader([message.joined for message in messages])
    answer = planned_answer(engine, prompt, body.max_output_tokens, turns, text, body=await request.body())

    def ended(response: Json) -> None:
        given = with_ids(body.items)
        if body.store is not False:
            prepended = history if conversation is not None else ()
            store.put(owner, response, given, before, prepended)
        if conversation is not None and response["status"] == "completed":
            conversation.items += [*given, *response["output"]]

    form = _ResponseFormat(engine.config.model, body, ended)
    return await respond(request, engine, prompt, answer, form, body.stream)


def _continued(
    engine: EmulatorEngine, owner: str | None, body: ResponsesRequest
) -> tuple[StoredResponse | None, StoredConversation | None]:
    """Return what the request continues, if anything."""
    if body.previous_response_id is not None and body.conversation_id is not None:
        message = "Mutually exclusive parameters: 'previous_response_id' and 'conversation'."
        raise RefusedError(400, message, kind=INVALID)
    if body.conversation_id is not None:
        with not_found_as(unknown("Conversation", body.conversation_id)):
            return None, engine.items.conversation(owner, body.conversation_id)
    if body.previous_response_id is None:
        return None, None
    with not_found_as(_previous_not_found(engine, body)):
        return engine.items.response(owner, body.previous_response_id), None


def _previous_not_found(engine: EmulatorEngine, body: ResponsesRequest) -> RefusedError:
    """Return the refusal of OpenAI's API, or that of vLLM."""
    if not is_hosted(engine.profile):
        return unknown("Response", str(body.previous_response_id), "response_id")
    return RefusedError(
        400,
        f"Previous response with id '{body.previous_response_id}' not found.",
        kind=INVALID,
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _truncated(messages: list[PartedMessage], fixed: int, limit: int) -> list[PartedMessage]:
    """Return the messages without the oldest items, if they are too long; the newest one stays."""

    def is_short(dropped: int) -> bool:
        return len(render_parts([*messages[:fixed], *messages[fixed + dropped :]]).tokens) <= limit

    most = max(len(messages) - fixed - 1, 0)
    dropped = 0 if is_short(0) else bisect_left(range(most), True, key=is_short)
    return [*messages[:fixed], *messages[fixed + dropped :]]


class _ResponseFormat:
    """The shapes of one response, which share its ids and its time."""

    def __init__(self, model: str, body: ResponsesRequest, ended: Callable[[Json], None]) -> None:
        self._ended = ended
        self._numbers = count()
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._place: Json = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
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
            "previous_response_id": body.previous_response_id,
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "store": body.store is not False,
            "background": False,
            "temperature": 1.0,
            "top_p": 1.0,
            "text": {"format": {"type": "text"}},
            "truncation": body.truncation or "disabled",
            "metadata": body.metadata or {},
            "error": None,
            "incomplete_details": None,
        }

    async def events(self, answer: ComposedAnswer, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun = {**self._common, "status": "in_progress", "output": [], "usage": None}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)
        if _has_text(answer):
            yield self._event("output_item.added", output_index=0, item=self._message("in_progress", []))
            yield self._event("content_part.added", **self._place, part=_text_part(""))
        async for piece in generation:
            if piece:
                yield self._event("output_text.delta", **self._place, delta=piece, logprobs=[])

    def end(self, answer: ComposedAnswer, generation: Generation) -> Iterator[bytes]:
        response, has_text = self._response(answer, generation), _has_text(answer)
        if has_text:
            yield self._event("output_text.done", **self._place, text=answer.text, logprobs=[])
            yield self._event("content_part.done", **self._place, part=_text_part(answer.text))
            yield self._event("output_item.done", output_index=0, item=response["output"][0])
        for index, item in enumerate(response["output"][has_text:], int(has_text)):
            here: Json = {"item_id": item["id"], "output_index": index}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("output_item.added", output_index=index, item=begun)
            yield self._event("function_call_arguments.delta", **here, delta=item["arguments"])
            yield self._event("function_call_arguments.done", **here, arguments=item["arguments"], name=item["name"])
            yield self._event("output_item.done", output_index=index, item=item)
        self._ended(response)  # a client that left earlier stores nothing
        yield self._event(response["status"], response=response)

    def whole(self, answer: ComposedAnswer, generation: Generation) -> Json:
        response = self._response(answer, generation)
        self._ended(response)
        return response

    def _response(self, answer: ComposedAnswer, generation: Generation) -> Json:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        message = [self._message(status, [_text_part(answer.text)])] if _has_text(answer) else []
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

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_event(f"response.{kind}", sequence_number=next(self._numbers), **fields)

    def _message(self, status: str, content: list[Json]) -> Json:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _has_text(answer: ComposedAnswer) -> bool:
    return bool(answer.text) or not answer.calls


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
