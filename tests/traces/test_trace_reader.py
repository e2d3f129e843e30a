"""`read_trace`: what it accepts, and a `TraceError` with place and reason for everything else."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.errors import MissingExtraError, TraceError, WarmprefixError
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace, TraceRequest

HEADER: dict[str, Any] = {"name": "day", "k": 3, "source": "here", "licence": "none", "chunk_tokens": "record"}
BLOCKS: list[dict[str, Any]] = [{"block": 0, "tokens": 5}, {"block": "b", "tokens": 0, "ref": "x/1", "text": "..."}]
FIRST: dict[str, Any] = {"request": 0, "conversation": None, "turn": 0, "query_tokens": 9, "blocks": ["b", 0]}
SECOND: dict[str, Any] = {
    "request": "two",
    "conversation": "c",
    "turn": 1,
    "query_tokens": 0,
    "blocks": [0],
    "scores": [1.5],
    "scope": "s",
    "t": 2.5,
    "k": 1,
    "gold": [0, "elsewhere", 0],
    "sys_blocks": [7, 8],
}
LINES: list[dict[str, Any]] = [HEADER, *BLOCKS, FIRST, SECOND]


def written(path: Path, *lines: object, end: str = "\n") -> Path:
    """Write a file of these lines: objects as JSON, strings and bytes unchanged."""
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + end.encode())
    return path


def problem(path: Path, *, limit: int | None = None) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, limit)
    assert isinstance(caught.value, WarmprefixError)
    message = str(caught.value)
    place = f"{path}: " if caught.value.line is None else f"{path}, line {caught.value.line}: "
    assert message.startswith(place)
    return message.removeprefix(f"{path}")


# -- what is read --------------------------------------------------------------------------------------------------


def test_read_trace_returns_every_field(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "day.jsonl", *LINES))
    assert trace == Trace(
        name="day",
        requests=(
            TraceRequest(0, ("b", 0), None, 0, 9),
            TraceRequest("two", (0,), "c", 1, 0, (1.5,), "s", 2.5, 1, (0, "elsewhere")),
        ),
        tokens={0: 5, "b": 0},
        k=3,
        header=HEADER,
        texts={"b": "..."},
    )


@pytest.mark.parametrize("name", ["day.jsonl", "day.jsonl.gz", "day"])
@pytest.mark.parametrize("packed", [False, True])
def test_gzip_is_detected_by_content_not_by_name(tmp_path: Path, name: str, packed: bool) -> None:
    plain = written(tmp_path / "plain", *LINES)
    data = plain.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)
    assert read_trace(tmp_path / name) == read_trace(str(plain))


def test_concatenated_gzip_members_are_read(tmp_path: Path) -> None:
    pieces = [gzip.compress(json.dumps(line).encode() + b"\n") for line in LINES]
    (tmp_path / "day.gz").write_bytes(b"".join(pieces))
    assert len(read_trace(tmp_path / "day.gz").requests) == 2


def test_blocks_may_be_declared_between_requests_and_again(tmp_path: Path) -> None:
    late = {"block": "late", "tokens": 1}
    trace = read_trace(
        written(
            tmp_path / "t",
            HEADER,
            BLOCKS[1],
            {"request": 0, "blocks": ["b"]},
            late,
            BLOCKS[1],
            late,
            {"request": 1, "blocks": ["late", "b"]},
        )
    )
    assert [request.blocks for request in trace.requests] == [("b",), ("late", "b")]


def test_only_blocks_in_requests_have_a_length(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path / "t", HEADER, *BLOCKS, {"request": 0, "blocks": [0]})).tokens == {0: 5}


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n  \n\t\n"])
def test_the_last_line_needs_no_newline(tmp_path: Path, end: str) -> None:
    assert len(read_trace(written(tmp_path / "t", *LINES, end=end)).requests) == 2


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(line).encode() for line in LINES))
    assert len(read_trace(tmp_path / "t").requests) == 2


def test_optional_fields_have_defaults(tmp_path: Path) -> None:
    trace = read_trace(
        written(tmp_path / "my.run.jsonl.gz", {}, {"block": 1, "tokens": 1}, {"request": 0, "blocks": [1]})
    )
    assert (trace.name, trace.k, trace.header) == ("my.run", None, {})
    assert trace.requests == (TraceRequest(0, (1,)),)


def test_missing_turns_are_counted(tmp_path: Path) -> None:
    lines = [{"request": n, "conversation": n % 2, "blocks": []} for n in range(5)]
    assert [request.turn for request in read_trace(written(tmp_path / "t", HEADER, *lines)).requests] == [1, 1, 2, 2, 3]


def test_lines_of_gold_add_to_their_request_wherever_they_stand(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path / "t",
            *LINES[:-1],
            {"request": "two", "gold": ["b"]},
            SECOND,
            {"request": "two", "gold": ["b", "cited"]},
            {"request": "of another trace", "gold": [0]},
            {"request": 0, "gold": []},
        )
    )
    assert [request.gold for request in trace.requests] == [(), ("b", 0, "elsewhere", "cited")]


def test_of_two_blocks_with_one_text_the_first_stands_for_both(tmp_path: Path) -> None:
    texts = {"a": "The sky is blue.", "b": "The sea is deep.", "c": "The sky is blue.", "d": " \n", "e": ""}
    trace = read_trace(
        written(
            tmp_path / "t",
            HEADER,
            *({"block": id, "tokens": 4, "text": text} for id, text in texts.items()),
            {"request": 0, "blocks": ["b", "c", "a", "d", "e"], "scores": [5, 4, 3, 2, 1], "gold": ["c"]},
            {"request": 1, "blocks": ["c"]},
        )
    )
    assert [request.blocks for request in trace.requests] == [("b", "a", "d", "e"), ("a",)]
    assert trace.requests[0].scores == (5.0, 4.0, 2.0, 1.0)
    assert trace.requests[0].gold == ("a",)
    assert [trace.block(id).text for id in "ab"] == ["The sky is blue.", "The sea is deep."]
    assert len({trace.block(id).text.strip() for id in "abde"}) == 4


def test_lines_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t", *LINES, "rubbish")
    assert len(read_trace(path, limit=2).requests) == 2
    assert read_trace(path, limit=1).tokens == {0: 5, "b": 0}
    assert problem(path, limit=3).startswith(", line 6: not JSON")
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        read_trace(path, limit=0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def request(**changes: object) -> dict[str, Any]:
    return {**FIRST, **changes}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"request": 0, "blocks": [}', r"not JSON: .* at column 27; got .*request"),
        ('{"request": 0 "blocks": []}', r"not JSON"),
        (b'{"request": "\xff"}', r"not UTF-8: byte 0xff at column 14"),
        ("{'request': 0}", r"not JSON"),
        ("[1, 2]", r"each line must be a JSON object, got \[1, 2\]"),
        ("null", r"each line must be a JSON object, got null"),
        ('{"request": 0, "blocks": [], "t": NaN}', r"not JSON"),
        ('{"request": 0, "blocks": [], "t": -Infinity}', r"not JSON"),
        ('{"request": 0, "blocks": [], "t": 1e999}', r"t must be seconds, a finite number.*, got Infinity"),
        ('{"request": "\\ud800", "blocks": []}', r"not JSON"),
        ("[" * 100_000, r"not JSON"),
        (HEADER, r'neither "block" nor "request" in \["chunk_tokens", .*only the first line is a header'),
        ({"query": 3, "text": "Why?"}, r"a query with its text, .* a bundle of texts, not a trace"),
        ({"block": 2, "tokens": 1, "request": 0}, r'both "block" and "request"'),
        ({"block": 2}, r"tokens is missing; it must be an integer from 0 to 1000000000"),
        ({"block": 2, "tokens": -3}, r"tokens must be an integer from 0 to 1000000000, got -3"),
        ({"block": 2, "tokens": 10**30}, r"tokens must be an integer from 0 to 1000000000, got 1000000"),
        ('{"block": 2, "tokens": 1' + 5000 * "0" + "}", r"(not JSON: number|tokens must be an integer)"),
        ({"block": 2, "tokens": True}, r"tokens must be an integer .*, got true"),
        ({"block": 2, "tokens": 2.0}, r"tokens must be an integer .*, got 2.0"),
        ({"block": 2, "tokens": "2"}, r'tokens must be an integer .*, got "2"'),
        ({"block": 2, "tokens": None}, r"tokens must be an integer .*, got null"),
        ({"block": None, "tokens": 2}, r"block must be a string or an integer, got null"),
        ({"block": False, "tokens": 2}, r"block must be a string or an integer, got false"),
        ({"block": 0, "tokens": 6}, r"block 0 has 6 tokens here and 5 on line 2; a block has one length"),
        (request(request=1.5), r"request must be a string or an integer, got 1.5"),
        ({"request": 0}, r"blocks is missing; it must be a list"),
        (request(blocks=None), r"blocks must be a list of strings and integers, got null"),
        (request(blocks="b"), r'blocks must be a list of strings and integers, got "b"'),
        (request(blocks=["b", True]), r"blocks must be .*, got true at place 1"),
        (request(blocks=[["b"]]), r'blocks must be .*, got \["b"\] at place 0'),
        (request(blocks=["b", 0, "b"]), r'block "b" comes twice in blocks; a request names a block once'),
        (
            request(blocks=["0"]),
            r'block "0" is in blocks, but no line above declares it: {"block": "0", "tokens": ...}',
        ),
        (request(conversation=1.0), r"conversation must be a string, an integer or null, got 1.0"),
        (request(turn=-1), r"turn must be an integer, 0 or more, or null, got -1"),
        (request(turn=True), r"turn must be .*, got true"),
        (request(query_tokens=-1), r"query_tokens must be an integer from 0 to 1000000000, got -1"),
        (request(scores=[1.0]), r"1 scores for 2 blocks; there must be one per block, or none"),
        (request(scores=[1.0, "high"]), r'scores must be a list of finite numbers, got "high" at place 1'),
        (request(scores=[1, True]), r"scores must be a list of finite numbers, got true at place 1"),
        ('{"request": 9, "blocks": [0], "scores": [1e999]}', r"scores .*, got Infinity at place 0"),
        (request(scores=None), r"scores must be a list of finite numbers, got null"),
        (request(k=0), r"k must be an integer, 1 or more, or null, got 0"),
        (request(gold="Paris"), r'gold must be a list of strings and integers, got "Paris"'),
        ({"request": 0, "gold": [0.5]}, r"gold must be a list of strings and integers, got 0.5 at place 0"),
        ({"block": "b", "tokens": 0, "text": 3}, r"text must be a string or null, got 3"),
        ({"block": "b", "tokens": 0, "text": "other"}, r'block "b" has another text above; a block has one text'),
        (request(scope=3), r"scope must be a string or null, got 3"),
        (request(t=-0.5), r"t must be seconds, .*, got -0.5"),
        (request(t="now"), r't must be seconds, .*, got "now"'),
        (request(scope={"long": "x" * 500}), r"scope must be a string or null, got .{80}$"),
        (FIRST, r"request 0 stands on line 4 too; each has its own id"),
    ],
)
def test_an_error_names_the_line_the_value_and_what_is_allowed(tmp_path: Path, line: object, message: str) -> None:
    path = written(tmp_path / "bad.jsonl", *LINES[:4], line, SECOND)
    assert re.search(rf"^, line 5: {message}", problem(path))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (FIRST, r'a request line, but a trace begins with a header: {"name": ...}'),
        (BLOCKS[0], r"a block line, but a trace begins with a header"),
        ({"name": 5}, r"name must be a string or null, got 5"),
        ({"k": 0}, r"k must be an integer, 1 or more, or null, got 0"),
        ({"k": "20"}, r'k must be .*, got "20"'),
        (b"\x89PNG\r\n", r"not UTF-8: byte 0x89 at column 1"),
        (b"PK\x03\x04", r"not JSON"),
        (b"\x00\x00\x00", r"not JSON"),
    ],
)
def test_an_error_in_the_header_names_the_first_line(tmp_path: Path, first: object, message: str) -> None:
    assert re.search(rf"^, line 1: {message}", problem(written(tmp_path / "bad.jsonl", first, *LINES[1:])))


def test_empty_lines_are_counted_as_lines(tmp_path: Path) -> None:
    assert problem(written(tmp_path / "t", "", HEADER, "", "oops")).startswith(", line 4: not JSON")


@pytest.mark.parametrize("contents", [b"", b"\n\n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_an_error(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "t").write_bytes(contents)
    assert problem(tmp_path / "t") == ": empty; a trace begins with a header line"


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    assert problem(written(tmp_path / "t", HEADER, *BLOCKS)).startswith(": no request in it")


def test_files_that_cannot_be_opened_are_errors(tmp_path: Path) -> None:
    assert problem(tmp_path / "absent") == ": cannot be read: No such file or directory"
    assert problem(tmp_path) == ": cannot be read: Is a directory"


def test_an_endless_line_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "t").open("wb") as file:
        file.truncate(70 * 1024 * 1024)  # sparse: nothing but zeros, and no disk
    assert problem(tmp_path / "t").startswith(", line 1: longer than 67,108,864 bytes")


def test_a_truncated_last_line_is_reported_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "t", *LINES)
    path.write_bytes(path.read_bytes()[:-20])
    assert "line 5: not JSON" in problem(path)
    assert "where the file ends" in problem(path)


# -- gzip ----------------------------------------------------------------------------------------------------------


def long_lines() -> bytes:
    rng = random.Random(1)
    lines: list[dict[str, Any]] = [HEADER, *({"block": n, "tokens": rng.randrange(999)} for n in range(3000))]
    lines += ({"request": n, "blocks": rng.sample(range(3000), 15)} for n in range(300))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("cut", [3, 12, 1000, 8192, -9, -8, -1])
def test_truncated_gzip_is_an_error_with_the_line(tmp_path: Path, cut: int) -> None:
    (tmp_path / "t.gz").write_bytes(gzip.compress(long_lines())[:cut])
    assert re.match(
        r", line \d+: the gzip data ends early, as if the file had been cut off", problem(tmp_path / "t.gz")
    )


def test_a_gzip_stream_flushed_after_a_line_is_complete(tmp_path: Path) -> None:
    deflate = zlib.compressobj(wbits=31)
    flushed = b""
    for line in LINES:
        flushed += deflate.compress(json.dumps(line).encode() + b"\n") + deflate.flush(zlib.Z_SYNC_FLUSH)
    (tmp_path / "t.gz").write_bytes(flushed)
    assert len(read_trace(tmp_path / "t.gz").requests) == 2
    (tmp_path / "t.gz").write_bytes(flushed + deflate.compress(b'{"requ') + deflate.flush(zlib.Z_SYNC_FLUSH))
    assert problem(tmp_path / "t.gz").startswith(", line 6: the gzip data ends early")


@pytest.mark.parametrize("place", [5, 400, -6])
def test_damaged_gzip_is_an_error(tmp_path: Path, place: int) -> None:
    data = bytearray(gzip.compress(long_lines()))
    data[place] ^= 0xFF
    (tmp_path / "t.gz").write_bytes(data)
    if place == 5:  # the header's time stamp, which is ignored
        assert read_trace(tmp_path / "t.gz").requests
    else:
        assert re.match(r", line \d+: ", problem(tmp_path / "t.gz"))


# -- arbitrary input -----------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**18, max_value=10**40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, "b", 1, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*FIRST, *SECOND, *HEADER, "block", "tokens"])
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


def reads_or_explains(path: Path) -> None:
    """Check that reading returns a trace or raises a `TraceError`."""
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert trace.requests
    for entry in trace.requests:
        assert len(set(entry.blocks)) == len(entry.blocks)
        assert all(0 <= trace.tokens[block] <= 10**9 for block in entry.blocks)
        assert len(entry.scores) in (0, len(entry.blocks))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace"


@given(line=OBJECTS, base=st.sampled_from(LINES), place=st.integers(0, 5), merged=st.booleans())
def test_any_object_at_any_place_is_read_or_explained(
    scratch: Path, line: dict[str, Any], base: dict[str, Any], place: int, merged: bool
) -> None:
    inserted = {**base, **line} if merged else line
    reads_or_explains(written(scratch, *LINES[:place], inserted, *LINES[place:]))


@given(place=st.integers(0, 400), length=st.integers(0, 20), junk=st.binary(max_size=12), packed=st.booleans())
def test_any_bytes_at_any_place_are_read_or_explained(
    scratch: Path, place: int, length: int, junk: bytes, packed: bool
) -> None:
    data = b"\n".join(json.dumps(line).encode() for line in LINES)
    data = gzip.compress(data, mtime=0) if packed else data
    place = min(place, len(data))
    scratch.write_bytes(data[:place] + junk + data[place + length :])
    reads_or_explains(scratch)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_file_are_read_or_explained(scratch: Path, junk: bytes) -> None:
    scratch.write_bytes(junk)
    reads_or_explains(scratch)


# -- its place in the package --------------------------------------------------------------------------------------


def test_without_pydantic_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "pydantic", None)
    monkeypatch.delitem(sys.modules, "warmprefix_tools.traces.reader")
    with pytest.raises(MissingExtraError, match=r"pip install .*\[cli\]"):
        importlib.import_module("warmprefix_tools.traces.reader")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_read(tmp_path: Path) -> None:
    import threading

    data = written(tmp_path / "plain", *LINES).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[gzip.compress(data)])
    writer.start()
    assert len(read_trace(tmp_path / "pipe").requests) == 2
    writer.join()
