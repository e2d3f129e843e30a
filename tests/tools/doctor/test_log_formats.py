"""Reading logs of tracing, of other APIs and of coding agents, in the shapes that their documentation has."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, messages_to_dict
from langchain_core.prompt_values import ChatPromptValue
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from tests.requests.wire.corpus import wire_requests

from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.log_reader import DoctorError, ReadLog, read_log
from warmprefix_tools.doctor.request_log import TOOLS, LogRequest

Json = dict[str, Any]
Read = Callable[..., ReadLog]

SYSTEM, QUESTION = "Be brief.", "What are tides?"
TEXTS = [("system", SYSTEM), ("user", QUESTION)]
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def run(*lines: Any, encoding: str = "utf-8") -> ReadLog:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / "log").write_bytes(text.encode(encoding))
        return read_log([tmp_path / "log"])

    return run


def texts(result: ReadLog, request: int = 0) -> list[tuple[str, str]]:
    messages = result.log.requests[request].messages
    return [(message.role, result.log.text(message)) for message in messages if message.role != TOOLS]


def only(result: ReadLog) -> LogRequest:
    assert (result.skipped, result.skipped_lines) == ([], 0)
    (request,) = result.log.requests
    return request


def tools(result: ReadLog, request: int = 0) -> Any:
    first = result.log.requests[request].messages[0]
    return json.loads(result.log.text(first)) if first.role == TOOLS else None


# -- OpenTelemetry -------------------------------------------------------------------------------------------------

PARTS = [{"role": "user", "parts": [{"type": "text", "content": QUESTION}]}]
GEN_AI = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "m",
    "gen_ai.conversation.id": "c",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": SYSTEM}]),
    "gen_ai.input.messages": json.dumps(PARTS),
    "gen_ai.tool.definitions": json.dumps([TOOL]),
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.cache_read.input_tokens": 64,
}
OPEN_LLMETRY = {
    "llm.request.type": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": SYSTEM,
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": QUESTION,
    "llm.request.functions.0.name": "look_up",
    "llm.request.functions.0.parameters": json.dumps(SCHEMA),
    "gen_ai.usage.prompt_tokens": 100,
    "gen_ai.usage.cache_read_input_tokens": 64,
    "session.id": "c",
}
OPEN_INFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": SYSTEM,
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": QUESTION,
    "llm.tools.0.tool.json_schema": json.dumps(TOOL),
    "llm.token_count.prompt": 100,
    "llm.token_count.prompt_details.cache_read": 64,
    "session.id": "c",
}
EVENTS = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "events": json.dumps(
        [
            {"event.name": "gen_ai.system.message", "content": SYSTEM, "role": "system"},
            {"event.name": "gen_ai.user.message", "content": QUESTION, "role": "user"},
            {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "Water."}},
        ]
    ),
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.details.cache_read_tokens": 64,
    "gen_ai.conversation.id": "c",
}
AI_SDK = {
    "operation.name": "ai.generateText.doGenerate",
    "gen_ai.request.model": "m",
    "ai.prompt.messages": json.dumps([MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": QUESTION}]}]),
    "gen_ai.usage.input_tokens": 100,
    "ai.usage.inputTokens": 100,
    "ai.usage.cachedInputTokens": 64,
    "session.id": "c",
}
SPANS = {
    "gen_ai": GEN_AI,
    "OpenLLMetry": OPEN_LLMETRY,
    "OpenInference": OPEN_INFERENCE,
    "message events": EVENTS,
    "AI SDK": AI_SDK,
}
OTHERS: list[Json] = [
    {"http.request.method": "POST", "url.full": "https://api.example.org"},
    {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": json.dumps(PARTS)},
    {"openinference.span.kind": "CHAIN", "input.value": QUESTION},
    {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look_up"},
]


def exported(attributes: list[Json], stream: Any) -> None:
    """Write spans as the SDK's own exporter does."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=stream)))
    tracer = provider.get_tracer("test")
    for each in attributes:
        with tracer.start_as_current_span("chat m", attributes=each):
            pass
    provider.shutdown()


def otlp(attributes: list[Json]) -> Json:
    """Return spans as the Collector's file exporter writes them."""

    def value(each: Any) -> Json:
        return {"stringValue": each} if isinstance(each, str) else {"intValue": str(each)}

    spans = [
        {
            "traceId": "5b8efff798038103d269b633813fc60c",
            "spanId": f"eee19b7ec3c1b1{number:02}",
            "name": "chat m",
            "startTimeUnixNano": str(1_790_000_000 * 10**9 + number),
            "attributes": [{"key": key, "value": value(each)} for key, each in one.items()],
        }
        for number, one in enumerate(attributes)
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {}, "spans": spans}]}]}


