"""A stream is cut into its events, however the network cut it, and an answer is read from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_openai import EventSplitter, StreamedAnswer, WholeAnswer, event_data

LINE_ENDS = ("\n", "\r\n", "\r")
PAYLOADS = ['{"a": 1}', '{"text": "日本語 \u2028 ß 🎉"}', "[DONE]", "x" * 50]


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(places)]


@given(
    payloads=st.lists(st.sampled_from(PAYLOADS), min_size=1, max_size=6),
    end=st.sampled_from(LINE_ENDS),
    cuts=st.lists(st.integers(0, 1000), max_size=40),
)
def test_events_come_whole_however_the_stream_is_cut(payloads: list[str], end: str, cuts: list[int]) -> None:
    stream = "".join(f"event: x{end}data: {payload}{end}{end}" for payload in payloads).encode()
    splitter = EventSplitter()
    events = [event for piece in pieces_of(stream, cuts) for event in splitter.feed(piece)]
    rest = splitter.rest()
    assert b"".join(events) + rest == stream
    assert [event_data(event).decode() for event in events] == payloads
    assert rest in (b"", b"\n")  # a line feed that came after its carriage return's event had ended


@given(
    stream=st.lists(st.sampled_from([b"\n", b"\r", b"\n\n", b"\r\n", b"data: a", b": "]), max_size=30).map(b"".join),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
    most=st.sampled_from([4, 1_000]),
)
def test_joined_events_are_the_same_events(stream: bytes, cuts: list[int], most: int) -> None:
    apart, joined = EventSplitter(max_bytes=most), EventSplitter(max_bytes=most)
    held = b""
    for piece in pieces_of(stream, cuts):
        expected: list[bytes] = []
        held += piece
        while found := re.search(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r|\n)", held):
            expected.append(held[: found.end()])
            held = held[found.end() :]
        if len(held) > most:
            expected.append(held)
            held = b""
        assert apart.feed(piece) == expected
        assert joined.feed_joined(piece) == b"".join(expected)
    assert apart.rest() == joined.rest() == held


def test_an_event_that_is_too_long_is_given_out_in_parts_and_the_next_one_whole() -> None:
    splitter = EventSplitter(max_bytes=100)
    stream = b"data: " + b"x" * 1000 + b"\n\ndata: next\n\n"
    events = [event for i in range(0, len(stream), 7) for event in splitter.feed(stream[i : i + 7])]
    assert b"".join(events) + splitter.rest() == stream
    assert events[-1] == b"data: next\n\n"
    assert max(map(len, events)) <= 107


@given(cuts=st.lists(st.integers(0, 10_000), max_size=60), end=st.sampled_from(LINE_ENDS))
def test_only_the_usage_chunk_is_left_out(cuts: list[int], end: str) -> None:
    words = ["Wört", "日本", " 🎉"]
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}]
    chunks += [{"choices": [{"delta": {"content": word}}], "usage": None} for word in words]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None}]

    def written(chunks: list[dict[str, Any]]) -> bytes:
        lines = [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
        return "".join(f"data: {line}{end}{end}" for line in lines).encode()

    answer = StreamedAnswer(hide_usage=True)
    sent = written([*chunks, {"choices": [], "usage": usage}])
    passed = b"".join(answer.feed(piece) for piece in pieces_of(sent, cuts)) + answer.finish()
    # A cut between the two bytes of a line's end leaves the second in front of what follows, where it means nothing.
    assert [line for line in passed.splitlines() if line] == [line for line in written(chunks).splitlines() if line]
    assert (answer.facts.tokens[:2], answer.facts.started) == ((9, 4), True)


WORD = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}],"usage":null}\n\n'


@pytest.mark.parametrize("usage", [b'"usage":{"prompt_tokens":7}', b'"usage" : {"prompt_tokens":7}'])
@pytest.mark.parametrize("around", [(3, 0), (0, 3), (2, 2)])
def test_the_usage_is_read_and_hidden_among_words_that_come_with_it(usage: bytes, around: tuple[int, int]) -> None:
    answer = StreamedAnswer(hide_usage=True)
    assert answer.feed(WORD * 2) == WORD * 2
    before, behind = around
    chunk = WORD * before + b'data: {"choices":[],' + usage + b"}\n\n" + WORD * behind
    assert answer.feed(chunk) == WORD * (before + behind)
    assert answer.facts.tokens.prompt_tokens == 7


@pytest.mark.parametrize(
    ("event", "fact"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', "failed"),
        (b"event: error\ndata: {}\n\n", "failed"),
        (b"data: [DONE]\n\n", "ended"),
        (b'data: {"type":"response.completed","response":{}}\n\n', "ended"),
        (b'data: {"type":"response.failed","response":{}}\n\n', "failed"),
        (b'data: {"choices":[{"delta":{},"finish_reason": "stop"}]}\n\n', "complete"),
    ],
)
def test_an_event_that_matters_is_read_among_words_that_come_with_it(event: bytes, fact: str) -> None:
    answer = StreamedAnswer(hide_usage=True)
    answer.feed(WORD)
    chunk = WORD * 3 + event + WORD
    assert answer.feed(chunk) == chunk
    assert getattr(answer.facts, fact) is True


def test_an_answer_passes_as_it_comes_if_nothing_is_hidden() -> None:
    answer = StreamedAnswer(hide_usage=False)
    for piece in (b"da", b"ta: {", b'"choices": []}', b"\n"):
        assert answer.feed(piece) == piece
    assert answer.finish() == b""


@pytest.mark.parametrize(
    ("chunk", "begins"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": [1]}, False),
        ({"choices": [], "usage": None}, False),
        ({"choices": [{"delta": {"role": "assistant"}}], "usage": {"prompt_tokens": 3}}, False),
        ({"choices": [{"delta": {"content": "x"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "x"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, True),
        ({"choices": [{"text": "x"}]}, True),
        ({"choices": [{"text": ""}]}, False),
        ({"type": "response.created", "response": {"usage": None}}, False),
        ({"type": "response.output_text.delta", "delta": "x"}, True),
        ({"type": "response.output_text.delta", "delta": ""}, False),
        ({"type": "response.completed", "response": {}}, True),
    ],
)
def test_an_answer_starts_with_its_first_token(chunk: dict[str, Any], begins: bool) -> None:
    answer = StreamedAnswer(hide_usage=False)
    answer.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert answer.facts.started is begins


@pytest.mark.parametrize("make", [WholeAnswer, lambda: StreamedAnswer(hide_usage=True)])
@pytest.mark.parametrize(
    "payload",
    [
        b"no JSON",
        b"[" * 100_000,
        b"[1]",
        b"null",
        b"\xff\xfe\x00",
        b'{"usage": 7, "choices": 7, "prompt_token_ids": "x", "response": 7, "type": 7, "error": 0}',
        b'{"usage": {"prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": "many"}}, "choices": [7]}',
        b'{"usage": {"prompt_tokens": true, "prompt_tokens_details": null}, "choices": [{"delta": 7}]}',
    ],
)
def test_nonsense_gives_no_facts(make: Callable[[], Any], payload: bytes) -> None:
    answer = make()
    fed = payload if make is WholeAnswer else b"data: " + payload + b"\n\n"
    assert answer.feed(fed) + answer.finish() == fed
    facts = answer.facts
    assert (facts.tokens[:2], facts.prompt_token_ids, facts.failed) == ((None, None), None, False)


def test_the_usage_of_a_whole_answer_is_read_on_every_route() -> None:
    for payload in (
        {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, "prompt_token_ids": [1, 2]},
        {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, "prompt_token_ids": [1, 2]},
        {
            "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
            "choices": [{"prompt_token_ids": [1, 2]}],
        },
    ):
        answer = WholeAnswer()
        answer.feed(json.dumps(payload).encode())
        answer.finish()
        assert answer.facts.tokens[:2] == (9, 4)
        assert answer.facts.prompt_token_ids == [1, 2]


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "queued"])
def test_a_response_is_kept_once_it_has_ended_with_an_answer(status: str) -> None:
    response = {"object": "response", "id": "resp_1", "status": status, "output": []}
    begun = {"type": "response.created", "response": {**response, "status": "in_progress"}}
    end = {"type": f"response.{status}", "response": response}
    stream, whole = StreamedAnswer(hide_usage=False), WholeAnswer()
    for event in (begun, {"type": "response.output_text.delta", "delta": "a"}, end):
        assert stream.facts.response is None
        stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    whole.feed(json.dumps(response).encode())
    whole.finish()
    expected = response if status in ("completed", "incomplete") else None
    assert stream.facts.response == whole.facts.response == expected
    assert whole.facts.failed == (expected is None)


def test_an_answer_too_long_to_keep_passes_unread() -> None:
    answer = WholeAnswer()
    piece = b" " * (1024 * 1024)
    for _ in range(17):
        assert answer.feed(piece) == piece
    answer.finish()
    assert answer.facts.unread
