"""Steady tools: the order and the bytes of first sight, and changes behind the history where the API has it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from warmprefix_requests import (
    OutgoingRequest,
    RewriteRoute,
    SentTools,
    SteadyMode,
    SteadyTools,
    prepared,
    steady_tools,
    with_tools,
    with_tools_behind,
)

ROUTES: Sequence[RewriteRoute] = ("chat", "messages", "responses")


def tool(route: RewriteRoute, name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    inner = {"name": name, "description": f"Use {name}.", **fields}
    if route == "messages":
        return {**inner, "input_schema": schema}
    if route == "responses":
        return {"type": "function", **inner, "parameters": schema}
    return {"type": "function", "function": {**inner, "parameters": schema}}


def names(tools: Sequence[Mapping[str, Any]]) -> str:
    return "".join([one.get("function", one)["name"] for one in tools])


def body_of(route: RewriteRoute, tools: str | list[dict[str, Any]], turns: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a request with this many questions, all but the last one answered."""
    listed = [tool(route, name) for name in tools] if isinstance(tools, str) else tools
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Question {turn}?"},
            {"role": "assistant", "content": f"Yes, {turn}."},
        ]
    return {"model": "m", "tools": listed, "input" if route == "responses" else "messages": messages[:-1], **fields}


def steady(
    body: Mapping[str, Any], sent: SentTools | None, mode: SteadyMode = "order", route: RewriteRoute = "chat"
) -> SteadyTools:
    found = steady_tools(route, body, sent, mode)
    assert found is not None
    return found


def orders(lists: Sequence[str], mode: SteadyMode = "order", route: RewriteRoute = "chat") -> list[str]:
    sent, orders = None, []
    for listed in lists:
        found = steady(body_of(route, listed), sent, mode, route)
        sent = found.sent
        orders.append(names(found.tools))
    return orders


@pytest.mark.parametrize("route", ROUTES)
def test_the_order_of_first_sight_is_kept(route: RewriteRoute) -> None:
    assert orders(["bd", "abcd", "dcba", "ad", "abcd"], route=route) == ["bd", "bdac", "bdac", "da", "bdac"]


@pytest.mark.parametrize("route", ROUTES)
def test_tools_that_are_gone_are_declared_only_on_demand(route: RewriteRoute) -> None:
    assert orders(["abc", "a", "ad"], "order", route) == ["abc", "a", "ad"]
    assert orders(["abc", "a", "ad"], "keep", route) == ["abc", "abc", "abcd"]


@pytest.mark.parametrize(
    ("route", "builtin"),
    [
        ("responses", {"type": "web_search"}),
        ("responses", {"type": "mcp", "server_label": "mail", "server_url": "http://mail/mcp", "authorization": "t"}),
        ("messages", {"type": "web_fetch_20250910", "name": "web_fetch"}),
    ],
)
def test_a_tool_that_the_api_itself_runs_is_never_kept(route: RewriteRoute, builtin: dict[str, Any]) -> None:
    first = steady(body_of(route, [tool(route, "a"), builtin, tool(route, "b")]), None, "keep", route)
    assert builtin in first.tools
    second = steady(body_of(route, "a"), first.sent, "keep", route)
    assert names(second.tools) == "ab"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "any"}, {"type": "tool", "name": "a"}, {"type": "allowed_tools"}]
)
def test_no_call_of_a_tool_that_is_gone_is_demanded(choice: object) -> None:
    first = steady(body_of("chat", "abc"), None, "keep")
    assert names(steady(body_of("chat", "a", tool_choice=choice), first.sent, "keep").tools) == "a"
    for free in ("auto", "none", {"type": "auto"}):
        assert names(steady(body_of("chat", "a", tool_choice=free), first.sent, "keep").tools) == "abc"


def test_no_more_tools_are_kept_than_apis_take() -> None:
    sent: SentTools | None = None
    declared: list[int] = []
    for first in range(0, 400, 40):
        listed = [tool("chat", f"t{number}") for number in range(first, first + 40)]
        kept = steady(body_of("chat", listed), sent, "keep")
        sent, declared = kept.sent, [*declared, len(kept.tools)]
    assert declared == [40, 80, 120, *[40] * 7]


