"""References that a model copies into its tool calls, on the way from a real engine's shapes to a real client."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tests.integrations.gateway.conftest import Handler, ScriptedUpstream, SeenRequest, answer, metric, send

from warmprefix_gateway import GatewayServer

anthropic = pytest.importorskip("anthropic")

Make = Callable[..., GatewayServer]
TEXT = 'The "sea" is 3,688 m deep\n\ton average – a \\ in it. ' * 12
REFERENCE = '[Word for word the result of the earlier call read({"path":"sea.txt"}).]'
FORGED = REFERENCE.replace("sea", "secret")
WRITTEN = {"path": "copy.txt", "content": f"[1] {REFERENCE}\n[2] {FORGED}", "mode": [1, 2]}
MEANT = {**WRITTEN, "content": f"[1] {TEXT}\n[2] {FORGED}"}
CALLS = {"first": WRITTEN, "second": {"path": "[Word for", "content": REFERENCE}}
MEANT_CALLS = {"first": MEANT, "second": {"path": "[Word for", "content": TEXT}}
READ = json.dumps({"path": "sea.txt"}, separators=(",", ":"))
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def request_of(route: str, **fields: Any) -> dict[str, Any]:
    """Return a request in which one file was read twice."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Copy the file."}]
    for id in ("call_1", "call_2"):
        if route == "chat":
            call = {"id": id, "type": "function", "function": {"name": "read", "arguments": READ}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": id, "content": TEXT})
        elif route == "messages":
            use = {"type": "tool_use", "id": id, "name": "read", "input": json.loads(READ)}
            messages.append({"role": "assistant", "content": [use]})
            result = {"type": "tool_result", "tool_use_id": id, "content": TEXT}
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"type": "function_call", "call_id": id, "name": "read", "arguments": READ})
            messages.append({"type": "function_call_output", "call_id": id, "output": TEXT})
    body = {"model": "m", "input" if route == "responses" else "messages": messages, **fields}
    return {**body, "max_tokens": 500} if route == "messages" else body


# -- answers -----------------------------------------------------------------------------------------------------------

USAGE = {
    "prompt_tokens": 900,
    "completion_tokens": 9,
    "total_tokens": 909,
    "prompt_tokens_details": {"cached_tokens": 800},
}
MESSAGES_USAGE = {
    "input_tokens": 100,
    "cache_read_input_tokens": 800,
    "cache_creation_input_tokens": 0,
    "output_tokens": 9,
}
RESPONSES_USAGE = {
    "input_tokens": 900,
    "output_tokens": 9,
    "total_tokens": 909,
    "input_tokens_details": {"cached_tokens": 800},
    "output_tokens_details": {"reasoning_tokens": 0},
}


