"""Formats of logs, in one table: how a record of each is recognised, and the requests that it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "FORMATS",
    "LogFormat",
    "UnreadableRecordError",
    "as_object",
    "format_of",
    "is_message",
    "parsed",
    "plain_message",
]

Json: TypeAlias = Mapping[str, Any]


class UnreadableRecordError(ValueError):
    """A record whose texts were not logged; the message names the setting that logs them."""


class LogFormat(NamedTuple):
    """A format of logs."""

    name: str
    recognise: Callable[[Json], object]
    """Returns a true value for a record of this format."""
    read: Callable[[Json], Iterable[Json]]
    """Returns records that are closer to request bodies; none if the record is about something else."""


def parsed(text: str) -> Any:
    """Return the value of a JSON text; None for other texts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_object(value: object) -> Json | None:
    """Return an object that may be written as JSON; None for other values."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parsed(value)
    return value if isinstance(value, Mapping) else None


def _objects(value: object) -> list[Json]:
    """Return the objects in a list that may be written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _at(value: object, *paths: str) -> Any:
    """Return the first true value at dotted paths of keys and indices; None if there is none.

    >>> _at({"outputs": [{"text": "Hi"}]}, "outputs.0.name", "outputs.0.text")
    'Hi'
    """
    for path in paths:
        found: Any = value
        for name in path.split("."):
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.lstrip("-").isdigit() and -len(found) <= int(name) < len(found):
                found = found[int(name)]
            else:
                found = None
        if found:
            return found
    return None


# -- OpenTelemetry: the GenAI conventions, OpenInference, OpenLLMetry, Vercel's AI SDK ---------------------------------


def _otlp(record: Json) -> Iterator[Json]:
    """Yield the spans of an OTLP export; log records become spans with events, by the span that wrote them."""
    for about, span in _leaves(record, "Spans", "spans"):
        attributes = about | _attributes(span.get("attributes"))
        yield {**span, "attributes": attributes, "time": _nanoseconds(span.get("startTimeUnixNano"))}
    spans: dict[str, tuple[Json, list[Json]]] = {}
    for about, each in _leaves(record, "Logs", "logRecords"):
        attributes = about | _attributes(each.get("attributes"))
        name = each.get("eventName") or attributes.get("event.name")
        body = _value(each.get("body"))
        if name == "gen_ai.client.inference.operation.details":
            yield {"attributes": attributes, "time": _nanoseconds(each.get("timeUnixNano"))}
        elif isinstance(body, Mapping):
            spans.setdefault(str(each.get("spanId")), (about, []))[1].append({"name": name, "attributes": body})
    for resource, events in spans.values():
        yield {"attributes": {**resource, "gen_ai.operation.name": "chat"}, "events": events}


def _leaves(record: Json, kind: str, leaf: str) -> Iterator[tuple[dict[str, Any], Json]]:
    """Yield the spans or log records of an OTLP export, each with the attributes of its resource."""
    for resource in _objects(record.get(f"resource{kind}")):
        about = _attributes(_at(resource, "resource.attributes"))
        for scope in _objects(resource.get(f"scope{kind}") or resource.get(f"instrumentationLibrary{kind}")):
            yield from ((about, each) for each in _objects(scope.get(leaf)))


def _nanoseconds(value: object) -> float | None:
    return int(value) / 1e9 if isinstance(value, str | int) and str(value).isdigit() else None


def _value(value: object) -> Any:
    """Return a value of OTLP, such as {"stringValue": "..."}, as it is written in JSON otherwise."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "intValue":
        return int(inner) if str(inner).lstrip("-").isdigit() else None
    if kind == "arrayValue":
        return list(map(_value, _at(inner, "values") or ()))
    if kind == "kvlistValue":
        return _attributes(_at(inner, "values"))
    return inner if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue") else value


def _attributes(value: object) -> dict[str, Any]:
    """Return attributes as one object: they may be OTLP's list of keys and values, or written as JSON."""
    if isinstance(value, list):
        return {str(each.get("key")): _value(each.get("value")) for each in _objects(value)}
    return dict(as_object(value) or {})