def test_bytes_sent_first_stay_if_only_the_order_of_keys_differs() -> None:
    first = body_of("chat", "ab")
    other = copy.deepcopy(first)
    other["tools"] = [dict(reversed(one.items())) for one in first["tools"]]
    sent = steady(first, None).sent
    assert json.dumps(steady(other, sent).tools) == json.dumps(first["tools"])
    for value in (1, 1.0, True, "1"):  # equal ones are different definitions
        changed = body_of("chat", [tool("chat", "a", limit=value)])
        result = steady(changed, sent)
        assert json.dumps(result.tools) == json.dumps(changed["tools"])
        sent = result.sent


def test_the_same_list_is_the_given_one() -> None:
    body = body_of("messages", "abc")
    first = steady(body, None, route="messages")
    assert first.tools is body["tools"]
    assert steady(body, first.sent, route="messages").tools is body["tools"]


@pytest.mark.parametrize(
    "tools",
    [
        [],
        None,
        "tools",
        [{"name": "a"}, {"name": "a"}],
        [{"type": "web_search"}, {"type": "web_search"}],
        [{"name": "a"}, "a"],
        [{"name": "a"}, {}],
        [{"name": 1}],
        [{"type": "function", "function": None}],
        [{"name": "a", "input_schema": {"maximum": json.loads("1e400")}}],
    ],
)
def test_lists_that_cannot_be_arranged_are_left_alone(tools: object) -> None:
    assert steady_tools("chat", {"tools": tools, "messages": []}, SentTools(({"name": "b"},))) is None


def test_built_in_tools_have_their_type_as_their_name() -> None:
    search, server = {"type": "web_search"}, {"type": "mcp", "server_label": "crm"}
    first = steady({"tools": [search, server], "input": []}, None, route="responses")
    assert steady({"tools": [server, search], "input": []}, first.sent, route="responses").tools == [search, server]


def test_a_mark_on_the_last_tool_stays_on_the_last_tool() -> None:
    mark = {"type": "ephemeral"}
    first = steady(body_of("messages", "bc"), None, route="messages")
    tools = [
        tool("messages", "a"),
        tool("messages", "b", cache_control=mark),
        tool("messages", "c", cache_control=mark),
    ]
    found = steady(body_of("messages", tools), first.sent, route="messages")
    assert names(found.tools) == "bca"
    assert ["cache_control" in one for one in found.tools] == [True, False, True]
    later = [tool("messages", "z", defer_loading=True), tool("messages", "c", cache_control=mark)]
    found = steady(body_of("messages", later), first.sent, route="messages")
    assert (names(found.tools), found.tools[0]["cache_control"]) == ("cz", mark)
    assert "cache_control" not in json.dumps(found.sent)


def test_memory_is_bounded() -> None:
    sent = None
    for number in range(0, 2_000, 100):
        listed = [tool("chat", f"{number + one}") for one in range(100)]
        found = steady(body_of("chat", listed), sent, "keep")
        sent = found.sent
        assert len(sent.seen) <= 512
        assert [one for one in listed if one not in found.tools] == []


@given(st.lists(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1), min_size=1, max_size=8))
def test_each_list_has_its_own_tools_and_no_others(lists: list[list[str]]) -> None:
    sent, kept = None, None
    for listed in lists:
        found, more = (
            steady(body_of("chat", "".join(listed)), sent),
            steady(body_of("chat", "".join(listed)), kept, "keep"),
        )
        assert sorted(names(found.tools)) == sorted(listed)
        assert set(names(more.tools)) >= set(listed)
        if kept is not None:  # what was declared stays the beginning
            assert names(more.tools).startswith(names(kept.seen))
        sent, kept = found.sent, more.sent


# -- behind the history


def placed(route: RewriteRoute, lists: Sequence[str], **fields: Any) -> list[Mapping[str, Any]]:
    """Return the bodies of one session, whose requests have these tools."""
    sent, bodies = None, []
    for turn, listed in enumerate(lists, 1):
        body = body_of(route, listed, turn, **fields)
        found = steady(body, sent, "behind", route)
        sent = found.sent
        bodies.append(found.placed(route, {**body, "tools": found.tools}))
    return bodies