def check_span(result: ReadLog, *, with_tools: bool) -> None:
    request = only(result)
    assert texts(result) == TEXTS
    assert (request.model, request.session) == ("m", "c")
    assert (request.reported_prompt_tokens, request.reported_cached_tokens) == (100, 64)
    assert request.seconds is not None
    assert ("look_up" in json.dumps(tools(result))) == with_tools


@pytest.mark.parametrize("name", SPANS)
def test_spans_of_the_sdk_are_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / "spans").open("w") as stream:
        exported([*OTHERS, SPANS[name]], stream)
    check_span(read_log([tmp_path / "spans"]), with_tools=name in ("gen_ai", "OpenLLMetry", "OpenInference"))


@pytest.mark.parametrize("name", SPANS)
def test_otlp_is_read(read: Read, name: str) -> None:
    check_span(read(otlp([*OTHERS, SPANS[name]])), with_tools=name in ("gen_ai", "OpenLLMetry", "OpenInference"))


@pytest.mark.parametrize("name", SPANS)
def test_spans_with_columns_or_nested_attributes_are_read(read: Read, name: str) -> None:
    """As in rows of a data frame, and in JSON where values are not written as texts."""
    columns = {f"attributes.{key}": value for key, value in SPANS[name].items()}
    check_span(read({"start_time": "2026-09-01T10:00:00Z", **columns}), with_tools=name[:3] in ("gen", "Ope"))
    values = {key: json.loads(v) if isinstance(v, str) and v[0] in "[{" else v for key, v in SPANS[name].items()}
    span = {"name": "chat m", "startTime": "2026-09-01T10:00:00Z", "attributes": values}
    check_span(read(span), with_tools=name[:3] in ("gen", "Ope"))


def test_tool_messages_of_spans_keep_their_texts(read: Read) -> None:
    messages = [
        *PARTS,
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look_up", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "It is deep."}]},
    ]
    result = read({"attributes": {**GEN_AI, "gen_ai.input.messages": json.dumps(messages)}})
    roles = [role for role, _ in texts(result)]
    assert roles == ["system", "user", "assistant", "tool"]
    assert "look_up" in texts(result)[2][1]
    assert texts(result)[3][1] == "It is deep."


def test_log_records_of_one_span_are_one_request(read: Read) -> None:
    def record(span: str, name: str, body: Json) -> Json:
        values = [{"key": key, "value": {"stringValue": value}} for key, value in body.items()]
        return {"spanId": span, "eventName": name, "body": {"kvlistValue": {"values": values}}}

    records = [
        record(span, f"gen_ai.{role}.message", {"content": f"{role} of {span}"})
        for role in ("system", "user")
        for span in ("a", "b")
    ]
    result = read({"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": records}]}]})
    assert texts(result, 0) == [("system", "system of a"), ("user", "user of a")]
    assert texts(result, 1) == [("system", "system of b"), ("user", "user of b")]


def test_spans_without_texts_name_the_setting(read: Read) -> None:
    bare = {key: value for key, value in GEN_AI.items() if key not in ("gen_ai.input.messages",)}
    with pytest.raises(DoctorError, match="OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"):
        read({"attributes": bare})
    cut = {**GEN_AI, "gen_ai.input.messages": json.dumps(PARTS)[:40]}
    with pytest.raises(DoctorError, match="cut: raise OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"):
        read({"attributes": cut})
    assert read(otlp([cut, GEN_AI])).skipped_lines == 1, "one bad span costs no other"


# -- LangChain, LangSmith, Langfuse, Gemini ------------------------------------------------------------------------

CHAIN = [
    SystemMessage(SYSTEM),
    HumanMessage([{"type": "text", "text": QUESTION}]),
    AIMessage("", tool_calls=[{"name": "look_up", "args": {"name": "tide"}, "id": "c1", "type": "tool_call"}]),
    ToolMessage("It is deep.", tool_call_id="c1"),
]


def check_chain(result: ReadLog) -> None:
    found = texts(result, -1)
    assert result.skipped_lines == 0
    assert [role for role, _ in found] == ["system", "user", "assistant", "tool"]
    assert found[:2] == TEXTS
    assert "look_up" in found[2][1]
    assert found[3][1] == "It is deep."