def whole_answer(route: str, calls: dict[str, Any] = CALLS) -> dict[str, Any]:
    choice: dict[str, Any]
    head: dict[str, Any]
    texts = {name: json.dumps(arguments, ensure_ascii=False) for name, arguments in calls.items()}
    if route == "chat":
        made = [{"id": n, "type": "function", "function": {"name": n, "arguments": text}} for n, text in texts.items()]
        message = {"role": "assistant", "content": f"As {REFERENCE}", "tool_calls": made}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    if route == "messages":
        content = [{"type": "text", "text": f"As {REFERENCE}"}]
        content += [{"type": "tool_use", "id": n, "name": n, "input": arguments} for n, arguments in calls.items()]
        head = {"id": "x", "type": "message", "role": "assistant", "model": "m", "content": content}
        return {**head, "stop_reason": "tool_use", "stop_sequence": None, "usage": MESSAGES_USAGE}
    output = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": n, "name": n, "arguments": text, "status": "completed"}
        for n, text in texts.items()
    ]
    head = {"id": "x", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": output}
    rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": RESPONSES_USAGE}
    return {**head, **rest}


def cut(text: str, chance: random.Random, longest: int) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = chance.randint(1, longest)
        yield text[at : at + size]
        at += size


def chat_events(chance: random.Random, longest: int, calls: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in cut(f"As {REFERENCE}", chance, longest):
        yield chunk({"content": piece})
    for index, (name, arguments) in enumerate(calls.items()):
        function = {"name": name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": name, "type": "function", "function": function}]})
        for piece in cut(json.dumps(arguments), chance, longest):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, "tool_calls")
    yield {**chunk({}), "choices": [], "usage": USAGE}


def messages_events(chance: random.Random, longest: int, calls: dict[str, Any]) -> Iterator[dict[str, Any]]:
    head = {**whole_answer("messages"), "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": head}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for piece in cut(f"As {REFERENCE}", chance, longest):
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
    yield {"type": "content_block_stop", "index": 0}
    for index, (name, arguments) in enumerate(calls.items(), 1):
        block = {"type": "tool_use", "id": name, "name": name, "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for piece in cut(json.dumps(arguments, ensure_ascii=False), chance, longest):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}


def responses_events(chance: random.Random, longest: int, calls: dict[str, Any]) -> Iterator[dict[str, Any]]:
    whole = whole_answer("responses", calls)
    yield {"type": "response.created", "response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    for index, item in enumerate(whole["output"]):
        here = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        for piece in cut(item["arguments"], chance, longest):
            yield {"type": "response.function_call_arguments.delta", **here, "delta": piece}
        yield {"type": "response.function_call_arguments.done", **here, "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


EVENTS = {"chat": chat_events, "messages": messages_events, "responses": responses_events}


def stream_of(route: str, seed: int, longest: int, calls: dict[str, Any] = CALLS) -> bytes:
    """Return a stream with keep-alives between its events."""
    chance = random.Random(seed)
    events = EVENTS[route](chance, longest, calls)
    written: list[str] = []
    for number, event in enumerate(events):
        name = f"event: {event['type']}\n" if "type" in event else ""
        data = {**event, "sequence_number": number} if route == "responses" else event
        alive = chance.choice(["", "", "", ": keep-alive\n\n"])
        written.append(f"{name}data: {json.dumps(data)}\n\n{alive}")
    return "".join([*written, "data: [DONE]\n\n" if route == "chat" else ""]).encode()


def in_pieces(data: bytes, seed: int) -> Handler:
    """Return a handler that sends a stream in pieces that are no events."""

    async def handle(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        chance, at = random.Random(seed), 0
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        while at < len(data):
            size = chance.randint(1, 4_000)
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
            at += size
        writer.close()

    return handle


def received(gateway: GatewayServer, route: str, stream: bool) -> dict[str, Any]:
    """Return the arguments of the calls that a real client gets, by their names."""
    asked = request_of(route)
    if route == "messages":
        with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            if stream:
                with client.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**asked)
        assert message.content[0].text == f"As {REFERENCE}"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (100, 800)
        return {block.name: block.input for block in message.content[1:]}
    with openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        if route == "chat":
            if stream:
                with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                    answer: Any = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == f"As {REFERENCE}"
            assert answer.usage.prompt_tokens == 900
            calls = answer.choices[0].message.tool_calls
            return {call.function.name: json.loads(call.function.arguments) for call in calls}
        pieces: dict[str, str] = {}
        if stream:
            with client.responses.stream(**asked) as events:
                for event in events:
                    if event.type == "response.function_call_arguments.delta":
                        pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        assert answer.usage.input_tokens == 900
        assert all(pieces.get(item.id, item.arguments) == item.arguments for item in answer.output)
        return {item.name: json.loads(item.arguments) for item in answer.output}


@pytest.mark.parametrize("route", PATHS)
def test_a_client_gets_the_text_in_place_of_its_reference(
    upstream: ScriptedUpstream, gateway_of: Make, route: str
) -> None:
    gateway = gateway_of(upstream.base_url)
    upstream.handler = answer(json.dumps(whole_answer(route)).encode())
    assert received(gateway, route, stream=False) == MEANT_CALLS
    assert REFERENCE in json.dumps(json.loads(upstream.prompts[0].body), ensure_ascii=False).replace('\\"', '"')
    longest = (1, 7, 60, 100_000)
    for seed, length in enumerate(longest):
        upstream.handler = in_pieces(stream_of(route, seed, length), seed)
        assert received(gateway, route, stream=True) == MEANT_CALLS
    assert metric(gateway, "echoes_total", outcome="restored") == 2 * (1 + len(longest))
    assert metric(gateway, "echoes_total", outcome="unresolved") == 1 + len(longest)
    assert metric(gateway, "prompt_tokens_total") == 900 * (1 + len(longest))
    assert metric(gateway, "cached_tokens_total") == 800 * (1 + len(longest))
    assert metric(gateway, "failures_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", PATHS)
def test_an_answer_without_echoes_passes_as_it_came(
    upstream: ScriptedUpstream, gateway_of: Make, route: str, stream: bool
) -> None:
    calls = {"first": {"content": ["[", "[Word for word", FORGED, 1.50], "path": "[R"}}
    data = stream_of(route, 3, 100_000, calls) if stream else json.dumps(whole_answer(route, calls), indent=1).encode()
    upstream.handler = in_pieces(data, 5) if stream else answer(data)
    gateway = gateway_of(upstream.base_url)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = send(gateway, "POST", PATHS[route], json.dumps(request_of(route, **options)).encode())
    assert reply.body == data
    assert metric(gateway, "echoes_total", outcome="restored") == 0


@pytest.mark.parametrize("route", PATHS)
def test_an_application_may_have_echoes_refused(upstream: ScriptedUpstream, gateway_of: Make, route: str) -> None:
    gateway = gateway_of(upstream.base_url, echoes="refuse")
    body = json.dumps(request_of(route)).encode()
    upstream.handler = answer(json.dumps(whole_answer(route)).encode())
    reply = send(gateway, "POST", PATHS[route], body)
    assert reply.status == 502
    assert "copied a reference" in reply.json["error"]["message"]
    assert [metric(gateway, "requests_total", route=route, status=each) for each in ("200", "502")] == [0, 1]
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    for length in (9, 100_000):
        upstream.handler = in_pieces(stream_of(route, 1, length), 2)
        reply = send(gateway, "POST", PATHS[route], json.dumps(request_of(route, **asked)).encode())
        assert b"copied a reference" in reply.body
    assert metric(gateway, "echoes_total", outcome="refused") >= 4
    assert metric(gateway, "prompt_tokens_total") == 2_700  # clients of the SDKs may leave before the usage
    for length in (9, 100_000):
        upstream.handler = in_pieces(stream_of(route, 1, length), 2)
        kinds = anthropic.APIStatusError if route == "messages" else (openai.APIError, RuntimeError)
        # OpenAI's SDK hands the error event of a response on, and misses the end.
        with pytest.raises(kinds, match=r"copied a reference|response\.completed"):
            received(gateway, route, stream=True)
    upstream.handler = answer(json.dumps(whole_answer(route, {"first": {"path": FORGED}})).encode())
    assert send(gateway, "POST", PATHS[route], body).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br"])
@pytest.mark.parametrize("echoes", ["restore", "refuse", "pass"])
def test_answers_that_cannot_be_read_are_counted_or_refused(
    upstream: ScriptedUpstream, gateway_of: Make, echoes: str, encoding: str
) -> None:
    """Some proxies compress without being asked for it."""
    data = gzip.compress(json.dumps(whole_answer("chat")).encode())
    upstream.handler = answer(data, "200 OK", "application/json", f"content-encoding: {encoding}")
    gateway = gateway_of(upstream.base_url, echoes=echoes)
    for number in (1, 2):
        reply = send(gateway, "POST", PATHS["chat"], json.dumps(request_of("chat")).encode())
        if echoes == "refuse":
            assert (reply.status, "compressed" in reply.json["error"]["message"]) == (502, True)
        else:
            assert (reply.status, reply.body) == (200, data)
        assert metric(gateway, "echoes_total", outcome="unwatched") == (0 if echoes == "pass" else number)
    plain = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()
    assert send(gateway, "POST", PATHS["chat"], plain).body == data
    assert metric(gateway, "refused_total", reason="echo") == (2 if echoes == "refuse" else 0)


@pytest.mark.parametrize("echoes", ["restore", "refuse"])
def test_answers_that_wait_count_as_buffered(upstream: ScriptedUpstream, gateway_of: Make, echoes: str) -> None:
    body = json.dumps(request_of("chat")).encode()
    large = json.dumps(whole_answer("chat", {"first": {"path": "x" * 3_000}})).encode()
    gateway = gateway_of(upstream.base_url, echoes=echoes, max_buffered_bytes=len(body) + 2_500)
    for _ in range(3):
        upstream.handler = answer(large)
        reply = send(gateway, "POST", PATHS["chat"], body)
        assert (reply.status, reply.body == large) == ((200, True) if echoes == "restore" else (502, False))
        upstream.handler = answer(json.dumps(whole_answer("chat", {"first": {}})).encode())
        assert send(gateway, "POST", PATHS["chat"], body).status == 200
    assert metric(gateway, "echoes_total", outcome="unwatched") == 3
    assert metric(gateway, "prompt_tokens_total") == 900 * 6


@pytest.mark.parametrize("route", PATHS)
def test_an_application_may_have_echoes_passed(upstream: ScriptedUpstream, gateway_of: Make, route: str) -> None:
    gateway = gateway_of(upstream.base_url, echoes="pass")
    data = json.dumps(whole_answer(route)).encode()
    upstream.handler = answer(data)
    reply = send(gateway, "POST", PATHS[route], json.dumps(request_of(route)).encode())
    assert reply.body == data
    assert reply.headers["content-length"] == str(len(data))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", PATHS)
def test_an_answer_that_breaks_breaks_for_the_client(
    upstream: ScriptedUpstream, gateway_of: Make, route: str, stream: bool
) -> None:
    data = stream_of(route, 1, 30) if stream else json.dumps(whole_answer(route)).encode()
    kind = b"text/event-stream" if stream else b"application/json"

    async def handle(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ncontent-length: 100000\r\n\r\n"
        writer.write(head + data[: len(data) * 2 // 3])
        await writer.drain()
        writer.close()

    upstream.handler = handle
    gateway = gateway_of(upstream.base_url)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with pytest.raises(http.client.IncompleteRead):
        send(gateway, "POST", PATHS[route], json.dumps(request_of(route, **options)).encode())
    upstream.handler = answer(json.dumps(whole_answer(route)).encode())
    assert received(gateway, route, stream=False) == MEANT_CALLS


def test_free_text_of_a_custom_tool_is_restored_as_it_is(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    text = f"*** Begin Patch\n{REFERENCE}\n[Word"
    item = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "1", "name": "patch", "input": text}
    whole = {**whole_answer("responses"), "output": [item]}
    events: list[dict[str, Any]] = [
        *[{"type": "response.custom_tool_call_input.delta", "output_index": 0, "item_id": "ctc_1", "delta": piece}
          for piece in cut(text, random.Random(1), 5)],
        {"type": "response.custom_tool_call_input.done", "output_index": 0, "item_id": "ctc_1", "input": text},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]  # fmt: skip
    upstream.handler = in_pieces("".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode(), 1)
    reply = send(gateway, "POST", PATHS["responses"], json.dumps(request_of("responses", stream=True)).encode())
    seen = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    meant = text.replace(REFERENCE, TEXT)
    assert "".join(event["delta"] for event in seen if event["type"].endswith("input.delta")) == meant
    assert seen[-3]["input"] == seen[-2]["item"]["input"] == seen[-1]["response"]["output"][0]["input"] == meant
    assert metric(gateway, "echoes_total", outcome="restored") == 1


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [{"index": [1], "delta": {"tool_calls": [{"index": {}, "function": {"arguments": REFERENCE}}]}}]},
        {"choices": [7, {"delta": 7}, {"delta": {"tool_calls": 7, "function_call": 7}}, {"message": 7}], "output": 7},
        {"choices": {"arguments": 1}, "content": [7, {"type": "tool_use"}], "output": [{"type": ["arguments"]}]},
        {"type": "content_block_delta", "index": [], "delta": {"type": "input_json_delta", "partial_json": "[Wor"}},
        {"type": ["input_json_delta"], "item": 7},
        {"type": "response.function_call_arguments.delta", "output_index": {}, "delta": "[Word"},
        {"type": "response.output_item.done", "item": {"type": "function_call", "arguments": 7}},
    ],
)
def test_answers_of_other_shapes_pass_as_they_came(
    upstream: ScriptedUpstream, gateway_of: Make, payload: dict[str, Any]
) -> None:
    gateway = gateway_of(upstream.base_url)
    for route in PATHS:
        whole = json.dumps({**payload, "more": REFERENCE}).encode()
        upstream.handler = answer(whole)
        assert send(gateway, "POST", PATHS[route], json.dumps(request_of(route)).encode()).body == whole
        stream = b"data: " + whole + b"\n\ndata: {}\r\n\r\n: x\n\ndata: [DONE]\n\n"
        upstream.handler = in_pieces(stream, 1)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reply = send(gateway, "POST", PATHS[route], json.dumps(request_of(route, **options)).encode())
        assert reply.body.startswith(b"data: ")
        assert reply.status == 200
        assert reply.body.endswith(b"data: [DONE]\n\n")