@pytest.mark.parametrize("route", ["messages", "responses"])
def test_a_new_tool_stands_behind_the_history_and_stays_there(route: RewriteRoute) -> None:
    name = "input" if route == "responses" else "messages"
    bodies = placed(route, ["bc", "bc", "abc", "abc", "xabc", "acbx"])
    assert [names(body["tools"]) for body in bodies] == ["bc"] * 6
    for earlier, later in pairwise(bodies):
        assert later[name][: len(earlier[name])] == earlier[name]
    inserted = [number for number, one in enumerate(bodies[-1][name]) if one.get("role") not in ("user", "assistant")]
    assert inserted == [5, 10]
    assert bodies[2][name][-1] == bodies[-1][name][5]


def test_what_is_inserted_has_the_shape_of_the_api() -> None:
    messages = placed("messages", ["ab", "ac"])[-1]["messages"]
    assert messages[-1] == {
        "role": "system",
        "content": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "b"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("messages", "c")}},
        ],
    }
    item = placed("responses", ["ab", "abc"])[-1]["input"][-1]
    assert item == {"type": "additional_tools", "role": "developer", "tools": [tool("responses", "c")]}
    anthropic = pytest.importorskip("anthropic.types.beta")
    openai = pytest.importorskip("openai.types.responses.response_input_item_param")
    TypeAdapter(anthropic.BetaSystemMessageParam).validate_python(messages[-1])
    TypeAdapter(openai.AdditionalTools).validate_python(item)


def test_a_tool_that_comes_back_is_named() -> None:
    messages = placed("messages", ["ab", "a", "ab"])[-1]["messages"]
    reference = {"type": "tool_reference", "name": "b"}
    inserted = [message["content"] for message in messages if message["role"] == "system"]
    assert inserted == [[{"type": "tool_removal", "tool": reference}], [{"type": "tool_addition", "tool": reference}]]


def test_a_changed_definition_is_defined_again() -> None:
    first = steady(body_of("messages", "ab"), None, "behind", "messages")
    changed = [tool("messages", "a"), tool("messages", "b", description="Other.")]
    found = steady(body_of("messages", changed, 2), first.sent, "behind", "messages")
    assert found.front == body_of("messages", "ab")["tools"]
    ((number, message),) = found.insertions
    assert (number, message["content"][0]["tool"]["definition"]) == (3, changed[1])


@pytest.mark.parametrize(
    ("route", "lists", "fields"),
    [
        ("chat", ["ab", "abc"], {}),  # the API has no such message
        ("responses", ["ab", "ac"], {}),  # it withdraws no tool
        ("responses", ["ab", "abc"], {"previous_response_id": "r"}),  # it keeps the history
        ("messages", ["ab", "abc"], {"tool_choice": {"type": "tool", "name": "c"}}),
    ],
)
def test_otherwise_all_tools_stand_in_front(route: RewriteRoute, lists: list[str], fields: dict[str, Any]) -> None:
    body = placed(route, lists, **fields)[-1]
    assert names(body["tools"]) == lists[-1]
    assert len(body["input" if route == "responses" else "messages"]) == 3


def test_no_message_stands_where_the_api_refuses_it() -> None:
    first = steady(body_of("messages", "ab"), None, "behind", "messages")
    prefilled = body_of("messages", "abc", 2)
    prefilled["messages"].append({"role": "assistant", "content": "The answer is"})
    found = steady(prefilled, first.sent, "behind", "messages")
    assert (names(found.tools), found.front, found.sent.changes) == ("abc", None, ())
    typed = body_of("messages", [*body_of("messages", "ab")["tools"], {"type": "web_search_1", "name": "web"}], 2)
    assert steady(typed, first.sent, "behind", "messages").front is None
    deferred = [tool("messages", "z", defer_loading=True)]
    only = steady(body_of("messages", deferred), None, "behind", "messages")
    assert (
        steady(body_of("messages", [*deferred, tool("messages", "a")], 2), only.sent, "behind", "messages").front
        is None
    )