@pytest.mark.parametrize(
    "record",
    [
        dumps(CHAIN),
        dumps(ChatPromptValue(messages=CHAIN)),
        json.dumps({"messages": json.loads(dumps(CHAIN))}),
        json.dumps({"messages": messages_to_dict(CHAIN)}),
        json.dumps({"input": [message.model_dump() for message in CHAIN]}),
    ],
    ids=["list", "prompt", "messages", "dicts", "models"],
)
def test_dumps_of_langchain_are_read(read: Read, record: str) -> None:
    check_chain(read(record))


def test_conversation_as_a_document_has_a_request_per_answer(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(dumps([*CHAIN, AIMessage("Water.")], pretty=True))
    result = read_log([tmp_path / "dump.json"])
    assert [len(request.messages) for request in result.log.requests] == [2, 4]
    (tmp_path / "dump.json").write_text(dumps(CHAIN, pretty=True))
    assert [len(request.messages) for request in read_log([tmp_path / "dump.json"]).log.requests] == [2, 4]


def langsmith(messages: Any, **more: Any) -> Json:
    kwargs = {"usage_metadata": {"input_tokens": 100, "output_tokens": 3, "input_token_details": {"cache_read": 64}}}
    return {
        "id": "7b1f",
        "name": "ChatOpenAI",
        "run_type": "llm",
        "start_time": "2026-09-01T10:00:00.000000",
        "inputs": {"messages": messages},
        "outputs": {"generations": [[{"message": {"lc": 1, "type": "constructor", "kwargs": kwargs}}]]},
        "extra": {"invocation_params": {"model": "m", "tools": [TOOL]}, "metadata": {"thread_id": "c"}},
        **more,
    }


def test_runs_of_langsmith_are_read(read: Read) -> None:
    chain = {"id": "1", "run_type": "chain", "inputs": {"input": QUESTION}, "outputs": {}}
    result = read(chain, langsmith([json.loads(dumps(CHAIN))]))
    check_chain(result)
    request = only(result)
    assert (request.model, request.session) == ("m", "c")
    assert (request.reported_prompt_tokens, request.reported_cached_tokens) == (100, 64)
    assert tools(result) == [TOOL]
    nested = read({**chain, "child_runs": [langsmith(MESSAGES), langsmith(MESSAGES)]})
    assert [texts(nested, number) for number in range(2)] == [TEXTS, TEXTS]
    with pytest.raises(DoctorError, match="LANGSMITH_HIDE_INPUTS"):
        read(langsmith(None, inputs={}))


def test_pages_of_langfuse_are_read_oldest_first(read: Read) -> None:
    def observation(minute: int, kind: str = "GENERATION") -> Json:
        return {
            "id": str(minute),
            "traceId": "t",
            "type": kind,
            "startTime": f"2026-09-01T10:{minute:02}:00.000Z",
            "input": [MESSAGES[0], {"role": "user", "content": f"Question {minute}"}],
            "output": {"role": "assistant", "content": "Water."},
            "model": "m",
            "usageDetails": {"input": 36, "input_cached_tokens": 64, "output": 3, "total": 103},
        }

    page = {"data": [observation(3), observation(2, "AGENT"), observation(1)], "meta": {"page": 1, "totalItems": 3}}
    result = read(page)
    assert [texts(result, number)[1][1] for number in range(2)] == ["Question 1", "Question 3"]
    assert {request.reported_prompt_tokens for request in result.log.requests} == {100}
    assert {request.reported_cached_tokens for request in result.log.requests} == {64}
    trace = {"id": "t", "sessionId": "s", "userId": "u", "input": MESSAGES, "observations": page["data"]}
    both = read(trace)
    assert [(request.session, request.user) for request in both.log.requests] == [("s", "u")] * 2


GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"text": QUESTION}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look_up", "args": {"name": "tide"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look_up", "response": {"result": "deep"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": SYSTEM}]},
    "tools": [{"functionDeclarations": [{"name": "look_up", "parameters": SCHEMA}]}],
}


