"""References to repeated tool results in request bodies, and the way back."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_requests import RewriteRoute, restored, rewrite

TEXTS = ["The sea is 3,688 metres deep on average. " * 9, "The sky is blue at noon, and red at dusk. " * 20, "short"]
REFERENCE = '[Word for word the result of the earlier call read({"path":"a"}).]'
ROUTES: list[RewriteRoute] = ["chat", "messages", "responses"]

Turn = tuple[str, str, str]
"""Name and path of a call, and its result."""


def body_of(route: RewriteRoute, turns: list[Turn], **fields: Any) -> dict[str, Any]:
    """Return a body in which an assistant makes one call per turn; `fields` are those of each result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXTS[0]}]
    for number, (name, path, text) in enumerate(turns):
        id, arguments = f"call_{number}", {"path": path}
        if route == "chat":
            function = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}
            messages.append(
                {"role": "assistant", "content": TEXTS[0], "tool_calls": [{"id": id, "function": function}]}
            )
            messages.append({"role": "tool", "tool_call_id": id, "content": text, **fields})
        elif route == "messages":
            use = {"type": "tool_use", "id": id, "name": name, "input": arguments}
            messages.append({"role": "assistant", "content": [{"type": "text", "text": TEXTS[0]}, use]})
            result = {"type": "tool_result", "tool_use_id": id, "content": text, **fields}
            messages.append({"role": "user", "content": [result, {"type": "text", "text": TEXTS[0]}]})
        else:
            arguments_text = json.dumps(arguments, separators=(",", ":"))
            messages.append({"type": "function_call", "call_id": id, "name": name, "arguments": arguments_text})
            messages.append({"type": "function_call_output", "call_id": id, "output": text, **fields})
    return {"model": "m", "input" if route == "responses" else "messages": messages}


def results(route: RewriteRoute, body: Any) -> list[Any]:
    if route == "responses":
        return [item["output"] for item in body["input"] if "output" in item]
    if route == "chat":
        return [message["content"] for message in body["messages"] if message["role"] == "tool"]
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [block["content"] for content in contents for block in content if block["type"] == "tool_result"]


def holders_of(route: RewriteRoute, body: Any) -> list[Any]:
    """Return the messages, items or blocks that hold the results."""
    if route != "messages":
        kinds = ("tool", "function_call_output")
        return [
            holder
            for name in ("messages", "input")
            for holder in body.get(name, ())
            if holder.get("role") in kinds or holder.get("type") in kinds
        ]
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [block for content in contents for block in content if block["type"] == "tool_result"]


turns = st.lists(
    st.tuples(st.sampled_from(["read", "run"]), st.sampled_from(["a", "b", "x" * 300]), st.sampled_from(TEXTS)),
    max_size=9,
)


@given(route=st.sampled_from(ROUTES), given_turns=turns)
def test_every_result_can_be_restored(route: RewriteRoute, given_turns: list[Turn]) -> None:
    body = body_of(route, given_turns)
    before = copy.deepcopy(body)
    rewritten = rewrite(route, body)
    assert body == before
    assert restored(route, rewritten.body) == body
    assert rewritten.references == sum(
        sent != text for sent, (_, _, text) in zip(results(route, rewritten.body), given_turns, strict=True)
    )
    assert rewritten.references == sum(
        len(text) >= 256 and text in [earlier for _, _, earlier in given_turns[:number]]
        for number, (_, _, text) in enumerate(given_turns)
    )
    assert (rewritten.body is body) == (rewritten.references == 0)


@given(route=st.sampled_from(ROUTES), given_turns=turns, length=st.integers(0, 9))
def test_the_beginning_of_a_session_stays_its_beginning(
    route: RewriteRoute, given_turns: list[Turn], length: int
) -> None:
    name = "input" if route == "responses" else "messages"
    whole = rewrite(route, body_of(route, given_turns)).body[name]
    part = rewrite(route, body_of(route, given_turns[:length])).body[name]
    assert whole[: len(part)] == part


