"""Finding the request body in a record, and in what surrounds it who sent it and what the engine counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Found", "answer_usage", "find_body", "is_answer"]

_Json = Mapping[str, object]

_WRAPPERS = (
    "proxy_server_request",  # LiteLLM keeps what the client sent here; the fields beside it are its own
    "body",
    "request",
    "request_body",
    "requestBody",
    "raw_request",
    "raw_request_body",
    "standard_logging_object",
    "litellm_params",
    "kwargs",
    "payload",
    "data",
    "input",
    "json",
    "params",
)
_ANSWERS = ("response", "chunks", "output", "completion", "events", "usage", "original_response")
_DEEPEST = 4

_SESSION = ("session_id", "conversation_id", "thread_id", "chat_id", "litellm_session_id", "sessionId")
_USER = (
    "user",
    "end_user",
    "user_id",
    "userId",
    "user_api_key_end_user_id",
    "user_api_key_user_id",
    "safety_identifier",
)
_TENANT = (
    "tenant",
    "tenant_id",
    "organization",
    "organization_id",
    "org_id",
    "customer_id",
    "team_id",
    "user_api_key_org_id",
    "user_api_key_team_id",
)
_SALT = ("cache_salt",)
_ASIDE = ("metadata", "extra_body", "requester_metadata", "spend_logs_metadata", "model_parameters", "optional_params")


@dataclass(frozen=True, slots=True)
class Found:
    """A request body, and what its surroundings say."""

    body: _Json
    session: str | None
    user: str | None
    tenant: str | None
    salt: str | None
    prompt_tokens: int | None
    cached_tokens: int | None


def find_body(record: _Json) -> Found | None:
    """The chat or completion body in a record, however it is wrapped; None if there is none."""
    layers = _layers(record, 0)
    if layers is None:
        return None
    body = dict(layers[-1])
    asides = [aside for layer in reversed(layers) for aside in (layer, *_asides(layer))]
    for name in ("tools", "functions"):  # LiteLLM's payloads have them in the model's parameters
        if not body.get(name):
            body[name] = next((aside[name] for aside in asides if aside.get(name)), None)
    if not isinstance(body.get("model"), str):
        body["model"] = next((aside["model"] for aside in asides if isinstance(aside.get("model"), str)), None)
    prompt_tokens = cached_tokens = None
    for layer in reversed(layers):
        for usage in _usages(layer):
            prompt_tokens, cached_tokens = usage
    return Found(
        body,
        session=_named(asides, _SESSION),
        user=_named(asides, _USER),
        tenant=_named(asides, _TENANT),
        salt=_named(asides, _SALT),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def is_answer(record: _Json) -> bool:
    """Whether a record is an answer or a chunk of one: it belongs to the request before it."""
    return str(record.get("object", "")).endswith(("completion", "completion.chunk")) or (
        "choices" in record and "messages" not in record
    )


def answer_usage(record: _Json) -> tuple[int, int] | None:
    """Prompt tokens and cached ones that an answer reports, if it does."""
    return next(_usages({"response": record}), None)


def _layers(record: _Json, depth: int) -> list[_Json] | None:
    """From the record down to the body."""
    for name in _WRAPPERS:
        inner = _as_object(record.get(name))
        if inner is not None and depth < _DEEPEST:
            layers = _layers(inner, depth + 1)
            if layers is not None:
                return [record, *layers]
    messages = record.get("messages")
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = _parsed(messages)
        record = {**record, "messages": messages}
    if isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
        return [record]
    asked = record.get("input")  # in Langfuse's exports, and in OpenAI's Responses
    if isinstance(asked, str) and asked.lstrip().startswith("["):
        asked = _parsed(asked)
    if isinstance(asked, list) and asked and all(isinstance(item, Mapping) and "role" in item for item in asked):
        return [{**record, "messages": asked}]
    prompt = record.get("prompt")
    if isinstance(prompt, str | list) and not isinstance(messages, list):
        return [record]
    return None


def _as_object(value: object) -> _Json | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value)
    return value if isinstance(value, Mapping) else None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _asides(layer: _Json) -> Iterator[_Json]:
    for name in _ASIDE:
        aside = _as_object(layer.get(name))
        if aside is not None:
            yield aside
            yield from _asides(aside)


def _named(asides: list[_Json], names: tuple[str, ...]) -> str | None:
    for name in names:
        for aside in asides:
            value = aside.get(name)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)
    return None


def _usages(layer: _Json) -> Iterator[tuple[int, int]]:
    for name in _ANSWERS:
        answer = _parsed(value) if isinstance(value := layer.get(name), str) else value
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, str):
                one = _parsed(one.removeprefix("data:").strip())
            if not isinstance(one, Mapping):
                continue
            inner = one.get("body")
            usage = (
                one
                if name == "usage"
                else one.get("usage") or (inner.get("usage") if isinstance(inner, Mapping) else None)
            )
            if isinstance(usage, Mapping):
                details = usage.get("prompt_tokens_details")
                total = usage.get("prompt_tokens")
                cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
                if isinstance(total, int) and isinstance(cached, int):
                    yield total, cached