@pytest.mark.parametrize(
    "record",
    [
        GEMINI,
        {"request": GEMINI, "response": {"usageMetadata": {"promptTokenCount": 9}}},
        {
            "model": "m",
            "contents": GEMINI["contents"],
            "config": {"system_instruction": SYSTEM, "tools": GEMINI["tools"]},
        },
    ],
    ids=["body", "pair", "arguments"],
)
def test_bodies_of_gemini_are_read(read: Read, record: Json) -> None:
    result = read(record)
    assert only(result)
    found = texts(result)
    assert [role for role, _ in found] == ["system", "user", "assistant", "user"]
    assert found[:2] == TEXTS
    assert "look_up" in found[2][1]
    assert "deep" in found[3][1]
    assert [tool["name"] for tool in tools(result)] == ["look_up"]


def test_input_of_responses_may_be_a_text(read: Read) -> None:
    assert texts(read({"model": "m", "input": QUESTION})) == [("user", QUESTION)]
    assert texts(read({"model": "m", "input": QUESTION, "instructions": SYSTEM})) == TEXTS
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"model": "m", "input": QUESTION}}
    assert texts(read(batch)) == [("user", QUESTION)]
    with pytest.raises(DoctorError):
        read({"model": "text-embedding-3-small", "input": QUESTION})


@pytest.mark.parametrize("order", [1, -1])
def test_results_of_a_batch_belong_to_their_requests(read: Read, order: int) -> None:
    asked = [{"custom_id": f"r{n}", "body": {"model": "m", "messages": MESSAGES}} for n in range(2)]
    asked.append({"custom_id": "a", "params": {"model": "m", "max_tokens": 9, "messages": MESSAGES}})

    def result(key: str, cached: int) -> Json:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}
        return {"id": "b", "custom_id": key, "response": {"status_code": 200, "body": {"usage": usage}}, "error": None}

    usage = {"input_tokens": 4, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 6}
    message = {"type": "message", "role": "assistant", "content": [], "usage": usage}
    results = [
        result("r0", 16),
        result("r1", 32),
        {"custom_id": "a", "result": {"type": "succeeded", "message": message}},
    ]
    found = read(*asked, *results[::order])
    assert [request.reported_cached_tokens for request in found.log.requests] == [16, 32, 90]
    assert found.skipped_lines == 0
    with pytest.raises(DoctorError, match="results of a batch without its requests, 3"):
        read(*results)


# -- transcripts of coding agents ----------------------------------------------------------------------------------


class ClaudeCode:
    """Writes lines as Claude Code does."""

    def __init__(self, session: str = "s") -> None:
        self.session = session
        self.lines: list[Json] = []
        self.parent: str | None = None

    def add(self, kind: str, *, parent: str | None = None, **fields: Any) -> str:
        uuid = f"{self.session}-{len(self.lines)}"
        line = {"parentUuid": parent or self.parent, "isSidechain": False, "userType": "external", "uuid": uuid}
        line |= {"sessionId": self.session, "type": kind, "timestamp": f"2026-09-01T10:{len(self.lines):02}:00.000Z"}
        self.lines.append({**line, **fields})
        self.parent = uuid
        return uuid

    def user(self, content: Any, **fields: Any) -> str:
        return self.add("user", message={"role": "user", "content": content}, **fields)

    def answer(self, key: str, *blocks: Json, cached: int = 0, **fields: Any) -> str:
        """Add one line per block, each with the usage of the whole answer."""
        usage = {"input_tokens": 4, "cache_creation_input_tokens": 500, "cache_read_input_tokens": cached}
        for block in blocks:
            message = {
                "id": key,
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [block],
                "usage": usage,
            }
            self.add("assistant", message=message, requestId=f"req-{key}", **fields)
        return str(self.parent)


def text(content: str) -> Json:
    return {"type": "text", "text": content}


def tool_use(key: str) -> Json:
    return {"type": "tool_use", "id": key, "name": "Read", "input": {"file_path": "a.py"}}


def tool_result(key: str, content: str) -> list[Json]:
    return [{"type": "tool_result", "tool_use_id": key, "content": content}]


def shown(result: ReadLog) -> list[str]:
    """Return the texts of each request, in one line each."""
    return [" | ".join(content for _, content in texts(result, number)) for number in range(len(result.log.requests))]


