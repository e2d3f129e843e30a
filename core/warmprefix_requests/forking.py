"""Requests of sub-agents that begin with their parent's bytes. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmprefix_requests.prompts import GivenResult, MadeCall, RewriteRoute, items_name, tool_events

__all__ = ["fork"]


def fork(route: RewriteRoute, parent: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the body of a sub-agent's request: its parent's body, and a task behind the last message.

    Everything in front of the task is the parent's: tools, instructions, messages, fields, cache marks. So an engine
    that holds the parent's prompt computes the task alone. If a call of the parent has no result, such as the one that
    starts the sub-agent, the child's history ends in front of the model's message with that call: no result is made up
    for it, and no call stays without one. O(messages).

    >>> parent = {"model": "m", "messages": [{"role": "user", "content": "What is new?"}]}
    >>> fork("chat", parent, "Read the news.")["messages"]
    [{'role': 'user', 'content': 'What is new?'}, {'role': 'user', 'content': 'Read the news.'}]

    Send it to the parent's replica: through the gateway with the parent's `x-session-id` as `x-parent-session-id`, with
    `ReplicaRouter.route(parent=...)`, or with the parent's `conversation` of an `AgentRouter`.

    Args:
        route: The shape of the body.
        parent: A request of the parent, with the model's answer if it called something; it is not changed.
        task: A message of the user.

    Raises:
        ValueError: `parent` has a `conversation`: the API would add the child's messages to the parent's.
    """
    if parent.get("conversation") is not None:
        raise ValueError("parent must not have a conversation: the API would add the child's messages to it")
    name = items_name(route)
    given = parent.get(name) or []
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    return {**parent, name: [*messages[: _closed(route, messages)], {"role": "user", "content": task}]}


def _closed(route: RewriteRoute, messages: list[Any]) -> int:
    """Return the number of messages in front of the first answer of the model with a call that has no result."""
    made: dict[object, int] = {}
    for number, message in enumerate(messages):
        if route == "responses":
            kind, call_id = _field(message, "type"), _field(message, "call_id")
            if call_id and kind.endswith("_call"):
                made[call_id] = number
            elif kind.endswith("_output"):
                made.pop(call_id, None)
            continue
        for event in tool_events(route, {"messages": [message]}, 0, None):
            if isinstance(event, MadeCall):
                made[event.id] = number
            elif isinstance(event, GivenResult):
                made.pop(event.call_id, None)
    end = min(made.values(), default=len(messages))
    while route == "responses" and 0 < end < len(messages) and _is_of_answer(messages[end - 1]):
        end -= 1
    return end


def _is_of_answer(item: object) -> bool:
    """Return True for what an answer may hold in front of a call: its text, its reasoning, or other calls."""
    kind = _field(item, "type")
    return kind == "reasoning" or kind.endswith("_call") or _field(item, "role") == "assistant"


def _field(item: object, name: str) -> str:
    value = item.get(name) if isinstance(item, Mapping) else None
    return value if isinstance(value, str) else ""
