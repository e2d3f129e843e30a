"""Records of any shape: request bodies with sender and usage, and prompts that were logged as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from warmprefix_requests.usage import token_usage
from warmprefix_tools.doctor.bodies import is_response_item
from warmprefix_tools.doctor.formats import UnreadableRecordError, as_object, format_of, parsed, plain_message
from warmprefix_tools.doctor.record_usage import record_usage

__all__ = [
    "KEYS",
    "FoundBody",
    "LoggedPrompt",
    "find_bodies",
    "is_answer",
    "is_unanswered",
    "parse_line",
    "seconds",
    "split_rendered",
]

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

_SESSION = ("session_id", "conversation_id", "thread_id", "chat_id", "litellm_session_id", "sessionId")
_USER = (
    *("user", "end_user", "user_id", "userId", "user_api_key_end_user_id", "user_api_key_user_id"),
    "safety_identifier",
)
_TENANT = (
    *("tenant", "tenant_id", "organization", "organization_id", "org_id", "customer_id", "team_id"),
    *("user_api_key_org_id", "user_api_key_team_id"),
)
_DETAILS = (
    *("metadata", "extra_body", "requester_metadata", "spend_logs_metadata"),
    *("model_parameters", "optional_params"),
)
_LATEST_SECONDS, _LATEST_MILLISECONDS = 1e11, 1e14
_ANSWER_TYPES = ("message", "message_start", "message_delta", "response.completed")
_TIMES = ("timestamp", "startTime", "start_time", "created_at", "time", "ts")


@dataclass(frozen=True, slots=True)
class FoundBody:
    """A request body, with its sender and usage from the fields around it."""

    body: _Json
    model: str | None
    salt: str | None
    tenant: str | None
    user: str | None
    session: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    seconds: float | None
    """Time of the request, since 1970."""
    key: str | None
    """Id that its answer has as well, if that is another record."""


def find_bodies(record: _Json) -> Iterator[FoundBody | UnreadableRecordError]:
    """Yield the chat and completion bodies in a record of any format, however they are wrapped.

    An error stands in place of a body whose texts were not logged.
    """
    for layers in _layers(record, 0):
        yield layers if isinstance(layers, UnreadableRecordError) else _found(layers)


def _found(layers: list[_Json]) -> FoundBody:
    body = dict(layers[-1])
    fields = [field for layer in reversed(layers) for field in (layer, *_details(layer))]  # the body's own first
    for name in ("tools", "functions"):  # LiteLLM's payloads have them in the model's parameters
        if not body.get(name):
            body[name] = next((each[name] for each in fields if each.get(name)), None)
    usage: dict[str, Any] = {}
    for layer in reversed(layers):  # the outermost wins
        usage = record_usage(layer, usage)
    tokens = token_usage(usage)
    return FoundBody(
        body,
        model=next((model for each in fields if isinstance(model := each.get("model"), str)), None),
        salt=_first(fields, ("cache_salt",)),
        tenant=_first(fields, _TENANT),
        user=_first(fields, _USER),
        session=_first(fields, _SESSION),
        prompt_tokens=tokens.prompt_tokens,
        cached_tokens=tokens.cached_tokens,
        seconds=next((time for layer in layers for name in _TIMES if (time := seconds(layer.get(name)))), None),
        key=_first(layers, KEYS),
    )


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


def _layers(record: _Json, depth: int) -> Iterator[list[_Json] | UnreadableRecordError]:
    """Yield, for each body in a record, the objects from the record down to it."""
    form = format_of(record)
    if depth > _MAX_DEPTH:
        return
    if form is not None:
        try:
            for inner in form.read(record):
                yield from _below(record, inner, depth)
        except UnreadableRecordError as error:
            yield error
        return
    for name in _WRAPPERS:
        wrapped = as_object(record.get(name))
        if wrapped is not None:
            found = list(_below(record, wrapped, depth))
            if found:
                yield from found
                return
    body = _as_body(record)
    if body is not None:
        yield [body]


def _below(record: _Json, inner: _Json, depth: int) -> Iterator[list[_Json] | UnreadableRecordError]:
    for layers in _layers(inner, depth + 1):
        yield layers if isinstance(layers, UnreadableRecordError) else [record, *layers]


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
    if "role" in value:
        return True
    message = plain_message(value)
    return "role" in message or "content" in message or is_response_item(message)


def _details(layer: _Json) -> Iterator[_Json]:
    """Yield the objects with details of a request, such as its metadata."""
    for name in _DETAILS:
        details = as_object(layer.get(name))
        if details is not None:
            yield details
            yield from _details(details)


def _first(fields: Sequence[_Json], names: tuple[str, ...]) -> str | None:
    for name in names:
        for each in fields:
            value = each.get(name)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)
    return None


_LINE = re.compile(
    r"\b(?:Received request|Request) (?P<id>\S+?)(?: details)?: (?=prompt: |prompt_token_ids: |params: )"
)
_PROMPT = r"prompt: (?:None\b|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))"
_FIRST = re.compile(_PROMPT, re.DOTALL)
_LAST = re.compile(rf", {_PROMPT}\.?\Z", re.DOTALL)
_TOKEN_IDS = re.compile(r"\bprompt_token_ids: \[(?P<ids>[\d, ]*)\]")

_MARKUPS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant)\|>\n?(?P<text>.*?)(?:<\|end\|>\n?|</s>\n?|(?=<\|\w+\|>)|\Z)", re.DOTALL
    ),
)
_ROLES = {"model": "assistant", "ipython": "tool"}


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """Contents of one log line; neither text nor token ids if vLLM logs no prompts."""

    id: str
    text: str | None
    token_ids: tuple[int, ...] | None


def parse_line(line: str) -> LoggedPrompt | None:
    r"""Read a line of any vLLM since 0.4; None if it is about something else.

    >>> parse_line("INFO 02-14 05:41:15 logger.py:39] Received request cmpl-7: prompt: 'Hi\\n', params: None")
    LoggedPrompt(id='cmpl-7', text='Hi\n', token_ids=None)

    Raises:
        ValueError: The line ends within the prompt.
    """
    if "equest " not in line:
        return None
    found = _LINE.search(line)
    if found is None:
        return None
    # Prompts and parameters can contain any text, also the names of the other fields.
    prompt = _FIRST.match(line, found.end()) or _LAST.search(line, found.end())
    text, behind = None, found.end()
    if prompt is not None:
        behind = prompt.end()
        if prompt["text"] is not None:
            text = ast.literal_eval(prompt["text"])
    elif line.startswith("prompt: ", found.end()):
        raise ValueError("the line ends within the prompt")
    ids = _TOKEN_IDS.search(line, behind)
    token_ids = tuple(map(int, ids["ids"].split(","))) if ids is not None and ids["ids"].strip() else None
    return LoggedPrompt(found["id"], text, token_ids)


def split_rendered(prompt: str) -> list[tuple[str, str]] | None:
    r"""Return role and text of each message of a rendered prompt; None if its markup is unknown.

    >>> split_rendered("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [('user', 'Hi')]
    """
    for markup in _MARKUPS:
        found = [(_ROLES.get(part["role"], part["role"]), part["text"]) for part in markup.finditer(prompt)]
        if found:
            return found[:-1] if found[-1] == ("assistant", "") else found  # the template opens the answer
    return None