SECTIONS = [
    "\n".join(
        [f"{number} of {name}: the sea is {number * 37} metres deep here. Its floor is sand." for number in range(30)]
    )
    for name in ("north", "south", "east")
]
PIECES = [
    *SECTIONS,
    SECTIONS[0][40:700],
    SECTIONS[1][1000:],
    "same line\n" * 40,
    "a" * 300,
    "\n",
    "\u2028tail ",
    REFERENCE,
]
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)


@given(
    route=st.sampled_from(ROUTES),
    given_turns=st.lists(st.tuples(st.sampled_from(["search", "read"]), st.sampled_from("ab"), pieces), max_size=7),
    length=st.integers(0, 7),
)
def test_results_can_be_restored(route: RewriteRoute, given_turns: list[Turn], length: int) -> None:
    name = "input" if route == "responses" else "messages"
    body = body_of(route, given_turns)
    rewritten = rewrite(route, body)
    # A text of a tool that is itself a reference to an earlier result is taken for one.
    assert restored(route, rewritten.body) == restored(route, body)
    part = rewrite(route, body_of(route, given_turns[:length])).body[name]
    assert rewritten.body[name][: len(part)] == part
    assert rewritten.saved_tokens >= 0


@pytest.mark.parametrize(
    "begin",
    [
        "[Word for word in the result of the earlier call ",
        '[Word for word in the result of the earlier call a: from "',
        '[Word for word in the result of the earlier call a: from "b" to "',
        "[Word for word the result of the earlier call ",
    ],
)
def test_texts_that_begin_like_references_cost_their_length(begin: str) -> None:
    body = body_of("chat", [("read", "a", begin * 4_000), ("run", "b", begin * 4_000)])
    began = time.process_time()
    assert restored("chat", rewrite("chat", body).body) == body
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "words", [r'from "\x" to "b"', 'from "The" to "dusk"', "lines 1 to 1", f"lines {'9' * 5000} to 1", "lines 2 to 1"]
)
def test_a_text_that_reads_like_a_reference_does_no_harm(words: str) -> None:
    text = f'[Word for word in the result of the earlier call read({{"path":"a"}}): {words}.]'
    body = body_of("chat", [("read", "a", TEXTS[1]), ("run", "b", text * 9), ("run", "c", text * 9)])
    rewritten = rewrite("chat", body).body
    assert results("chat", rewritten)[:2] == [TEXTS[1], text * 9]
    assert restored("chat", rewritten) == restored("chat", body)


@pytest.mark.parametrize("route", ROUTES)
def test_all_shapes_have_the_same_reference(route: RewriteRoute) -> None:
    body = body_of(route, [("read", "a", TEXTS[0]), ("run", "b", TEXTS[0])])
    rewritten = rewrite(route, body)
    assert results(route, rewritten.body) == [TEXTS[0], REFERENCE]
    assert rewritten.saved_tokens == (len(TEXTS[0]) - len(REFERENCE)) // 4
    changed = json.dumps(rewritten.body).replace(json.dumps(REFERENCE), json.dumps(TEXTS[0]))
    assert json.loads(changed) == body


def test_a_call_that_gave_other_results_is_named_by_its_number() -> None:
    body = body_of("chat", [("read", "a", TEXTS[0]), ("read", "a", TEXTS[1]), ("run", "b", TEXTS[1])])
    assert results("chat", rewrite("chat", body).body)[2] == f"{REFERENCE[:-2]}, number 2 of such calls.]"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("messages", {"is_error": True}),
        ("chat", {"content": [{"type": "text", "text": TEXTS[0]}, {"type": "image_url", "image_url": {"url": "x"}}]}),
        ("responses", {"output": [{"type": "input_image", "image_url": "x"}]}),
        ("chat", {"content": None}),
        ("chat", {"content": 7}),
    ],
)
def test_other_results_stay(route: RewriteRoute, fields: dict[str, Any]) -> None:
    body = body_of(route, [("read", "a", TEXTS[0]), ("run", "b", TEXTS[0])], **fields)
    assert rewrite(route, body).body is body


