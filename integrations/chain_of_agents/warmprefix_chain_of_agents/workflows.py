"""LlamaIndex workflows: an event for each agent, with the documents that it already knows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from typing_extensions import Self

from warmprefix import AgentRouter, ContextPlanner, MissingExtraError, Placement
from warmprefix_chain_of_agents.fan_out import FanOut

try:
    from workflows import Context
    from workflows.events import Event
except ImportError as error:
    raise MissingExtraError("llamaindex", "workflows") from error

__all__ = ["AgentFanOut", "DocumentsAssigned", "DocumentsRead"]


class DocumentsAssigned(Event):
    """Tells an agent's step what to read. Derive one of your own for a second fan-out in the same workflow.

    A stored workflow keeps it, but gives nodes and other models back as mappings, which `reading` and `planning` take
    as well; a class of yours with `documents: list[TextNode]` gets them back as they were.
    """

    agent: str
    documents: list[Any]
    """As they were given, in that order. A `ContextBlock` is a mapping here; `reading` makes it one again."""
    assignment: str
    part: int
    parts: int
    conversation: str | None = None
    tenant: str | None = None


class DocumentsRead(Event):
    """What an agent's step returns: derive one with what it found, and make it by `after`."""

    agent: str
    assignment: str
    part: int
    parts: int

    @classmethod
    def after(cls, assigned: DocumentsAssigned, **found: Any) -> Self:
        """The answer to this event."""
        share = {name: getattr(assigned, name) for name in DocumentsRead.model_fields}
        return cls(**share, **found)


_Assigned = TypeVar("_Assigned", bound=DocumentsAssigned)
_Read = TypeVar("_Read", bound=DocumentsRead)


class AgentFanOut(FanOut):
    """Sends every document to one agent, as an event, and collects what they found.

    The agent's step reads its event inside `async with fan_out.aplanning(event) as plan:`, or `reading`, so that the
    router learns which agents saw theirs. A step that is retried counts once; one of a workflow that was restored in
    another process reads its documents, and the router there learns nothing of it.
    """

    def __init__(
        self,
        router: AgentRouter,
        event: type[DocumentsAssigned] = DocumentsAssigned,
        *,
        agents: Collection[str] | None = None,
        placement: Placement = "head",
        together: bool = True,
        planner: ContextPlanner | None = None,
        max_open: int = 10_000,
    ) -> None:
        """Say who reads.

        Args:
            router: Knows the agents.
            event: What is sent.
            agents: Their names; all of the router's by default.
            placement: `"head"` if the steps make their prompts anew each time, `"tail"` if each agent keeps a chat with
                all that it was told in a conversation.
            together: Whether an agent reads all of its documents in one prompt; otherwise each has an event of its own.
            planner: Plans what `planning` yields; one of its own by default.
            max_open: Most assignments that wait to be read; beyond it the oldest is taken back.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `placement`, `together` or `max_open` can't be used.
        """
        super().__init__(router, agents, placement, together, planner, max_open)
        if not (isinstance(event, type) and issubclass(event, DocumentsAssigned)):
            raise TypeError(f"event must be a class of DocumentsAssigned, got {event!r}")
        self._event = event

    def send(
        self,
        context: Context[Any],
        documents: Any,
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        **fields: Any,
    ) -> int:
        """Send the events, with these fields besides.

        Args:
            context: The step's.
            documents: Most relevant first: texts, nodes with or without a score, blocks, or LangChain's documents.
            conversation: Names it; a context that goes on from run to run is one.
            tenant: Whose request. Nothing is shared between tenants.
            fields: What else the agents need, such as the question.

        Returns:
            How many events. After none, nothing will come to be collected.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: `documents` holds something else than the above.
        """
        shares = self._shared_out(documents, conversation, tenant)
        for share in shares:
            event = self._event(**share._asdict(), conversation=conversation, tenant=tenant, **fields)
            context.send_event(event)
        return len(shares)

    def reassign(self, event: _Assigned) -> list[_Assigned]:
        """What this agent could not read, for the others, to be read by the same step: only `event` is answered.

        Say `router.fail(agent)` first if it can't be reached.

        Raises:
            NoAgentError: There is no other agent.
        """
        return [event.model_copy(update=share._asdict()) for share in self._moved(event)]

    def collect(self, context: Context[Any], event: _Read) -> list[_Read] | None:
        """What all agents found, the most relevant document's first; None until the last of them has come."""
        expected: list[type[Event]] = [type(event)] * event.parts
        found: Any = context.collect_events(event, expected, buffer_id=event.assignment)
        return None if found is None else sorted(found, key=lambda read: read.part)
