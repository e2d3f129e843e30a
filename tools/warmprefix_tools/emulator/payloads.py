"""The JSON that goes out, in OpenAI's shapes as vLLM fills them; it says that it comes from an emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warmprefix_tools.emulator.config import EmulatorConfig

__all__ = ["AnswerPayloads", "Json", "error", "model_list", "usage"]

Json = dict[str, Any]

_EMULATOR = "warmprefix-emulator"


@dataclass(frozen=True, slots=True)
class AnswerPayloads:
    """The payloads of one answer, which share its id, its time (Unix seconds) and its model."""

    answer_id: str
    created: int
    model: str

    def completion(self, text: str, finish_reason: str, usage: Json) -> Json:
        """Give the whole answer."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._header("chat.completion"), "choices": [choice], "usage": usage}

    def delta(self, delta: Json, finish_reason: str | None = None) -> Json:
        """Give one chunk of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._header("chat.completion.chunk"), "choices": [choice], "usage": None}

    def usage_chunk(self, usage: Json) -> Json:
        """Give the chunk behind the last delta: usage and no choices."""
        return {**self._header("chat.completion.chunk"), "choices": [], "usage": usage}

    def _header(self, kind: str) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _EMULATOR,
        }


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    """Count one answer's tokens; the cached ones are among the prompt's."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def model_list(config: EmulatorConfig, created: int) -> Json:
    """List the one model there is, and say what it is."""
    card = {
        "id": config.model,
        "object": "model",
        "created": created,
        "owned_by": _EMULATOR,
        "root": config.model,
        "parent": None,
        "max_model_len": config.context_limit,
        "description": "This is the warmprefix emulator: no model runs here and its answers mean nothing.",
    }
    return {"object": "list", "data": [card]}


def error(status: int, message: str, kind: str, param: str | None = None) -> Json:
    """Describe a refusal; `param` is the path of the field at fault."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
