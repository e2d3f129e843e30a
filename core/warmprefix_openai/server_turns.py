"""Plans of which a server holds the history: whether it holds what they refer to, and keeps what they show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from warmprefix.plan import ContextPlan, PlannedBlock
from warmprefix_requests import OutgoingRequest
from warmprefix_requests.block_places import in_full
from warmprefix_requests.server_history import ServerHistory, kept_body, kept_turn, server_history

__all__ = ["ServerTurn", "server_turn"]


class ServerTurn(NamedTuple):
    """A request behind a history that a server holds, and its plan's part in it."""

    history: ServerHistory
    shows_blocks: bool
    """True if continuations get all blocks of the plan, in the history that the plan was made for."""

    @property
    def adds_text(self) -> bool:
        """True if the prompt has text in front that the request does not show."""
        return self.history.after is not None or self.history.conversation is not None

    def id_in(self, answer: Mapping[str, Any] | None) -> str | None:
        """Return the id under which the server keeps the plan's turn; None if it does not."""
        return kept_turn(self.history, answer) if self.shows_blocks else None


def server_turn(request: OutgoingRequest, plan: ContextPlan) -> tuple[OutgoingRequest, ServerTurn | None]:
    """Return the request to send for a plan, and its turn; None if the request shows the whole prompt.

    References to what the server may not hold, because the request continues another turn or lets the server cut its
    history, are replaced by the blocks themselves.
    """
    body = request.body
    history = server_history(request.route, body)
    if history is None:
        return request, None
    if plan.branch is None and history.conversation is not None and history.conversation == plan.conversation:
        alone = server_history(request.route, {**body, "conversation": None})
        history = (alone or history)._replace(conversation=history.conversation)
    is_continued = history.is_whole and (plan.branch is None or plan.branch.after == history.after)
    referenced = [planned._replace(reference=None) for planned in plan.blocks if planned.reference is not None]
    if not is_continued and referenced and not (history.is_whole and _shows(request, referenced)):
        request = replace(request, body=in_full(request.route, body, plan), is_rewritten=True)
    kept = replace(request, body=kept_body(request.body))
    shown = [planned for planned in plan.blocks if planned.reference is None]
    return request, ServerTurn(history, is_continued and _shows(kept, shown))


def _shows(request: OutgoingRequest, blocks: Iterable[PlannedBlock]) -> bool:
    """Return True if the blocks are in the request as references would name them: in full, with their labels."""
    prompt = request.prompt
    return all(planned.render() in prompt for planned in blocks)