@pytest.mark.parametrize("route", ROUTES)
def test_a_single_text_part_is_a_result(route: RewriteRoute) -> None:
    part = {"type": "input_text" if route == "responses" else "text", "text": TEXTS[0]}
    name = "output" if route == "responses" else "content"
    body = body_of(route, [("read", "a", TEXTS[0]), ("run", "b", TEXTS[0])], **{name: [part]})
    rewritten = rewrite(route, body).body
    assert results(route, rewritten) == [[part], [{**part, "text": REFERENCE}]]
    assert restored(route, rewritten) == body


@pytest.mark.parametrize(
    "field",
    [
        {"previous_response_id": "r"},
        {"conversation": "c"},
        {"conversation": {"id": "c"}},
        {"truncation": "auto"},
        {"truncation": "unheard-of"},
        {"truncate_prompt_tokens": 100},
        {"truncate_prompt_tokens": -1},
        {"transforms": ["middle-out"]},
        {"plugins": [{"id": "web"}, {"id": "context-compression"}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]}},
        {"context_management": {"edits": [{"type": "unheard-of"}]}},
        {"context_management": {"edits": [7]}},
        {"context_management": {"edits": "all"}},
        {"context_management": {"more": {}}},
        {"context_management": [{"type": "compaction", "compact_threshold": 200_000}]},
        {"context_management": "auto"},
    ],
)
def test_a_body_that_is_cut_elsewhere_stays(field: dict[str, Any]) -> None:
    body = {**body_of("responses", [("read", "a", TEXTS[0])] * 2), **field}
    assert rewrite("responses", body).body is body


@pytest.mark.parametrize(
    "field",
    [
        {"previous_response_id": None, "conversation": None, "truncation": None, "truncate_prompt_tokens": None},
        {"truncation": "disabled"},
        {"transforms": [], "plugins": [{"id": "web"}]},
        {"context_management": None},
        {"context_management": {}},
        {"context_management": []},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ],
)
def test_fields_that_cut_no_result_forbid_nothing(field: dict[str, Any]) -> None:
    body = {**body_of("messages", [("read", "a", TEXTS[0])] * 2), **field}
    assert rewrite("messages", body).references == 1


@pytest.mark.parametrize("route", ROUTES)
def test_no_reference_names_a_result_in_front_of_a_compaction(route: RewriteRoute) -> None:
    name = "input" if route == "responses" else "messages"
    body = body_of(route, [("read", "a", TEXTS[0])] * 4)
    middle = 1 + 2 * 2
    item = {"type": "compaction", "encrypted_content": "gAAA", "content": "A summary."}
    block = item if route == "responses" else {"role": "assistant", "content": [item]}
    body[name].insert(middle, block)
    rewritten = rewrite(route, body).body
    is_sent = [text == TEXTS[0] for text in results(route, rewritten) if text != "A summary."]
    if route == "chat":  # no API of this shape has such an item
        assert is_sent == [True, False, False, False]
    else:
        assert is_sent == [True, False, True, False]
    assert restored(route, rewritten) == body


