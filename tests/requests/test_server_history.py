"""What a server keeps of a Responses request, and what it puts in front of the next one."""

from __future__ import annotations

from typing import Any

import pytest

from warmprefix_requests.server_history import ServerHistory, kept_body, kept_turn, server_history

BODY = {"model": "m", "input": "Hi.", "previous_response_id": "resp_1"}
ANSWER = {
    "id": "resp_2",
    "object": "response",
    "status": "completed",
    "store": True,
    "background": False,
    "conversation": None,
    "truncation": "disabled",
    "previous_response_id": "resp_1",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}],
}


def test_request_continues_the_response_that_it_names() -> None:
    assert server_history("responses", BODY) == ServerHistory("resp_1", is_whole=True, is_kept=True)
    assert server_history("responses", {"input": "Hi."}) == ServerHistory(None, is_whole=True, is_kept=True)
    for route in ("chat", "messages", "completions"):
        assert server_history(route, BODY) is None


@pytest.mark.parametrize(
    ("fields", "is_whole", "is_kept"),
    [
        ({"store": False}, True, False),
        ({"store": None}, True, True),
        ({"background": True}, True, False),
        ({"truncation": "disabled", "context_management": None, "conversation": None}, True, True),
        ({"truncation": "auto"}, False, False),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9_000}]}, False, False),
        ({"conversation": "conv_1"}, False, False),
        ({"conversation": {"id": "conv_1"}}, False, False),
        ({"truncate_prompt_tokens": 100}, False, False),
        ({"transforms": ["middle-out"]}, False, False),
    ],
)
def test_history_is_whole_and_kept_unless_the_request_says_otherwise(
    fields: dict[str, Any], is_whole: bool, is_kept: bool
) -> None:
    history = server_history("responses", {**BODY, **fields})
    name = "conv_1" if fields.get("conversation") else None
    assert history == ServerHistory("resp_1", is_whole, is_kept, name)


def test_session_of_chat_completions_is_no_history() -> None:
    body = {"messages": [], "session_params": {"id": "s", "rid": "r"}}
    assert server_history("chat", body) == ServerHistory(None, is_whole=False, is_kept=False)


@pytest.mark.parametrize("after", [None, 7, ["resp_1"], {}])
def test_anything_but_a_name_continues_nothing(after: object) -> None:
    history = server_history("responses", {**BODY, "previous_response_id": after})
    assert history is not None
    assert history.after is None


@pytest.mark.parametrize(
    ("fields", "turn"),
    [
        ({}, "resp_2"),
        ({"store": None}, "resp_2"),
        ({"store": False}, None),
        ({"status": "incomplete"}, "resp_2"),
        ({"status": "in_progress"}, None),
        ({"status": None}, None),
        ({"status": "failed"}, None),
        ({"status": "cancelled"}, None),
        ({"status": "queued", "background": True}, None),
        ({"background": True}, None),
        ({"truncation": "auto"}, None),
        ({"conversation": {"id": "conv_1"}}, None),
        ({"conversation": {}}, "resp_2"),
        ({"previous_response_id": "resp_0"}, None),
        ({"previous_response_id": None}, None),
        ({"output": [{"type": "compaction", "encrypted_content": "x"}]}, None),
        ({"output": None}, "resp_2"),
        ({"output": [None, "x"]}, "resp_2"),
        ({"id": ""}, None),
        ({"id": 7}, None),
        ({"id": "r" * 1_025}, None),
    ],
)
def test_turn_is_kept_under_the_id_of_a_completed_answer(fields: dict[str, Any], turn: str | None) -> None:
    history = ServerHistory("resp_1", is_whole=True, is_kept=True)
    assert kept_turn(history, {**ANSWER, **fields}) == turn
    assert kept_turn(history._replace(is_kept=False), {**ANSWER, **fields}) is None
    assert kept_turn(history, None) is None


def test_turn_in_a_conversation_needs_the_servers_word() -> None:
    history = ServerHistory("resp_1", is_whole=True, is_kept=True, conversation="conv_1")
    assert kept_turn(history, ANSWER) is None
    confirmed = {**ANSWER, "conversation": {"id": "conv_1"}}
    assert kept_turn(history, confirmed) == "resp_2"
    assert kept_turn(history, {**confirmed, "status": "incomplete"}) is None


def test_engine_may_leave_out_of_its_answer_what_it_was_asked() -> None:
    history = ServerHistory("resp_1", is_whole=True, is_kept=True)
    assert kept_turn(history, {"id": "resp_2", "status": "completed"}) == "resp_2"


def test_continuation_lacks_what_stands_in_front_of_the_items() -> None:
    user = {"role": "user", "content": "b"}
    output = {"type": "function_call_output", "call_id": "c", "output": "d"}
    items = [{"role": "system", "content": "a"}, user, {"role": "developer", "content": "c"}, output, None, 7]
    body = {"input": items, "instructions": "e", "tools": [{"name": "f"}]}
    assert kept_body(body) == {"input": [user, output]}
    assert kept_body({**body, "input": "g"}) == {"input": "g"}
