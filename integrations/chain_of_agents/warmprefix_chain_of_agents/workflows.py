"""LlamaIndex workflows: an event for each agent, with the documents that it has read before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from typing_extensions import Self

from warmprefix import Choice, ContextPlanner, MissingExtraError
from warmprefix.plan import Placement
from warmprefix_chain_of_agents.fan_out import FanOut
from warmprefix_requests.neighbours import PinRule
from warmprefix_routing import AgentRouter

try:
    from workflows import Context
    from workflows.events import Event
except ImportError as error:
    raise MissingExtraError("llamaindex", "workflows") from error

__all__ = ["DocumentsAssigned", "DocumentsRead", "WorkflowFanOut"]


class DocumentsAssigned(Event):
    """Event with the documents for an agent's step. Derive your own for a second fan-out in the same workflow.

    A stored workflow keeps it, but restores nodes and other models as mappings, which `reading` and `planning` take as
    well; a class of yours with `documents: list[TextNode]` gets them back as they were.
    """

    agent: str
    """Name of the agent."""
    documents: list[Any]
    """As they were given, in that order. A `ContextBlock` is a mapping here; `reading` makes it a block again."""
    assignment: str
    """The id of the assignment."""
    part: int
    """Number of the agent's part in the assignment."""
    parts: int
    """Number of parts in the assignment."""
    conversation: str | None = None
    """The id of the conversation; None without one."""
    tenant: str | None = None
    """Name of the tenant; None without one."""


class DocumentsRead(Event):
    """Result of an agent's step: derive one with fields for its findings, and make it with `after`."""

    agent: str
    """Name of the agent."""
    assignment: str
    """The id of the assignment."""
    part: int
    """Number of the agent's part in the assignment."""
    parts: int
    """Number of parts in the assignment."""

    @classmethod
    def after(cls, assigned: DocumentsAssigned, **found: Any) -> Self:
        """Return the result for this event."""
        return cls(**{name: getattr(assigned, name) for name in DocumentsRead.model_fields}, **found)


_Assigned = TypeVar("_Assigned", bound=DocumentsAssigned)
_Read = TypeVar("_Read", bound=DocumentsRead)


class WorkflowFanOut(FanOut):
    """Sends every document to one agent, as an event, and collects their results.

    The agent's step reads its event inside `async with fan_out.aplanning(event) as plan:`, or `reading`, so that the
    router records which agents saw theirs. A step that is retried counts once; a step of a workflow that was restored
    in another process reads its documents, and the router there records nothing.
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
        order_locked: bool = False,
        pinned: PinRule[Any] | None = None,
        choose: Choice | None = None,
        max_open: int = 10_000,
    ) -> None:
        """Set up the fan-out.

        Args:
            router: The router of the agents.
            event: The class of the events.
            agents: Their names; all of the router's by default.
            placement: `"head"` if the steps rebuild their prompts each time, `"tail"` if each agent keeps a chat per
                conversation.
            together: If True, an agent reads all of its documents in one prompt; if False, each has an event.
            planner: Makes the plans that `planning` yields; one of its own by default.
            order_locked: As for `ChainOfAgents`, like `pinned`.
            pinned: For documents that are no blocks.
            choose: Which of the documents are read, as for `ChainOfAgents`; the others are in no share.
            max_open: Most assignments that wait to be read; beyond it the oldest is withdrawn.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `placement`, `together` or `max_open` can't be used.
        """
        super().__init__(router, agents, placement, together, planner, order_locked, pinned, choose, max_open)
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
        """Send the events, with these fields in addition.

        Args:
            context: The step's context.
            documents: Most relevant first: texts, nodes with or without a score, blocks, or LangChain's documents.
            conversation: Its name; a context that goes on from run to run is one.
            tenant: The tenant of the request. Nothing is shared between tenants.
            fields: Other data that the agents need, such as the question.

        Returns:
            The number of events. After none, there is nothing to collect.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: `documents` holds another object.
        """
        shares = self._shared_out(documents, conversation, tenant)
        for share in shares:
            event = self._event(**share._asdict(), conversation=conversation, tenant=tenant, **fields)
            context.send_event(event)
        return len(shares)

    def reassign(self, event: _Assigned) -> list[_Assigned]:
        """Return events with an agent's documents for others, to be read by the same step: only `event` is answered.

        Call `router.fail(agent)` first if the agent can't be reached.

        Raises:
            NoAgentError: There is no other agent.
        """
        return [event.model_copy(update=share._asdict()) for share in self._moved(event)]

    def collect(self, context: Context[Any], event: _Read) -> list[_Read] | None:
        """Return the results of all agents, the most relevant document's first; None until all are there."""
        expected: list[type[Event]] = [type(event)] * event.parts
        found: Any = context.collect_events(event, expected, buffer_id=event.assignment)
        return None if found is None else sorted(found, key=lambda read: read.part)
