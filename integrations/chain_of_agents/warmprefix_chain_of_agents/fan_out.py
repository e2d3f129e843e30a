"""Base of the adapters for frameworks: the documents that each agent got, until it has read them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple, get_args

from warmprefix import Branch, Choice, ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.errors import NoAgentError
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import Placement
from warmprefix_chain_of_agents.documents import as_blocks, as_list, as_plain, candidates_of, check_choice, value_of
from warmprefix_requests.neighbours import PinRule
from warmprefix_routing import AgentRouter, Assignment

__all__ = ["FanOut", "Share"]


class Share(NamedTuple):
    """The documents that one agent reads in one prompt."""

    agent: str
    documents: list[Any]
    """As the application listed them, with blocks as plain mappings."""
    assignment: str
    """The assignment's id."""
    part: int
    """Number of the share in its assignment, from 0 on; the share with the most relevant document comes first."""
    parts: int
    """Number of shares."""


class FanOut:
    """Hands documents to agents, and reports to the router and the planner which of them were read.

    A share travels through the framework, which may retry it, store it, and pass it to another process, so it holds
    only the id of its assignment. If this object does not have that id, because the share comes from another process or
    is too old, the agent reads its documents all the same, and the router gets no report. Threads and tasks may share
    one.
    """

    def __init__(
        self,
        router: AgentRouter,
        agents: Iterable[str] | None,
        placement: Placement,
        together: bool,
        planner: ContextPlanner | None,
        order_locked: bool,
        pinned: PinRule[Any] | None,
        choose: Choice | None,
        max_open: int,
    ) -> None:
        if not isinstance(router, AgentRouter):
            raise TypeError(f"router must be an AgentRouter, got {type(router).__name__}")
        if planner is not None and not isinstance(planner, ContextPlanner):
            raise TypeError(f"planner must be a ContextPlanner or None, got {type(planner).__name__}")
        if isinstance(agents, str):
            raise TypeError(f"agents must be names or None, got one str, {agents!r}")
        if placement not in get_args(Placement):
            raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
        if placement == "tail" and not together:
            why = "as a chat has one prompt per turn"
            raise ValueError(f"together must be True with placement='tail', {why}, got {together!r}")
        check_choice(choose, order_locked=order_locked)
        if max_open < 1:
            raise ValueError(f"max_open must be 1 or more, got {max_open}")
        self._router = router
        self._agents = None if agents is None else list(agents)
        self._met = {agent.name for agent in router.agents} & {*(self._agents or ())}
        """Those of them that the router had at some time."""
        self._placement: Placement = placement
        self._together = together
        self.planner = ContextPlanner() if planner is None else planner
        """Makes the plans that `planning` yields; an agent's name stands for the model."""
        self._order_locked = order_locked
        self._pinned = pinned
        self._choose = choose
        self._max_open = max_open
        # Re-entrant: the garbage collector may close a generator that stands in `reading` in the middle of any call.
        self._lock = fork_safe_lock()
        self._open: OrderedDict[str, dict[int, Assignment | None]] = OrderedDict()
        """By id and part; None for a share whose reading failed and may be tried again."""

    def commit(self, share: Any, *, report: EngineReport | None = None, plan: ContextPlan | None = None) -> bool:
        """Report that the agent's model saw its documents, with the engine's report inside `reading` and `planning`.

        Returns:
            True if the router got the report; False if the share was committed before, or its assignment is not here.
        """
        with self._lock:
            assignment = self._booked(share)
            if assignment is None:
                return False
            self._close(share)
        blocks = as_blocks(value_of(share, "documents"))
        return self._router.commit(assignment, value_of(share, "agent"), report, blocks=blocks, plan=plan)

    def abandon(self, share: Any) -> bool:
        """Report that the agent's model did not see its documents; they may be tried again. Returns as `commit`."""
        part = value_of(share, "part")
        with self._lock:
            shares = self._open.get(value_of(share, "assignment"), {})
            assignment = shares.get(part)
            if assignment is None:
                return False
            shares[part] = None
        blocks = as_blocks(value_of(share, "documents"))
        return self._router.abandon(assignment, value_of(share, "agent"), blocks=blocks)

    @contextmanager
    def reading(self, share: Any) -> Iterator[list[ContextBlock]]:
        """Yield the documents of a share as blocks: committed when the `with` block ends, abandoned if it raises.

        A share that is tried again counts once, whichever attempt succeeds.
        """
        blocks = as_blocks(value_of(share, "documents"), self._pinned)
        with self._lock:
            self._booked(share)
        try:
            yield blocks
        except BaseException:
            self.abandon(share)
            raise
        self.commit(share)

    @contextmanager
    def planning(
        self,
        share: Any,
        *,
        preamble: str | None = None,
        history: Iterable[Any] | None = None,
        conversation: Branch | None = None,
    ) -> Iterator[ContextPlan]:
        """Do the same as `reading`, with the documents planned for this agent.

        Args:
            share: The agent's share.
            preamble: The text in front of the context, as for `ContextPlanner.plan`.
            history: With `placement="tail"`: the messages of the chat with this agent, as for `ContextPlanner.plan`.
            conversation: With `placement="tail"` and without `history`: the last turn of the chat with this agent, if
                this process does not have its messages. Inside the `with` block, once the agent has answered, record
                the new turn: `fan_out.planner.commit(plan, turn_id=...)`. Without both, nothing is de-duplicated.
        """
        with self.reading(share) as blocks:
            options = self._plan_options(share, preamble, history, conversation)
            with self.planner.planning(blocks, **options) as plan:
                yield plan
            self.commit(share, plan=plan)

    @asynccontextmanager
    async def aplanning(
        self,
        share: Any,
        *,
        preamble: str | None = None,
        history: Iterable[Any] | None = None,
        conversation: Branch | None = None,
    ) -> AsyncIterator[ContextPlan]:
        """Do the same as `planning`, in a task; there, `await fan_out.planner.acommit(plan, turn_id=...)`."""
        with self.reading(share) as blocks:
            options = self._plan_options(share, preamble, history, conversation)
            async with self.planner.planning(blocks, **options) as plan:
                yield plan
            self.commit(share, plan=plan)

    def _shared_out(
        self, documents: Any, conversation: str | None, tenant: str | None, without: str | None = None
    ) -> list[Share]:
        """Assign every document, each to one share; of candidates, the chosen ones."""
        listed = as_list(documents)
        blocks = as_blocks(listed)
        # What one agent leaves to others was chosen before.
        choose, candidates = candidates_of(None if without else self._choose, listed, blocks)
        assignment = self._assign(candidates, self._names(without), conversation, tenant, choose)
        readers = {assigned.block.fingerprint: assigned.agent for assigned in assignment.blocks}
        shares: OrderedDict[object, tuple[str, list[Any]]] = OrderedDict()
        for document, block in zip(listed, blocks, strict=True):
            if (agent := readers.get(block.fingerprint)) is None:
                continue
            _, handed = shares.setdefault(agent if self._together else block.fingerprint, (agent, []))
            handed.append(as_plain(document))
        self._keep(assignment, len(shares))
        return [
            Share(agent, handed, assignment.id, part, len(shares))
            for part, (agent, handed) in enumerate(shares.values())
        ]

    def _moved(self, share: Any) -> list[Share]:
        """Assign the documents of a share to other agents, after its own failed."""
        with self._lock:
            self.abandon(share)
            if value_of(share, "part") in self._open.get(value_of(share, "assignment"), {}):
                self._close(share)
        names = value_of(share, "conversation"), value_of(share, "tenant")
        return self._shared_out(value_of(share, "documents"), *names, without=value_of(share, "agent"))

    def _names(self, without: str | None) -> list[str] | None:
        """Return the agents to choose from. One that left is skipped; one that never joined is the caller's error."""
        live = [agent.name for agent in self._router.agents]
        if self._agents is None:
            names = None if without is None else live
        else:
            self._met.update({*live} & {*self._agents})
            names = [name for name in self._agents if name in live or name not in self._met]
        if without is not None and names is not None:
            names = [name for name in names if name != without]
        if names == []:
            raise NoAgentError(f"no agent is left{'' if without is None else f' besides {without!r}'}")
        return names

    def _assign(
        self,
        blocks: Sequence[ContextBlock],
        agents: list[str] | None,
        conversation: str | None,
        tenant: str | None,
        choose: Choice | None = None,
    ) -> Assignment:
        # A context that is rebuilt each turn has nothing of earlier turns, except in the cache.
        chat = conversation if self._placement == "tail" else None
        return self._router.assign(
            blocks, agents, conversation=chat, tenant=tenant, together=self._together, choose=choose
        )

    def _keep(self, assignment: Assignment, parts: int) -> None:
        with self._lock:
            if parts:
                self._open[assignment.id] = dict.fromkeys(range(parts), assignment)
            forgotten = self._open.popitem(last=False)[1] if len(self._open) > self._max_open else {}
        for booked in {id(booked): booked for booked in forgotten.values()}.values():
            if booked is not None:
                self._router.abandon(booked)

    def _booked(self, share: Any) -> Assignment | None:
        """Return the assignment of a share, a new one if it was abandoned; None if it was committed or is not here."""
        part = value_of(share, "part")
        shares = self._open.get(value_of(share, "assignment"), {})
        if part in shares and shares[part] is None:
            blocks = as_blocks(value_of(share, "documents"))
            names = value_of(share, "conversation"), value_of(share, "tenant")
            # If the agent has failed or left meanwhile, the router gets no report.
            with suppress(NoAgentError, ValueError):
                shares[part] = self._assign(blocks, [value_of(share, "agent")], *names)
        return shares.get(part)

    def _close(self, share: Any) -> None:
        shares = self._open[value_of(share, "assignment")]
        del shares[value_of(share, "part")]
        if not shares:
            del self._open[value_of(share, "assignment")]

    def _plan_options(
        self, share: Any, preamble: str | None, history: Iterable[Any] | None, branch: Branch | None
    ) -> dict[str, Any]:
        if branch is not None and not isinstance(branch, Branch):
            raise TypeError(f"conversation must be a Branch or None, got {type(branch).__name__}")
        agent, conversation = value_of(share, "agent"), value_of(share, "conversation")
        options = {"conversation": conversation, "tenant": value_of(share, "tenant"), "model": agent}
        if self._placement == "tail" and history is not None:
            chat = None if conversation is None else json.dumps([conversation, agent])  # each agent has its own
            options |= {"conversation": chat, "placement": "tail", "history": history}
        elif self._placement == "tail" and branch is not None:
            options |= {"conversation": branch, "placement": "tail"}
        return {**options, "preamble": preamble, "order_locked": self._order_locked}