def _span_attributes(record: Json) -> dict[str, Any]:
    columns = {name.removeprefix("attributes."): record[name] for name in record if name.startswith("attributes.")}
    return _attributes(record.get("attributes")) | columns


def _is_span(record: Json) -> bool:
    attributes = _span_attributes(record)
    is_span = bool(attributes) and not record.keys().isdisjoint(("spanId", "span_id", "context", "traceId", "trace_id"))
    return is_span or any(name.partition(".")[0] in ("gen_ai", "llm", "openinference", "ai") for name in attributes)


def _tree(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as nested objects; parts of a name that are numbers make lists.

    >>> _tree({"llm.input_messages.0.message.role": "user"})
    {'llm': {'input_messages': [{'message': {'role': 'user'}}]}}
    """
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        *path, last = name.split(".")
        node: Any = tree
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = value
    return {name: _with_lists(value) for name, value in tree.items()}


def _with_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_lists(each) for each in value]
    if not isinstance(value, dict):
        return value
    if any("." in name for name in value):
        value = _tree(value)
    if value and all(name.isdigit() for name in value):
        return [_with_lists(value[name]) for name in sorted(value, key=int)]
    return {name: _with_lists(each) for name, each in value.items()}


_NO_PROMPT_KINDS = {"invoke_agent", "create_agent", "execute_tool", "embeddings", "retrieval", "invoke_workflow"}


def _span(record: Json) -> Iterator[Json]:
    attributes = _span_attributes(record)
    tree = _tree(attributes)
    kind = _at(tree, "openinference.span.kind")
    if str(_at(tree, "gen_ai.operation.name")) in _NO_PROMPT_KINDS or (kind is not None and str(kind).upper() != "LLM"):
        return
    events = [*_objects(record.get("events")), *_objects(attributes.get("events"))]
    whole = (_attributes(event.get("attributes")) for event in events)
    lists: list[object] = [
        *(_at(tree, name) for name in _MESSAGES),
        *(fields.get("gen_ai.input.messages") or fields.get("gen_ai.prompt") for fields in whole),
        list(_event_messages(events)),
    ]
    messages = next(filter(None, map(_objects, lists)), None)
    if any(isinstance(each, str) and each.startswith("[") and parsed(each) is None for each in lists):
        raise UnreadableRecordError(
            "a GenAI span with messages that are cut: raise OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT, or unset it"
        )
    text = _at(tree, "gen_ai.prompt")
    if not messages and not isinstance(text, str):
        if kind is None and _at(tree, "gen_ai.usage.input_tokens") is None:
            return  # a span around the calls, or about something else
        raise UnreadableRecordError(
            "a GenAI span without messages: set OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY, or the"
            " option of your instrumentation that logs contents"
        )
    instructions = _at(tree, "gen_ai.system_instructions")
    families = {name: tree[name] for name in ("gen_ai", "llm") if isinstance(tree.get(name), Mapping)}
    yield {
        **({"messages": messages} if messages else {"prompt": text}),
        "system": _objects(instructions) or instructions,
        "tools": list(_span_tools(tree)) or _at(as_object(_at(tree, "llm.invocation_parameters")), "tools"),
        "model": _at(tree, "gen_ai.request.model", "llm.model_name", "llm.request.model"),
        "usage": {**dict(_flat(families, "")), **(as_object(_at(tree, "ai.usage")) or {})},
        "session_id": _at(tree, "gen_ai.conversation.id", "session.id"),
        "user_id": _at(tree, "user.id", "enduser.id"),
        "metadata": tree.get("metadata"),
        "time": _at(record, "time", "start_time", "startTime"),
    }


_MESSAGES = ("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "ai.prompt.messages")


def _event_messages(events: Iterable[Json]) -> Iterator[Json]:
    """Yield the messages of events such as `gen_ai.user.message`, one event per message."""
    for event in events:
        name = str(event.get("event.name") or event.get("name"))
        if name.startswith("gen_ai.") and name.endswith(".message"):
            fields = _attributes(event.get("attributes")) or event
            yield {"role": name.split(".")[1], **{k: v for k, v in fields.items() if not k.startswith("event.")}}


def _span_tools(tree: Json) -> Iterator[object]:
    definitions = _at(tree, "gen_ai.tool.definitions", "llm.tools", "llm.request.functions", "ai.prompt.tools")
    if isinstance(definitions, str):
        definitions = parsed(definitions)
    for each in definitions if isinstance(definitions, list) else ():
        schema = _at(each, "tool.json_schema") or each
        yield as_object(schema) or schema


def _flat(tree: Json, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree by their full names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# -- LangSmith, LangChain, Langfuse, Gemini ----------------------------------------------------------------------------


def _langsmith(record: Json) -> Iterator[Json]:
    yield from _objects(record.get("child_runs"))
    if record.get("run_type") != "llm":
        return
    inputs, outputs, extra = (as_object(record.get(name)) or {} for name in ("inputs", "outputs", "extra"))
    messages, prompts = inputs.get("messages"), inputs.get("prompts")
    if messages and isinstance(messages, list) and isinstance(messages[0], list):  # one list per prompt of the call
        messages = messages[0]
    if not messages and not prompts:
        raise UnreadableRecordError("a LangSmith run without inputs: unset LANGSMITH_HIDE_INPUTS, and export inputs")
    answer = _at(outputs, "generations.0.0.message.kwargs")
    yield {
        **({"messages": messages} if messages else {"prompt": prompts}),
        "tools": inputs.get("tools") or _at(extra, "invocation_params.tools"),
        "model": _at(extra, "invocation_params.model", "metadata.ls_model_name"),
        "response": answer if _at(answer, "usage_metadata") else outputs,
        "metadata": extra.get("metadata"),
        "time": record.get("start_time"),
    }


_OTHER_OBSERVATIONS = {
    *("SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"),
}


def _page(record: Json) -> list[Json]:
    """Return the elements of a page, oldest first: APIs return the newest first."""
    elements = _objects(record.get("data")) or _objects(record.get("observations"))
    about = {name: record[name] for name in ("sessionId", "userId", "metadata") if record.get(name)}
    times = [_at(each, "startTime", "timestamp") for each in elements]
    if all(times):
        elements = [elements[index] for index in sorted(range(len(times)), key=lambda index: str(times[index]))]
    return [{**about, **element} for element in elements]


def _is_observation(record: Json) -> bool:
    return ("traceId" in record or "trace_id" in record) and isinstance(record.get("type"), str) and "input" in record


def _observation(record: Json) -> Iterator[Json]:
    if record["type"].upper() in _OTHER_OBSERVATIONS:
        return
    fields = {name: value for name, value in record.items() if name != "type"}
    text = record["input"]
    yield {**fields, "prompt": text} if isinstance(text, str) and text[:1] not in "[{" else fields


def _gemini(record: Json) -> Iterator[Json]:
    """Yield the body of a request to Gemini, as on the wire or as the arguments of its SDK."""
    contents = record["contents"]
    config = as_object(record.get("config")) or {}
    system = _at(record, *_SYSTEMS) or _at(config, *_SYSTEMS)
    yield {
        **{name: value for name, value in record.items() if name != "contents"},
        "messages": [_gemini_content(each) for each in (contents if isinstance(contents, list) else [contents])],
        "system": _at(system, "parts") or system,
        "tools": [
            declared
            for tool in _objects(record.get("tools") or config.get("tools"))
            for declared in _objects(tool.get("functionDeclarations") or tool.get("function_declarations")) or [tool]
        ],
    }


_SYSTEMS = ("systemInstruction", "system_instruction")


def _gemini_content(content: object) -> Json:
    if isinstance(content, Mapping):
        return content if "parts" in content else {"role": "user", "parts": [content]}
    return {"role": "user", "parts": [{"text": content}]}


def _refused(reason: str) -> Callable[[Json], Iterable[Json]]:
    def read(record: Json) -> Iterable[Json]:
        raise UnreadableRecordError(reason)

    return read


FORMATS = (
    LogFormat("OTLP", lambda record: "resourceSpans" in record or "resourceLogs" in record, _otlp),
    LogFormat("OpenTelemetry span", _is_span, _span),
    LogFormat("LangSmith run", lambda record: "run_type" in record and "inputs" in record, _langsmith),
    LogFormat(
        "LangChain prompt",
        lambda record: record.get("lc") == 1 and _at(record, "kwargs.messages"),
        lambda record: [record["kwargs"]],
    ),
    LogFormat("page", lambda record: _objects(record.get("data")) or _objects(record.get("observations")), _page),
    LogFormat("Langfuse observation", _is_observation, _observation),
    LogFormat("Gemini", lambda record: record.get("contents") and "messages" not in record, _gemini),
    LogFormat(
        "Claude Code's history",
        lambda record: "display" in record and "pastedContents" in record,
        _refused("what was typed into Claude Code; the prompts are in the transcripts, ~/.claude/projects/*/*.jsonl"),
    ),
    LogFormat(
        "Codex's history",
        lambda record: record.keys() == {"session_id", "ts", "text"},
        _refused("what was typed into Codex; the prompts are in the rollouts, ~/.codex/sessions/*/*/*/*.jsonl"),
    ),
)
"""The first that recognises a record reads it. What it returns may be of another format."""


def format_of(record: Json) -> LogFormat | None:
    """Return the format of a record; None for a body, or a record that wraps one."""
    return next((each for each in FORMATS if each.recognise(record)), None)


# -- messages ------------------------------------------------------------------------------------------------------


_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "choice": "assistant", "chat": "user"}


def plain_message(message: Json) -> Json:
    """Return a message in OpenAI's form; a message of another form as it is.

    Forms are those of LangChain (as `dumps` and `messages_to_dict` write them), of OpenInference, and of Gemini and
    OpenTelemetry, with `parts`.

    >>> plain_message({"role": "model", "parts": [{"text": "Hi"}]})
    {'role': 'assistant', 'content': [{'text': 'Hi'}]}
    >>> plain_message({"type": "human", "data": {"content": "Hi"}})
    {'role': 'user', 'content': 'Hi'}
    """
    if "role" in message and "content" in message:
        return message
    if message.get("lc") == 1 and isinstance(message.get("kwargs"), Mapping):
        name = str(_at(message, "id.-1")).removesuffix("Chunk").removesuffix("Message").lower()
        return _of_langchain(name, message["kwargs"])
    inner = message.get("message")
    if isinstance(inner, Mapping) and "role" in inner:
        return _of_openinference(inner)
    if isinstance(message.get("parts"), list):
        role = str(message.get("role") or "user")
        return {"role": _ROLES.get(role, role), "content": message["parts"]}
    kind = message.get("type")
    if isinstance(kind, str) and "role" not in message:
        name = kind.removesuffix("MessageChunk").lower()
        if isinstance(message.get("data"), Mapping):
            return _of_langchain(name, message["data"])
        if "content" in message and name in ("human", "ai", "system", "tool", "function", "chat"):
            return _of_langchain(name, message)
    return message


def is_message(record: object) -> bool:
    """Return whether a record is a message of a conversation."""
    message = plain_message(record) if isinstance(record, Mapping) else {}
    return isinstance(message.get("role"), str) and "content" in message


def _of_langchain(name: str, fields: Json) -> Json:
    calls = fields.get("tool_calls") or _at(fields, "additional_kwargs.tool_calls")
    role = str(fields.get("role") or _ROLES.get(name, name))
    plain = {"role": role, "content": fields.get("content")}
    return {**plain, "tool_calls": calls} if calls else plain


def _of_openinference(inner: Json) -> Json:
    contents = _objects(inner.get("contents"))
    parts = [each.get("message_content", each) for each in contents]
    calls = [each.get("tool_call", each) for each in _objects(inner.get("tool_calls"))]
    plain = {"role": inner["role"], "content": parts or inner.get("content")}
    return {**plain, "tool_calls": calls} if calls else plain
