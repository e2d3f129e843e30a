"""Records of any shape: request bodies with sender and usage, and prompts that were logged as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from warmprefix_openai import StreamedAnswer
from warmprefix_requests.usage import reported_usage, token_usage
from warmprefix_tools.doctor.bodies import is_response_item
from warmprefix_tools.doctor.formats import UnreadableRecordError, as_object, format_of, parsed, plain_message

__all__ = ["KEYS", "FoundBody", "LoggedPrompt", "find_bodies", "is_answer", "is_unanswered", "parse_line", "seconds"]

_Json = Mapping[str, object]

_WRAPPERS = (
    "proxy_server_request",  # LiteLLM keeps the client's request here, next to fields of its own
    *("body", "request", "request_body", "requestBody", "raw_request", "raw_request_body", "standard_logging_object"),
    *("full_request", "litellm_params", "kwargs", "payload", "data", "input", "json", "params"),
)
_MAX_DEPTH = 7
_NO_PROMPT = {"encoding_format", "dimensions", "voice", "documents"}
"""Fields of requests for embeddings, speech and ranking, whose `input` is no prompt."""
KEYS = ("custom_id", "key")
"""Names of the id that a request and its answer share in the files of a batch."""

_SENDERS = {
    "salt": ("cache_salt",),
    "tenant": (
        *("tenant", "tenant_id", "organization", "organization_id", "org_id", "customer_id", "team_id"),
        *("user_api_key_org_id", "user_api_key_team_id"),
    ),
    "user": (
        *("user", "end_user", "user_id", "userId", "user_api_key_end_user_id", "user_api_key_user_id"),
        "safety_identifier",
    ),
    "session": ("session_id", "conversation_id", "thread_id", "chat_id", "litellm_session_id", "sessionId"),
}
"""For each field of a `LogRequest`, its names in records."""
_DETAILS = (
    *("metadata", "extra_body", "requester_metadata", "spend_logs_metadata"),
    *("model_parameters", "optional_params"),
)
_TIMES = ("timestamp", "startTime", "start_time", "created_at", "time", "ts")
_LATEST_SECONDS, _LATEST_MILLISECONDS = 1e11, 1e14
_ANSWER_TYPES = ("message", "message_start", "message_delta", "response.completed")
_ANSWERS = ("response", "chunks", "output", "completion", "events", "original_response")


class FoundBody(NamedTuple):
    """A request body, with its sender and usage from the fields around it."""

    body: _Json
    fields: dict[str, Any]
    """Fields of its `LogRequest`."""
    key: str | None
    """Id that its answer has as well, if that is another record."""


def find_bodies(record: _Json, skip: Callable[[Exception], None]) -> Iterator[FoundBody]:
    """Yield the chat and completion bodies in a record of any format, however they are wrapped.

    `skip` is called for each body whose texts were not logged.
    """
    for layers in _layers(record, 0, skip):
        body = dict(layers[-1])
        fields = [field for layer in reversed(layers) for field in (layer, *_details(layer))]  # the body's own first
        for name in ("tools", "functions"):  # LiteLLM's payloads have them in the model's parameters
            body[name] = next((each[name] for each in fields if each.get(name)), None)
        usage: dict[str, Any] = {}
        for layer in reversed(layers):  # the outermost wins
            usage = _record_usage(layer, usage)
        tokens = token_usage(usage)
        yield FoundBody(
            body,
            {
                **{field: _first(fields, names) for field, names in _SENDERS.items()},
                "model": next((model for each in fields if isinstance(model := each.get("model"), str)), None),
                "reported_prompt_tokens": tokens.prompt_tokens,
                "reported_cached_tokens": tokens.cached_tokens,
                "seconds": next((time for each in layers for n in _TIMES if (time := seconds(each.get(n)))), None),
            },
            _first(layers, KEYS),
        )


def _record_usage(record: _Json, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage that a record reports next to its request, added to what was found before.

    It stands in an answer in one piece, in the events of a stream, as objects or text, or in a field of its own.
    """
    for name in _ANSWERS:
        answer = record.get(name)
        for one in answer if isinstance(answer, list) else [answer]:
            event = _parsed_answer(one.removeprefix("data:")) if isinstance(one, str) else one
            for each in event if isinstance(event, list) else [event]:
                usage = reported_usage(each, usage)
    return reported_usage(record, usage)


def _parsed_answer(text: str) -> object:
    value = parsed(text)
    if value is not None:
        return value
    reader = StreamedAnswer(hide_usage=False)
    reader.feed(text.encode("utf-8", "replace"))
    reader.finish()
    return {"usage": reader.facts.usage}


def seconds(time: object) -> float | None:
    """Return a time as seconds since 1970; it may be in milliseconds, or in the words of ISO 8601."""
    if isinstance(time, str):
        try:
            moment = datetime.fromisoformat(time.strip().replace("Z", "+00:00"))
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time < _LATEST_MILLISECONDS:
        return None
    return time / 1_000 if time > _LATEST_SECONDS else float(time)


