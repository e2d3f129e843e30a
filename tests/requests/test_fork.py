"""Forks: a sub-agent's request begins with its parent's bytes, and no call is without a result."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from warmprefix_requests import RewriteRoute, fork
from warmprefix_requests.prompts import GivenResult, MadeCall, tool_events

TASK = {"role": "user", "content": "Read the news."}
QUESTION = {"role": "user", "content": "What is new?"}


def chat_call(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "task", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def chat_result(one: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": one, "content": "Done."}


def uses(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": one, "name": "task", "input": {}} for one in ids],
    }


def results(*ids: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one, "content": "Done."} for one in ids]}


def item_call(one: str, kind: str = "function_call") -> dict[str, Any]:
    return {"type": kind, "call_id": one, "name": "task", "arguments": "{}"}


def item_result(one: str, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": one, "output": "Done."}


REASONING = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
WORDS = {"role": "assistant", "content": "I look."}

CASES: list[tuple[RewriteRoute, list[dict[str, Any]], int]] = [
    ("chat", [QUESTION], 1),
    ("chat", [], 0),
    ("chat", [QUESTION, WORDS], 2),
    ("chat", [QUESTION, chat_call("1"), chat_result("1")], 3),
    ("chat", [QUESTION, chat_call("1")], 1),
    ("chat", [QUESTION, chat_call("1"), chat_result("1"), chat_call("2", "3"), chat_result("2")], 3),
    ("messages", [QUESTION, uses("1"), results("1")], 3),
    ("messages", [QUESTION, uses("1"), results("1"), uses("2", "3")], 3),
    ("messages", [QUESTION, uses("1", "2"), results("1")], 1),
    ("responses", [QUESTION, REASONING, item_call("1"), item_result("1")], 4),
    ("responses", [QUESTION, REASONING, WORDS, item_call("1"), item_call("2"), item_result("1")], 1),
    ("responses", [QUESTION, item_call("1"), item_result("1"), REASONING, item_call("2", "local_shell_call")], 3),
    ("responses", [QUESTION, {"type": "web_search_call", "id": "w", "status": "completed"}], 2),
]


@pytest.mark.parametrize(("route", "messages", "kept"), CASES)
def test_open_calls_are_cut(route: RewriteRoute, messages: list[dict[str, Any]], kept: int) -> None:
    name = "input" if route == "responses" else "messages"
    parent = {"model": "m", "tools": [{"name": "task"}], "system": "You help.", name: messages, "stream": True}
    before = copy.deepcopy(parent)
    child = fork(route, parent, TASK["content"])
    assert child == {**before, name: [*messages[:kept], TASK]}
    assert parent == before
    open_calls: set[str | None] = set()
    for event in tool_events(route, child, 0, None):
        if isinstance(event, MadeCall):
            open_calls.add(event.id)
        elif isinstance(event, GivenResult):
            open_calls.remove(event.call_id)
    assert not open_calls


def test_a_text_is_the_first_message_and_a_stored_history_stays() -> None:
    assert fork("responses", {"input": "What is new?"}, "Read the news.")["input"] == [QUESTION, TASK]
    child = fork("responses", {"input": [QUESTION], "previous_response_id": "r"}, "Read the news.")
    assert child == {"input": [QUESTION, TASK], "previous_response_id": "r"}
    with pytest.raises(ValueError, match="conversation"):
        fork("responses", {"input": [], "conversation": "c"}, "Read the news.")


def test_a_fork_of_a_fork_begins_with_it() -> None:
    parent = {"messages": [QUESTION, WORDS]}
    child = fork("chat", parent, "One.")
    assert fork("chat", child, "Two.")["messages"][:3] == child["messages"]