def test_a_cut_history_begins_again() -> None:
    sent = None
    for turn, listed in ((1, "ab"), (2, "abc"), (3, "abc")):
        found = steady(body_of("messages", listed, turn), sent, "behind", "messages")
        sent = found.sent
    summary = {**body_of("messages", "cba"), "messages": [{"role": "user", "content": "A summary."}]}
    cut = steady(summary, sent, "behind", "messages")
    assert (names(cut.tools), cut.front, cut.sent.changes) == ("abc", None, ())
    edited = body_of("messages", "abc", 4)
    edited["messages"][4:5] = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    found = steady(edited, sent, "behind", "messages")
    assert found.insertions[0][0] == 3
    edited["messages"][3] = {"role": "user", "content": "More."}  # no assistant's message behind the insertion
    assert steady(edited, sent, "behind", "messages").front is None


def test_marks_stay_on_tools_in_front() -> None:
    mark = {"type": "ephemeral"}
    first = steady(body_of("messages", "ab"), None, "behind", "messages")
    tools = [tool("messages", "a"), tool("messages", "b"), tool("messages", "c", cache_control=mark)]
    found = steady(body_of("messages", tools, 2), first.sent, "behind", "messages")
    assert found.front is not None
    assert ["cache_control" in one for one in found.front] == [False, True]
    assert "cache_control" not in json.dumps(found.insertions)


def test_a_mark_at_the_end_moves_behind_what_is_inserted() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    first = steady(body_of("messages", "ab"), None, "behind", "messages")
    body = body_of("messages", "abcd", 2)
    body["messages"][-1]["content"] = [
        {"type": "text", "text": "One"},
        {"type": "text", "text": "Two", "cache_control": mark},
    ]
    before = copy.deepcopy(body)
    found = steady(body, first.sent, "behind", "messages")
    messages = found.placed("messages", body)["messages"]
    parts = [*messages[-2]["content"], *messages[-1]["content"]]
    assert [part.get("cache_control") for part in parts] == [None, None, None, mark]
    assert body == before
    body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More?"}]
    later = steady(body, found.sent, "behind", "messages")
    assert json.dumps(later.placed("messages", body)["messages"][2:4]).count("cache_control") == 1  # the client's own


def test_any_session_can_be_read_from_its_bodies() -> None:
    """What a model may call at the end of each prompt is what the client declared."""
    rng = random.Random(1)
    for _ in range(200):
        sent, pool = None, "abcdef"
        for turn in range(1, 8):
            listed = "".join(rng.sample(pool, rng.randint(1, 6)))
            form = rng.choice(["Use it.", "Use it."] + ["Other."] * (turn == 5))
            body = body_of("messages", [tool("messages", name, description=form) for name in listed], turn)
            found = steady(body, sent, "behind", "messages")
            sent = found.sent
            out = found.placed("messages", {**body, "tools": found.tools})
            offered = {one["name"]: one for one in out["tools"]}
            defined = dict(offered)
            for message in out["messages"]:
                for block in message["content"] if message["role"] == "system" else ():
                    if block["type"] == "tool_removal":
                        del offered[block["tool"]["name"]]
                    elif block["tool"]["type"] == "tool_reference":
                        offered[block["tool"]["name"]] = defined[block["tool"]["name"]]
                    else:
                        offered[block["tool"]["definition"]["name"]] = block["tool"]["definition"]
                    defined.update(offered)
            assert sorted(offered) == sorted(listed)
            assert {one["description"] for one in offered.values()} == {form}
            assert [one for one in out["messages"] if one["role"] != "system"] == body["messages"]


# -- bytes


def test_bytes_around_the_list_stay_the_clients() -> None:
    body = body_of("messages", "abc", 2)
    content = json.dumps(body, indent=1, ensure_ascii=False).replace("Yes", "J\u00e4").encode()
    request = OutgoingRequest("messages", content, json.loads(content))
    first = steady(body_of("messages", "cb"), None, "behind", "messages")
    found = steady(request.body, first.sent, "behind", "messages")
    sent = prepared(request, [with_tools(found)], {"tools": with_tools_behind(found)})
    assert sent.plain is not None
    begin, end = content.index(b'"messages"'), len(content)
    assert sent.plain.encode()[-(end - begin) :] == content[begin:]
    assert json.loads(sent.plain.encode()) == {**request.body, "tools": found.tools}
    assert sent.beta == "inline-tools-2026-09-15"
    assert sent.plain.beta is None
    assert json.loads(sent.content)["messages"][:-1] == request.body["messages"]
