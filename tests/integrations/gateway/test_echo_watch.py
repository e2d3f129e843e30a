"""Copied references in the shapes in which engines answer, read without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warmprefix_gateway.echo_watch import EchoedAnswer
from warmprefix_openai import StreamedAnswer, WholeAnswer
from warmprefix_requests import Echoes, TextForm

REFERENCE = '[Word for word the result of the earlier call read({"path":"a"}).]'
TEXT = 'The "sea"\nis deep.'
ECHOES = Echoes({REFERENCE: TEXT})
WRITTEN = json.dumps({"content": REFERENCE})


def event(payload: dict[str, Any]) -> bytes:
    name = f"event: {payload['type']}\n" if "type" in payload else ""
    return f"{name}data: {json.dumps(payload)}\n\n".encode()


def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    return event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def passed(stream: bytes, size: int = 1 << 30) -> tuple[bytes, EchoedAnswer]:
    """Return what a client gets of a stream that comes in pieces of this size, and the reader."""
    reader = EchoedAnswer(StreamedAnswer(hide_usage=False), ECHOES, "restore")
    data = b"".join([reader.feed(stream[at : at + size]) for at in range(0, len(stream), size)])
    return data + reader.finish(), reader


def payloads(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]


SHAPES: dict[str, Any] = {
    "function": lambda piece: {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]},
    "custom": lambda piece: {"tool_calls": [{"index": 0, "custom": {"input": piece}}]},
    "function_call": lambda piece: {"function_call": {"arguments": piece}},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece_size", [1, 30, 40, len(WRITTEN) - 1, len(WRITTEN)])
def test_the_last_piece_may_come_with_the_reason_to_finish(shape: str, piece_size: int) -> None:
    """As vLLM, Mistral and Ollama send it."""
    form: TextForm = "plain" if shape == "custom" else "json"
    written = REFERENCE if shape == "custom" else WRITTEN
    for text in (written, f"{written} [Word for"):
        pieces = [text[at : at + piece_size] for at in range(0, len(text), piece_size)]
        chunks = [chunk(SHAPES[shape](piece)) for piece in pieces[:-1]]
        stream = b"".join([*chunks, chunk(SHAPES[shape](pieces[-1]), "tool_calls"), b"data: [DONE]\n\n"])
        seen, reader = passed(stream)
        choices = [payload["choices"][0] for payload in payloads(seen)]
        holders = [choice["delta"].get("tool_calls", [choice["delta"]])[0] for choice in choices]
        meant = ECHOES.in_text(text, form)
        assert ("".join(str(*holder[shape].values()) for holder in holders), reader.restored) == (meant.text, 1)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
        assert seen.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "begin", [b"", b": alive\n\n", b"\xef\xbb\xbf", b"\r\n\n", b"id: 1\n", b"event: x\r\n", b"retry: 3\n\n"]
)
@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_a_stream_that_calls_itself_json_passes_event_by_event(begin: bytes, size: int) -> None:
    first, call = chunk({"content": "hi"}), chunk(SHAPES["function"](WRITTEN), "tool_calls")
    end = event({"choices": [], "usage": {"prompt_tokens": 9}}) + b"data: [DONE]\n\n"
    reader = EchoedAnswer(WholeAnswer(), ECHOES, "restore")
    begun = begin + first
    assert b"".join([reader.feed(begun[at : at + size]) for at in range(0, len(begun), size)]) == begun
    assert reader.streams
    assert reader.facts.started
    seen = reader.feed(call + end) + reader.finish()
    assert (
        json.loads(payloads(seen)[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"])["content"]
        == TEXT
    )
    assert seen.endswith(end)
    assert (reader.restored, reader.facts.tokens.prompt_tokens) == (1, 9)


@pytest.mark.parametrize("content", [b"", b"  ", b"data", b'"data:"', b' {"data:": 1}', b"\xff:", b"\xef\xbb\xbf{}"])
def test_what_does_not_begin_like_a_stream_passes_when_it_is_whole(content: bytes) -> None:
    reader = EchoedAnswer(WholeAnswer(), ECHOES, "restore")
    assert b"".join([reader.feed(content[at : at + 1]) for at in range(len(content))]) == b""
    assert reader.finish() == content
    assert not reader.streams


@pytest.mark.parametrize("size", [1, 1_000])
@pytest.mark.parametrize("name", ["", "event: message\r\n"])
def test_the_first_event_may_have_a_byte_order_mark(size: int, name: str) -> None:
    mark = b"\xef\xbb\xbf" + name.encode()
    seen, reader = passed(mark + chunk(SHAPES["function"](WRITTEN)) + b"data: [DONE]\n\n", size)
    assert seen.startswith(mark + b"data: {")
    call = payloads(seen.removeprefix(mark))[0]["choices"][0]["delta"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"content": TEXT}
    assert reader.restored == 1


def test_a_block_may_start_with_its_whole_input() -> None:
    def block(kind: str, value: Any) -> bytes:
        content = {"type": kind, "id": "t", "name": "w", "input": value}
        return event({"type": "content_block_start", "index": 0, "content_block": content})

    stop = event({"type": "content_block_stop", "index": 0})
    seen, reader = passed(block("tool_use", {"content": [REFERENCE, 1.5]}) + stop)
    assert payloads(seen)[0]["content_block"]["input"] == {"content": [TEXT, 1.5]}
    assert (reader.restored, reader.refused) == (1, False)
    for same in (block("tool_use", {"n": [1.50, "[W"]}), block("server_tool_use", {"n": REFERENCE}), block("text", 7)):
        assert passed(same + stop)[0] == same + stop


def test_an_answer_that_is_too_large_is_refused_or_counted() -> None:
    pieces = [b'{"a":"', *[b"x" * (1 << 20)] * 17, b'"}']
    for handling in ("restore", "refuse"):
        reader = EchoedAnswer(WholeAnswer(), ECHOES, handling)
        seen = b"".join([*[reader.feed(piece) for piece in pieces], reader.finish()])
        assert reader.unwatched
        assert reader.refused == (handling == "refuse")
        assert seen == (b"" if reader.refused else b"".join(pieces))
