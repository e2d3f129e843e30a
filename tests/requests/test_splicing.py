"""References in the client's own bytes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_requests import prepared, read_call, restored, with_references
from warmprefix_requests.prompts import Path
from warmprefix_requests.splicing import spliced

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


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


def written(value: Any, draw: Any) -> str:
    """Write a value with white space, repeated keys, and characters that are escaped here and not there."""
    space: str = draw(st.sampled_from(["", " ", "\n\t"]))
    if isinstance(value, dict):
        names = [name for name in value for _ in range(draw(st.integers(1, 2)))]
        last = {name: at for at, name in enumerate(names)}
        pairs = [
            f"{written(name, draw)}:{written(value[name] if last[name] == at else draw(JSON_VALUES), draw)}"
            for at, name in enumerate(names)
        ]
        return f"{space}{{{space}{','.join(pairs)}{space}}}{space}"
    if isinstance(value, list):
        return f"{space}[{space}{','.join([written(inner, draw) for inner in value])}]{space}"
    if isinstance(value, str) and draw(st.booleans()):
        units = value.encode("utf-16-be", "surrogatepass").hex()
        return space + '"' + "".join([rf"\u{units[at : at + 4]}" for at in range(0, len(units), 4)]) + '"' + space
    return space + json.dumps(value, ensure_ascii=draw(st.booleans())) + space


def paths(value: Any, front: Path = ()) -> Iterator[Path]:
    if front:
        yield front
    for step, inner in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ):
        yield from paths(inner, (*front, step))


@given(data=st.data())
def test_new_texts_take_the_place_of_values_anywhere(data: st.DataObject) -> None:
    value = data.draw(st.dictionaries(st.text(max_size=2), JSON_VALUES, max_size=4))
    content = written(value, data.draw).encode("utf-8", "replace")
    value = json.loads(content)
    texts: dict[Path, str] = {}
    for path in data.draw(st.permutations(list(paths(value)))):
        if all(path[: len(other)] != other and other[: len(path)] != path for other in texts):
            texts[path] = f"new {len(texts)}\ud800"
    sent = spliced(content, texts)
    for path, text in texts.items():
        inner = value
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = text
    assert json.loads(sent) == value
    assert spliced(content, {}) == content
    old = content.decode()
    for piece in re.split(r'"new \d+\\ud800"', sent.decode()):  # the client's own bytes, in their order
        at = old.index(piece)
        old = old[at + len(piece) :]


def test_a_path_must_be_there() -> None:
    with pytest.raises(LookupError):
        spliced(b'{"a": [1]}', {("a", 1): "x"})
