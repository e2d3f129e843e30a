"""References in the client's own bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from warmprefix_requests import prepared, read_call, restored, with_references

SEA = "Das Meer ist im Mittel 3.688 Meter tief – und überall salzig. " * 6


def body_of(texts: list[str], *, ascii_only: bool) -> bytes:
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        function = {"name": "read", "arguments": ""}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"{number}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"{number}", "content": text})
    return json.dumps({"messages": messages, "temperature": 1.50}, ensure_ascii=ascii_only).encode()


def sent_for(content: bytes) -> bytes:
    call = read_call("POST", "/v1/chat/completions", {}, content)
    assert call is not None
    sent = prepared(call, [with_references()]).content
    assert restored("chat", json.loads(sent)) == json.loads(content)
    return sent


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_clients_bytes_stay_around_references(ascii_only: bool) -> None:
    content = body_of([SEA, "short", SEA, SEA], ascii_only=ascii_only)
    text = json.dumps(SEA, ensure_ascii=ascii_only).encode()
    first, *others = content.split(text)
    sent = sent_for(content)
    assert sent.startswith(first + text + others[0])
    assert [sent.count(other) for other in others] == [content.count(other) for other in others]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_many_repeats_are_found_in_one_pass(ascii_only: bool) -> None:
    content = body_of([SEA] * 20_000, ascii_only=ascii_only)
    began = time.process_time()
    assert len(sent_for(content)) < len(content) / 2
    assert time.process_time() - began < 10  # with the square of their number, minutes


def test_texts_that_are_escaped_in_different_ways_cost_a_bounded_time() -> None:
    mixed = body_of([SEA] * 4_000, ascii_only=True).replace(b'"temperature"', '"überall"'.encode())
    began = time.process_time()
    sent_for(mixed)
    assert time.process_time() - began < 10
