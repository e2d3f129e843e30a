"""Copied references in the shapes in which engines answer, read without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warmprefix.dedup import Echoes, TextForm
from warmprefix.openai import StreamedAnswer
from warmprefix_gateway.echo_watch import EchoedAnswer

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