MARKS: dict[RewriteRoute, list[dict[str, Any]]] = {
    "chat": [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}],
    "messages": [{"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "responses": [{"prompt_cache_breakpoint": {"mode": "explicit"}}],
}


@pytest.mark.parametrize(("route", "mark"), [(route, mark) for route in ROUTES for mark in MARKS[route]])
@pytest.mark.parametrize("marked", [{0}, {1}, {2}, {0, 1, 2}])
def test_a_mark_stays_on_its_result_and_decides_nothing(
    route: RewriteRoute, mark: dict[str, Any], marked: set[int]
) -> None:
    body = body_of(route, [("read", "a", TEXTS[0])] * 3)
    plain = rewrite(route, body).body
    holders = holders_of(route, body)
    for number in marked:
        holders[number].update(mark)
    before = copy.deepcopy(body)
    rewritten = rewrite(route, body).body
    assert results(route, rewritten) == results(route, plain)
    assert [text == TEXTS[0] for text in results(route, plain)] == [True, False, False]
    assert json.dumps(rewritten).count(json.dumps(mark)[1:-1]) == len(marked)
    assert restored(route, rewritten) == body == before


@pytest.mark.parametrize("route", ROUTES)
def test_a_mark_in_the_content_decides_nothing(route: RewriteRoute) -> None:
    text = {"type": "input_text" if route == "responses" else "text", "text": TEXTS[0]}
    point = {"cachePoint": {"type": "default"}}
    shapes: list[Any] = [TEXTS[0], [text], [{**text, "cache_control": {"type": "ephemeral"}}], [text, point]]
    name = "output" if route == "responses" else "content"
    for first in shapes:
        for second in shapes:
            body = body_of(route, [("read", "a", TEXTS[0]), ("run", "b", TEXTS[0])])
            holders = holders_of(route, body)
            holders[0][name], holders[1][name] = copy.deepcopy(first), copy.deepcopy(second)
            rewritten = rewrite(route, body).body
            sent = results(route, rewritten)
            assert sent[0] == first
            assert json.dumps(sent[1]) == json.dumps(second).replace(json.dumps(TEXTS[0]), json.dumps(REFERENCE))
            assert restored(route, rewritten) == body


def test_a_call_that_ran_again_after_others_is_named_so() -> None:
    def sent(*turns: Turn) -> list[str]:
        body = body_of("chat", list(turns))
        rewritten = rewrite("chat", body).body
        assert restored("chat", rewritten) == body
        return results("chat", rewritten)

    read, edit, run = ("read", "a", TEXTS[0]), ("edit", "a", "done"), ("run", "b", TEXTS[0])
    again = f"[Ran again; w{REFERENCE[2:]}"
    assert sent(read, read, read)[1:] == [REFERENCE, REFERENCE]
    assert sent(read, edit, read, read) == [TEXTS[0], "done", again, again]
    assert sent(read, run, read, run) == [TEXTS[0], REFERENCE, again, REFERENCE]


def test_the_work_can_be_ended() -> None:
    body = body_of("chat", [("read", "a", TEXTS[0])] * 9)
    seen: list[int] = []

    def check() -> None:
        seen.append(len(seen))
        if len(seen) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        rewrite("chat", body, check=check)
    assert len(seen) == 3


@pytest.mark.parametrize("same", [False, True])
def test_many_repeats_take_time_with_their_number(same: bool) -> None:
    body = body_of("chat", [("f", "a" if same else f"{at}", "y" * 300) for at in range(30_000)])
    began = time.process_time()
    rewritten = rewrite("chat", body)
    assert restored("chat", rewritten.body) == body
    assert rewritten.references == 29_999
    assert time.process_time() - began < 10  # with the square of their number, minutes


def test_results_of_kept_tools_stay_and_can_be_named() -> None:
    body = body_of("chat", [("read", "a", TEXTS[0]), ("read", "a", TEXTS[0]), ("run", "b", TEXTS[0])])
    sent = results("chat", rewrite("chat", body, keep_tools=["read"]).body)
    assert sent == [TEXTS[0], TEXTS[0], REFERENCE]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "messages",
    [
        None,
        7,
        "text",
        [None],
        [7],
        [{}],
        [{"role": "tool"}],
        [{"role": "assistant", "tool_calls": [{"function": 7}, 8]}],
        [{"role": "assistant", "content": [{"type": "tool_use"}, {"type": "tool_result"}]}],
        [{"type": "function_call"}, {"type": "function_call_output"}],
    ],
)
def test_a_body_that_is_not_understood_stays(route: RewriteRoute, messages: Any) -> None:
    body = {"messages": messages, "input": messages}
    assert rewrite(route, body).body is body
    assert restored(route, body) is body


NAMES = st.sampled_from(["messages", "role", "content", "tool_calls", "function", "type", "text"])
VALUES = st.none() | st.booleans() | st.floats() | st.text()


@given(st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner)))
def test_no_body_fails(value: Any) -> None:
    body = {"messages": value, "input": value}
    for route in ROUTES:
        rewrite(route, body)
        restored(route, body)