def is_answer(record: _Json) -> bool:
    """Return whether a record is an answer or a chunk of one, and belongs to the request before it."""
    if "messages" in record or "input" in record:
        return False
    name = str(record.get("object") or record.get("type") or "")
    return "choices" in record or name.endswith(("completion", "completion.chunk", "response")) or name in _ANSWER_TYPES


def is_unanswered(record: _Json) -> bool:
    """Return whether the request of a record was refused, or reached no upstream: no engine computed it."""
    status = record.get("status")
    is_error = isinstance(status, int) and status >= 300
    return is_error or record.get("outcome") == "unanswered" or (status == "failure" and "response_cost" in record)


def _layers(record: _Json, depth: int, skip: Callable[[Exception], None]) -> Iterator[list[_Json]]:
    """Yield, for each body in a record, the objects from the record down to it."""
    if depth > _MAX_DEPTH:
        return
    form = format_of(record)
    if form is not None:
        try:
            for inner in form.read(record):
                yield from ([record, *layers] for layers in _layers(inner, depth + 1, skip))
        except UnreadableRecordError as error:
            skip(error)
        return
    for name in _WRAPPERS:
        wrapped = as_object(record.get(name))
        if wrapped is not None and (found := list(_layers(wrapped, depth + 1, skip))):
            yield from ([record, *layers] for layers in found)
            return
    body = _as_body(record)
    if body is not None:
        yield [body]


def _as_body(record: _Json) -> _Json | None:
    """Return a record that is a body itself, with its list of messages or its prompt; None for others."""
    messages, items = record.get("messages"), record.get("input")  # the latter in OpenAI's Responses, and in Langfuse
    for value in (messages, items):
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = parsed(value)
        if isinstance(value, list) and (value or value is messages) and all(map(_is_item, value)):
            return {**record, "messages": value}
    if isinstance(items, str) and _asks_a_model(record):
        return {**record, "messages": [{"role": "user", "content": items}]}
    if isinstance(record.get("prompt"), str | list) and not isinstance(messages, list):
        return record
    return None


def _asks_a_model(record: _Json) -> bool:
    """Return whether a record with an input is for a language model, and not for embeddings, speech or ranking."""
    model = str(record.get("model", "" if "instructions" in record else "embed")).lower()
    return _NO_PROMPT.isdisjoint(record) and "embed" not in model and "moderation" not in model


def _is_item(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    message = value if "role" in value else plain_message(value)
    return "role" in message or "content" in message or is_response_item(message)


def _details(layer: _Json) -> Iterator[_Json]:
    """Yield the objects with details of a request, such as its metadata."""
    for name in _DETAILS:
        details = as_object(layer.get(name))
        if details is not None:
            yield details
            yield from _details(details)


def _first(fields: Sequence[_Json], names: tuple[str, ...]) -> str | None:
    values = (each.get(name) for name in names for each in fields)
    found = (value for value in values if isinstance(value, str | int) and not isinstance(value, bool) and value != "")
    return next(map(str, found), None)


# -- lines of vLLM -----------------------------------------------------------------------------------------------------

_LINE = re.compile(
    r"\b(?:Received request|Request) (?P<id>\S+?)(?: details)?: (?=prompt: |prompt_token_ids: |params: )"
)
_PROMPT = r"prompt: (?:None\b|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))"
_FIRST = re.compile(_PROMPT, re.DOTALL)
_LAST = re.compile(rf", {_PROMPT}\.?\Z", re.DOTALL)
_TOKEN_IDS = re.compile(r"\bprompt_token_ids: \[(?P<ids>[\d, ]*)\]")


class LoggedPrompt(NamedTuple):
    """Contents of one log line; neither text nor token ids if vLLM logs no prompts."""

    id: str
    text: str | None
    token_ids: list[int] | None


def parse_line(line: str) -> LoggedPrompt | None:
    r"""Read a line of any vLLM since 0.4; None if it is about something else.

    >>> parse_line("INFO 02-14 05:41:15 logger.py:39] Received request cmpl-7: prompt: 'Hi\\n', params: None")
    LoggedPrompt(id='cmpl-7', text='Hi\n', token_ids=None)

    Raises:
        ValueError: The line ends within the prompt.
    """
    found = _LINE.search(line) if "equest " in line else None
    if found is None:
        return None
    # Prompts and parameters can contain any text, also the names of the other fields.
    prompt = _FIRST.match(line, found.end()) or _LAST.search(line, found.end())
    if prompt is None and line.startswith("prompt: ", found.end()):
        raise ValueError("the line ends within the prompt")
    text = ast.literal_eval(prompt["text"]) if prompt is not None and prompt["text"] is not None else None
    ids = _TOKEN_IDS.search(line, found.end() if prompt is None else prompt.end())
    token_ids = [*map(int, ids["ids"].split(","))] if ids is not None and ids["ids"].strip() else None
    return LoggedPrompt(found["id"], text, token_ids)
