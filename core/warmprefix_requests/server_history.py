"""Histories that a server keeps: which turn a request continues, and under which id its own turn is kept. No I/O.

OpenAI's Responses, and those of vLLM and SGLang, put the items stored up to `previous_response_id` in front of the
input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from warmprefix_requests.prompts import hides_text, is_cut_elsewhere

__all__ = ["ServerHistory", "kept_body", "kept_turn", "server_history"]

_NOT_CARRIED_OVER = ("system", "developer")
"""Roles of items that a continuation may lack: vLLM leaves out system messages, as it does `instructions`."""

_MAX_ID_CHARACTERS = 1024


class ServerHistory(NamedTuple):
    """The history in front of a request's own text, and what becomes of its own turn."""

    after: str | None
    """Id of the turn that the request continues; None if it begins a history."""
    is_whole: bool
    """True if the prompt holds all that was kept up to that turn, and nothing else."""
    is_kept: bool
    """True if the server is asked to keep this turn, under the id of its answer, for requests that continue it."""
    conversation: str | None = None
    """Id of the conversation whose items it adds. Others may change them, so the history is not whole."""


def server_history(route: str, body: Mapping[str, Any]) -> ServerHistory | None:
    """Return the history that a server adds to a body; None if the body holds the whole prompt."""
    if route == "responses":
        after = body.get("previous_response_id")
        is_whole = not (hides_text(body, after_response=True) or is_cut_elsewhere(body))
        is_kept = is_whole and body.get("store") is not False and not body.get("background")
        name = _id_of(body.get("conversation"))
        return ServerHistory(after if isinstance(after, str) else None, is_whole, is_kept, name)
    # SGLang's chat completions take the field of its sessions and ignore it.
    return None if body.get("session_params") is None else ServerHistory(None, is_whole=False, is_kept=False)


def _id_of(conversation: object) -> str | None:
    name = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    return name if isinstance(name, str) else None


def kept_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a Responses request with nothing but the items that its continuations get."""
    given = body.get("input")
    items = given if not isinstance(given, list) else list(_carried_over(given))
    return {"input": items}


def _carried_over(items: list[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Mapping) and item.get("role") not in _NOT_CARRIED_OVER:
            yield item


def kept_turn(history: ServerHistory, answer: Mapping[str, Any] | None) -> str | None:
    """Return the id under which the server keeps the turn of this history; None if it keeps none, or may not.

    An answer that was cut at a limit can be continued as well, but no conversation gets its items.

    Args:
        history: The history of the request.
        answer: The whole answer of a Responses request; None if it was not read to its end.
    """
    if not history.is_kept or answer is None:
        return None
    if answer.get("status") not in (("completed",) if history.conversation else ("completed", "incomplete")):
        return None
    if answer.get("store") is False or answer.get("background"):
        return None
    if _id_of(answer.get("conversation")) != history.conversation:  # vLLM ignores the field
        return None
    if answer.get("truncation") not in (None, "disabled"):
        return None
    if "previous_response_id" in answer and answer["previous_response_id"] != history.after:
        return None
    output, turn = answer.get("output"), answer.get("id")
    items = output if isinstance(output, list) else []
    if any("compaction" in str(item.get("type")) for item in items if isinstance(item, Mapping)):
        return None  # a continuation begins with a summary
    return turn if isinstance(turn, str) and 0 < len(turn) <= _MAX_ID_CHARACTERS else None