def test_transcripts_of_claude_code_are_read(read: Read) -> None:
    code = ClaudeCode()
    code.lines.append({"type": "summary", "summary": "Tides", "leafUuid": "u"})
    code.lines.append({"type": "file-history-snapshot", "messageId": "m", "snapshot": {}})
    code.user("Why?")
    first = code.answer("m1", {"type": "thinking", "thinking": "Hm"}, tool_use("t1"), cached=100)
    second = code.answer("m1", tool_use("t2"), cached=100)
    code.user(tool_result("t1", "deep"), parent=first)
    code.user(tool_result("t2", "wide"), parent=second)
    code.add("system", subtype="turn_duration", durationMs=5)
    code.answer("m2", text("Because."), cached=600)
    code.add("assistant", message={"role": "assistant", "model": "<synthetic>", "content": [text("API Error")]})
    code.user("And now?")
    code.answer("m3", text("Now."), cached=1100)
    result = read(*code.lines)
    calls = "Hm\n<tool_call>"
    assert result.skipped_lines == 0
    found = shown(result)
    assert found[0] == "Why?"
    assert found[1].startswith(f"Why? | {calls}")
    assert found[1].count("<tool_call>") == 2
    assert found[1].endswith("deep | wide")
    assert found[2] == f"{found[1]} | Because. | And now?"
    assert [request.reported_cached_tokens for request in result.log.requests] == [100, 600, 1100]
    assert [request.reported_prompt_tokens for request in result.log.requests] == [604, 1104, 1604]
    assert {(request.model, request.session) for request in result.log.requests} == {("m", "s")}
    assert any("Claude Code" in note and "the system prompt and the tools" in note for note in result.notes)


def test_branches_of_claude_code_have_their_own_histories(read: Read) -> None:
    code = ClaudeCode()
    code.user("Why?")
    back = code.answer("m1", text("Because."))
    code.user("Really?")
    code.answer("m2", text("Yes."))
    code.user("How?", parent=back)  # rewound
    code.answer("m3", text("So."))
    side: Json = {"isSidechain": True, "agentId": "a1"}
    main = code.parent
    code.parent = None
    code.user("Search.", **side)
    code.answer("m4", text("Found."), **side)
    code.parent = None
    code.add("system", subtype="compact_boundary", logicalParentUuid=main, content="Conversation compacted")
    code.user("This session continues: tides.", isCompactSummary=True)
    code.answer("m5", text("Go on."))
    expected = [
        "Why?",
        "Why? | Because. | Really?",
        "Why? | Because. | How?",
        "Search.",
        "This session continues: tides.",
    ]
    assert shown(read(*code.lines)) == expected
    resumed = [{**line, "sessionId": "other"} for line in code.lines]
    assert shown(read(*code.lines, *resumed)) == expected, "an answer that is copied to another file counts once"


def rollout() -> Iterator[Json]:
    def line(kind: str, **payload: Any) -> Json:
        return {"timestamp": "2026-09-01T10:00:00.000Z", "type": kind, "payload": payload}

    def item(kind: str, **payload: Any) -> Json:
        return line("response_item", type=kind, **payload)

    def item_of(role: str, content: str) -> Json:
        kind = "output_text" if role == "assistant" else "input_text"
        return item("message", role=role, content=[{"type": kind, "text": content}])

    def tokens(prompt: int, cached: int) -> Json:
        last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": 9, "total_tokens": prompt + 9}
        return line("event_msg", type="token_count", info={"last_token_usage": last, "total_token_usage": last})

    yield line("session_meta", id="s", cwd="/src", cli_version="0.169.0", base_instructions={"text": SYSTEM})
    yield item_of("developer", "Rules.")
    yield line("turn_context", cwd="/src", model="m", approval_policy="never")
    yield line("event_msg", type="user_message", message=QUESTION)
    yield item_of("user", QUESTION)
    yield line("event_msg", type="token_count", info=None, rate_limits={})
    yield item("reasoning", summary=[], encrypted_content="gAAA")
    yield item("function_call", name="exec_command", arguments="{}", call_id="c1")
    yield tokens(900, 0)
    yield item("function_call_output", call_id="c1", output="deep")
    yield item_of("assistant", "Water.")
    yield tokens(1000, 896)
    yield tokens(1000, 896)
    yield line("compacted", message="", replacement_history=[item_of("user", "Summary.")["payload"]])
    yield item_of("user", "Go on.")
    yield item_of("assistant", "Done.")
    yield tokens(500, 128)


