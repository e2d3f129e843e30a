"""Answers of the emulator: their text, and the JSON in OpenAI's shapes as vLLM fills them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from warmprefix_tools.caches import CacheUse
from warmprefix_tools.emulator.tokenizer import MESSAGE_END, encode, split

__all__ = [
    "AnswerPayloads",
    "ComposedAnswer",
    "FinishReason",
    "Json",
    "ToolCall",
    "compose_answer",
    "error",
    "model_list",
    "scripted_answer",
    "usage",
]

FinishReason = Literal["stop", "length", "tool_calls"]
Json = dict[str, Any]

_STATEMENT = "[warmprefix emulator: no model ran, these words mean nothing]"
_EMULATOR = "warmprefix-emulator"


class ToolCall(NamedTuple):
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class ComposedAnswer:
    """All tokens of one answer, composed before the first is sent.

    `pieces[i]` is the text of `token_ids[i]`. An answer that is not cut ends with the end-of-message token, whose
    piece is empty and which counts as a completion token, as in an engine.
    """

    pieces: tuple[str, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        """Text that the client receives."""
        return "".join(self.pieces)


def compose_answer(prompt: Sequence[int], max_tokens: int) -> ComposedAnswer:
    """Return the answer to a prompt, always the same, cut after `max_tokens` (at least 1).

    It states that no model ran; then words spell the prompt's digest.

    >>> answer = compose_answer([1, 2, 3], max_tokens=4)
    >>> answer.text, answer.finish_reason
    ('[warmprefix emulat', 'length')
    """
    digest = blake2b(struct.pack(f"<{len(prompt)}I", *prompt), digest_size=64).digest()
    numbers = struct.unpack("<32H", digest)
    words = " ".join(map(_proquint, numbers[1 : 9 + numbers[0] % 17]))
    text = f"{_STATEMENT} Prompt of {len(prompt)} tokens: {words}."
    pieces = (*split(text), "")
    token_ids = (*encode(text), MESSAGE_END)
    reason: FinishReason = "stop" if len(token_ids) <= max_tokens else "length"
    return ComposedAnswer(pieces[:max_tokens], token_ids[:max_tokens], reason)


def scripted_answer(text: str, calls: Sequence[ToolCall], max_tokens: int) -> ComposedAnswer:
    """Return an answer with this text and these tool calls, cut after `max_tokens`; a cut one has no calls."""
    written = "".join([f"<tool_call>{call.name}{call.arguments}</tool_call>" for call in calls])
    pieces = (*split(text), *[""] * len(split(written)), "")
    token_ids = (*encode(text), *encode(written), MESSAGE_END)
    if len(token_ids) > max_tokens:
        return ComposedAnswer(pieces[:max_tokens], token_ids[:max_tokens], "length")
    return ComposedAnswer(pieces, token_ids, "tool_calls" if calls else "stop", tuple(calls))


def _proquint(number: int) -> str:
    """Return 16 bits as a pronounceable word (arXiv 0901.4016)."""
    consonants, vowels = "bdfghjklmnprstvz", "aiou"
    return (
        consonants[number >> 12]
        + vowels[number >> 10 & 3]
        + consonants[number >> 6 & 15]
        + vowels[number >> 4 & 3]
        + consonants[number & 15]
    )


# -- JSON ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerPayloads:
    """The payloads of one answer, which share its id, its time (Unix seconds) and its model."""

    answer_id: str
    created: int
    model: str

    def completion(self, answer: ComposedAnswer, usage: Json) -> Json:
        """Return the whole answer."""
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": [_written(call) for call in answer.calls]}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return {**self._header("chat.completion"), "choices": [choice], "usage": usage}

    def delta(self, delta: Json, finish_reason: str | None = None) -> Json:
        """Return one chunk of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._header("chat.completion.chunk"), "choices": [choice], "usage": None}

    def call_deltas(self, calls: Sequence[ToolCall]) -> Iterator[Json]:
        """Yield the last chunks of a streamed answer with tool calls."""
        for number, call in enumerate(calls):
            yield self.delta({"tool_calls": [{"index": number, **_written(call)}]})
        yield self.delta({}, "tool_calls")

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk after the last delta: usage and no choices."""
        return {**self._header("chat.completion.chunk"), "choices": [], "usage": usage}

    def _header(self, kind: str) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _EMULATOR,
        }


def _written(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(use: CacheUse, completion_tokens: int, *, reports_writes: bool = False) -> Json:
    """Return the token counts of one answer; tokens that were read or written are part of the prompt's."""
    details = {"cached_tokens": use.read}
    if reports_writes:
        details["cache_write_tokens"] = sum(use.written)
    return {
        "prompt_tokens": use.tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": use.tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def model_list(model: str, context_limit: int, created: int) -> Json:
    """Return the list of the one model, with a description of what it is."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": _EMULATOR,
        "root": model,
        "parent": None,
        "max_model_len": context_limit,
        "description": "This is the warmprefix emulator: no model runs here and its answers mean nothing.",
    }
    return {"object": "list", "data": [card]}


def error(status: int, message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """Return a refusal; `param` is the path of the invalid field, and `code` the API's name for the refusal."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