def test_rollouts_of_codex_are_read(read: Read) -> None:
    result = read(*rollout())
    assert result.skipped_lines == 0
    found = shown(result)
    assert found[0] == f"{SYSTEM} | Rules. | {QUESTION}"
    assert found[1].startswith(found[0])
    assert found[1].endswith("| deep")
    assert found[2] == f"{SYSTEM} | Summary. | Go on."
    requests = result.log.requests
    assert [request.reported_prompt_tokens for request in requests] == [900, 1000, 500]
    assert [request.reported_cached_tokens for request in requests] == [0, 896, 128]
    assert {(request.model, request.session) for request in requests} == {("m", "s")}


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"display": "Why?", "pastedContents": {}, "timestamp": 1, "project": "/src"}, r"~/\.claude/projects"),
        ({"session_id": "s", "ts": 1, "text": "Why?"}, r"~/\.codex/sessions"),
        ({"severity": "info", "text": "x"}, "its fields are: severity, text"),
        (otlp(OTHERS), "Records without a prompt: OTLP, 1"),
    ],
)
def test_message_for_a_log_without_requests_names_what_was_found(read: Read, record: Json, advice: str) -> None:
    with pytest.raises(DoctorError, match=advice):
        read(record)


def mutated(value: Any, dice: random.Random) -> Any:
    """Return a value with parts left out, repeated, or replaced by others of any type."""
    if dice.random() < 0.06:
        return dice.choice(
            [None, True, 0, -1, 1e300, "", "x", "[", "{", '[{"role": 1}]', "\ud800", [], {}, [None], {"": 1}]
        )
    if isinstance(value, dict):
        return {name: mutated(each, dice) for name, each in value.items() if dice.random() > 0.06}
    if isinstance(value, list):
        kept = [mutated(each, dice) for each in value if dice.random() > 0.06]
        return kept * dice.choice([1, 1, 1, 2])
    return value


@given(seed=st.integers(0, 2**32))
def test_no_record_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever a record has at a place, it is read or counted, and the log is examined."""
    dice = random.Random(seed)
    code = ClaudeCode()
    code.user("Why?")
    code.answer("m1", tool_use("t1"), cached=5)
    code.user(tool_result("t1", "deep"))
    code.answer("m2", text("Because."))
    spans = [{"attributes": each} for each in SPANS.values()]
    requests = [entry.body for entry in wire_requests()]
    shapes = [*code.lines, *rollout(), *spans, otlp(list(SPANS.values())), langsmith(MESSAGES), GEMINI, *requests]
    path = tmp_path_factory.getbasetemp() / "mutated.jsonl"
    lines = [json.dumps(mutated(each, dice)) for each in [*dice.sample(shapes, 12), *code.lines, *rollout()]]
    path.write_text("\n".join([*lines, json.dumps({"messages": MESSAGES})]))
    report = diagnose(read_log([path]))
    assert report.requests >= 1
    assert report.hit_ratio <= report.repaired_hit_ratio <= report.bound_ratio <= 1


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_encodings_are_recognised(tmp_path: Path, encoding: str, indent: int | None, packed: bool) -> None:
    content = json.dumps(
        {"messages": [{"role": "user", "content": "Caf\u00e9 \u6d77?"}]}, ensure_ascii=False, indent=indent
    )
    data = ((content + "\r\n") * (1 if indent else 2)).encode(encoding)
    (tmp_path / "log").write_bytes(gzip.compress(data) if packed else data)
    result = read_log([tmp_path / "log"])
    assert texts(result) == [("user", "Caf\u00e9 \u6d77?")]
    assert (len(result.log.requests), result.skipped_lines) == (1 if indent else 2, 0)


def test_objects_over_several_lines_may_follow_each_other(tmp_path: Path) -> None:
    one = json.dumps({"messages": MESSAGES}, indent=1)
    (tmp_path / "log").write_text('{"data": [' + ", ".join([one] * 2) + "]}\n" + one)
    assert len(read_log([tmp_path / "log"]).log.requests) == 3


# -- cut logs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mark",
    [
        "... (litellm_truncated 12982 chars)",
        "<truncated due to size exceeding limit>",
        "redacted-by-litellm",
        "__REDACTED__",
        "[REDACTED]",
        "[REDACTED_EMAIL]",
        "<truncated>",
    ],
)
def test_cut_logs_are_named_as_cut(read: Read, mark: str) -> None:
    rules = "Follow the rules of the house. " * 60

    def body(number: int, *, cut: bool) -> Json:
        system = f"It is 10:{number:02}:11.\n{rules}{mark if cut else ''}"
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": f"q{number}"}]}

    report = diagnose(read(*[body(number, cut=number % 2 == 0) for number in range(12)]))
    assert any("6 requests of 12 have texts that were cut or masked" in note for note in report.notes)
    clean = diagnose(read(*[body(number, cut=False) for number in range(12)]))
    assert clean.notes == ()
