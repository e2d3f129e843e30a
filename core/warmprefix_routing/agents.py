"""`AgentRouter`: each document to an agent that holds it, under a bound on the agents' loads."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, joined_blocks, single_places
from warmprefix.choice import Candidates, Choice
from warmprefix.errors import NoAgentError
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency import EngineReport, FoundCheckpoints
from warmprefix_routing.agent_state import AgentBounds, AgentTenant, AgentView, Bookings
from warmprefix_routing.assignments import Assignment, RouterStats
from warmprefix_routing.fleet import Fleet, check_request
from warmprefix_routing.members import Agent, Member, check_type
from warmprefix_routing.segments import Segment, name_digest, read_segment, routing_scope, write_segment

if TYPE_CHECKING:
    from typing_extensions import Self

    from warmprefix_redis.settings import SharedSettings

__all__ = ["AgentRouter"]

_log = logging.getLogger("warmprefix")
_failed_choices = itertools.count()


class AgentRouter(Fleet[AgentTenant]):
    """Assigns the documents of a request to agents, each of which has an engine with a prefix cache of its own.

    A block goes to an agent that holds it: one that read it earlier in the conversation, or whose engine has it cached.
    A block that no agent holds goes to the agents with the least work, by rendezvous hashing. No agent receives a block
    that would take its load above `1 + eps` times the agents' mean, unless it is the least loaded; the block spills to
    the same other agent each time, so that hot documents are soon held by as many agents as their load needs.
    `warmprefix_routing.balance` has the algorithm: ContextPilot's agent-aware routing, and CRAFT's affinity without
    hotspots. An agent that joins, leaves or fails moves only the blocks that go to it, or went to it.

    Load is counted in tokens of assigned blocks, cached or not, and decays exponentially. All state is kept per tenant,
    load included: one tenant's requests change nothing for another, and a bound that holds for each holds for all. No
    text is kept. Deterministic given the earlier calls; thread-safe; without I/O.

    >>> router = AgentRouter(["ann", "ben"])
    >>> documents = [ContextBlock("The sea is deep.", id="sea"), ContextBlock("The sky is high.", id="sky")]
    >>> first = router.assign(documents)
    >>> router.commit(first)
    True
    >>> again = router.assign(reversed(documents))
    >>> again.held_tokens == again.total_tokens
    True
    """

    _kind = "agent"
    _spec = Agent
    _closes_feeds = False

    def __init__(
        self,
        agents: Iterable[Agent | str] = (),
        *,
        bounds: AgentBounds | None = None,
        sharing: OrderSharing | None = None,
    ) -> None:
        """Start with empty caches.

        Args:
            bounds: Numbers that are rarely changed; None for the defaults.
            sharing: Carries assignments to and from other routers of the same agents; None shares nothing. It must not
                be a planner's: `close` closes it.

        Raises:
            TypeError: An argument has another type.
            ValueError: Two agents have one name.
        """
        bounds = AgentBounds() if bounds is None else bounds
        check_type("bounds", bounds, AgentBounds)
        check_type("sharing", sharing, OrderSharing, optional=True)
        self._bounds = bounds
        self._sharing: OrderSharing = NoSharing() if sharing is None else sharing
        self._patience = 0.0
        """Seconds that a tenant's first request waits for the newest assignments of other routers."""
        self._sharing_answers = True
        self._arrivals: dict[str | None, threading.Event] = {}
        """Set when the newest assignments of a tenant have been learned."""
        super().__init__(agents, bounds.max_tenants, bounds.max_bytes)

    @classmethod
    def from_url(
        cls,
        url: str | None = None,
        agents: Iterable[Agent | str] = (),
        *,
        settings: SharedSettings | None = None,
        bounds: AgentBounds | None = None,
    ) -> Self:
        """Return a router that learns from all routers of these agents that use the same Redis or Valkey.

        So a restarted process goes on with the routing of the one before. The first request of a tenant waits for the
        latest assignments, up to `store_budget` of the settings; a server that is down costs hits and nothing else.
        `close` it at the end, or use it as a context manager. `agents` and `bounds` are as for `AgentRouter`.

        Args:
            url: As for `RedisSeenStore`; by default that of the settings.
            settings: By default those of the environment: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_KEY_PREFIX`, and
                `WARMPREFIX_SHARE_ORDERS`, without which nothing is shared.

        Raises:
            MissingExtraError: The extra `redis` is not installed.
            ValueError: There is no URL, or an unusable one.
        """
        from warmprefix_redis import SharedSettings, shared_orders  # needs an extra

        settings = SharedSettings() if settings is None else settings
        router = cls(agents, bounds=bounds, sharing=shared_orders(url, settings, newest_first=True))
        router._patience = settings.store_budget * settings.share_orders
        return router

    @property
    def agents(self) -> tuple[Agent, ...]:
        """The agents that blocks can go to, in the order in which they joined."""
        with self._lock:
            return tuple(member.spec for member in self._members.values())

    @property
    def failed(self) -> tuple[Agent, ...]:
        """The agents that failed and have not joined again."""
        with self._lock:
            return tuple(member.spec for member in self._failed.values())

    def assign(
        self,
        blocks: Iterable[ContextBlock | str],
        agents: Iterable[str] | None = None,
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        together: bool = False,
        choose: Choice | None = None,
    ) -> Assignment:
        """Assign each distinct block to one agent.

        The blocks count as load and as held from now on, so that simultaneous requests find the same agents. Call
        `commit` once the agents' models have seen the blocks, or `abandon` for those that they have not.

        Args:
            blocks: In relevance order. A string is a block without an id.
            agents: Names of the agents to choose from; None for all. Failed ones are skipped.
            conversation: Names a conversation in which each agent keeps a chat of its own: blocks that an agent has
                read there go to it again.
            tenant: Tenants share nothing.
            together: True if the blocks of one agent will stand in one prompt instead of one each. Only the first of
                them is right behind the preamble, so blocks are spread more evenly, which saves less. Within a
                conversation they follow the agent's chat, where a cached copy is of no use. Neighbours of one source go
                to one agent; see `follows` of `ContextBlock`.
            choose: Which blocks are read, in view of what the tenant read lately; in a conversation, the first ones.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: An argument has another type.
            ValueError: `agents` is empty or has a repeated or unknown name; `conversation` is empty; a score is no use.
        """
        blocks = as_blocks(blocks)
        check_request(conversation, tenant=tenant)
        candidates = None if choose is None else Candidates.checked(choose, blocks, _log_choice)
        self.catch_up(tenant)
        with self._lock:
            names = list(self._members) if agents is None else self._available(agents)
            if not names:
                raise NoAgentError("no agent is available")
            if candidates is None:
                distinct, places = distinct_blocks(blocks)
                return self._assign(
                    tenant, conversation, distinct, places, joined_blocks(blocks, places), names, together
                )
            given = candidates.feeding(self._tenants.use(tenant).choose(candidates, conversation))
            assignment = self._assign(tenant, conversation, *given, names, together)
            return replace(assignment, left_out=candidates.left_out([places[0] for places in given[1]]))

    def catch_up(self, tenant: str | None = None) -> None:
        """Wait for what other routers assigned lately, if nothing of this tenant was assigned here yet.

        `assign` does it, too: call this in a thread before, if your event loop must not wait. After a wait in vain, no
        request waits until something was learned again.

        Raises:
            TypeError: `tenant` is not a `str`.
        """
        check_request(None, tenant=tenant)
        if not self._patience:
            return
        with self._lock:
            if tenant not in self._tenants.states:
                self._arrivals[tenant] = threading.Event()
                self._tenants.use(tenant)
            arrival = self._arrivals.get(tenant)
        if arrival is not None and self._sharing_answers:
            self._sharing_answers = arrival.wait(self._patience)
            self._arrivals.pop(tenant, None)

    def reassign(self, assignment: Assignment, agent: str) -> Assignment:
        """Assign to others what one agent has not read.

        These are the blocks neither committed nor abandoned; or all of the agent's blocks, if the assignment comes from
        another process or its bookings were forgotten. The agent's bookings are taken back. If it failed, call `fail`
        first, so that it can't be chosen again.

        Returns:
            A new assignment with these blocks only.

        Raises:
            NoAgentError: No other agent of the assignment is available.
            TypeError: `assignment` is not an `Assignment`.
        """
        check_type("assignment", assignment, Assignment)
        with self._lock:
            state = self._tenants.use(assignment.tenant)
            left = state.left(assignment, agent, self._instance)
            others = [name for name in assignment.agents if name != agent and name in self._members]
            if not others and left:
                raise NoAgentError(f"no other agent is available for the blocks of {agent!r}")
            self.abandon(assignment, agent)
            blocks, places = [each.block for each in left], [each.positions for each in left]
            given = blocks, places, joined_blocks(blocks, single_places(len(blocks)))
            return self._assign(assignment.tenant, assignment.conversation, *given, others, assignment.together)

    def _assign(
        self,
        tenant: str | None,
        conversation: str | None,
        blocks: Sequence[ContextBlock],
        places: Sequence[tuple[int, ...]],
        joined: Collection[int],
        names: Sequence[str],
        together: bool,
    ) -> Assignment:
        state = self._tenants.use(tenant)
        self._number += 1
        id = f"{self._instance}.{self._number}"
        assigned = state.assign(id, self._number, blocks, places, joined, names, _digest(conversation), together)
        self._tenants.record(tenant, state, used=True)
        held = [each.block.tokens for each in assigned if each.held is not None]
        tokens = sum([each.block.tokens for each in assigned])
        self._counts.update(assignments=1, blocks=len(assigned), held=len(held), held_tokens=sum(held))
        self._counts.update(spilled=sum([each.spilled for each in assigned]), tokens=tokens)
        return Assignment(id, tenant, conversation, tuple(names), assigned, together)

    def commit(
        self,
        assignment: Assignment,
        agent: str | None = None,
        report: EngineReport | None = None,
        *,
        blocks: Iterable[ContextBlock | str] | None = None,
        plan: ContextPlan | None = None,
    ) -> bool:
        """Record that an agent's model saw its blocks.

        Args:
            assignment: One of this router's.
            agent: None for all.
            report: The engine's report on the answer. If hardly anything was cached of a prompt whose first block the
                agent had read before, the agent counts as having lost all blocks that it read before that.
            blocks: The blocks, if they stand in several prompts; None for all.
            plan: The plan that the prompt was made of: it has the prompt's first block, and a feed finds its blocks. By
                default the first block is the most relevant one.

        Returns:
            True if anything was still open; otherwise nothing is recorded.

        Raises:
            TypeError: `assignment`, `report` or `plan` has another type.
        """
        check_type("assignment", assignment, Assignment)
        check_type("report", report, EngineReport, optional=True)
        check_type("plan", plan, ContextPlan, optional=True)
        keys = None if blocks is None else {block.fingerprint for block in as_blocks(blocks)}
        is_current = self._inform_feed(assignment, agent, report, plan)
        with self._lock:
            state = self._tenants.states.get(assignment.tenant)
            read = {} if state is None else state.close(assignment.id, agent, keys)
            if state is None or not read:
                return False
            state.settle(read.values())
            by_agent: dict[AgentView, Bookings] = {}
            for key, booking in read.items():
                by_agent.setdefault(booking.agent, {})[key] = booking
            conversation = _digest(assignment.conversation)
            for view, bookings in by_agent.items():
                if not view.alive:
                    continue
                if conversation is not None:
                    state.record_read(conversation, view, bookings)
                if not isinstance(self._sharing, NoSharing):
                    tokens = [(key, booking.tokens) for key, booking in bookings.items()]
                    segment = Segment(self._members[view.name].digest, conversation, tokens)
                    for order in write_segment(segment):
                        self._sharing.publish(routing_scope(assignment.tenant), order)
            if report is not None and not is_current and len(by_agent) == 1:
                self._counts["stale"] += state.correct(assignment, read, report, plan)
            if state.memory_bytes > state.recorded_bytes:  # a decrease is noticed before anything shrinks
                self._tenants.record(assignment.tenant, state)
        return True

    def abandon(
        self, assignment: Assignment, agent: str | None = None, *, blocks: Iterable[ContextBlock | str] | None = None
    ) -> bool:
        """Take back blocks that an agent's model did not see: neither their load nor their copies count any more.

        Blocks that left the agent's predicted cache for them do not come back. Arguments and result are as for
        `commit`.

        Raises:
            TypeError: `assignment` is not an `Assignment`.
        """
        check_type("assignment", assignment, Assignment)
        keys = None if blocks is None else {block.fingerprint for block in as_blocks(blocks)}
        with self._lock:
            state = self._tenants.states.get(assignment.tenant)
            unread = {} if state is None else state.close(assignment.id, agent, keys)
            if state is None or not unread:
                return False
            state.take_back(unread)
            self._counts["abandoned"] += len(unread)
        return True

    def end(self, conversation: str, tenant: str | None = None) -> None:
        """Forget a conversation's chats.

        Raises:
            TypeError: `conversation` or `tenant` is not a `str`.
            ValueError: `conversation` is empty.
        """
        check_request(conversation, tenant=tenant)
        check_type("conversation", conversation, str)
        with self._lock:
            state = self._tenants.states.get(tenant)
            if state is not None:
                state.end(name_digest("conversation", conversation))
                self._tenants.record(tenant, state)

    def _inform_feed(
        self, assignment: Assignment, agent: str | None, report: EngineReport | None, plan: ContextPlan | None
    ) -> bool:
        """Give the prompt to the agent's feed. True if the feed makes the report superfluous."""
        if report is None or report.prompt_token_ids is None or plan is None:
            return False
        agents = {assigned.agent for assigned in assignment.blocks}
        name = agent or (agents.pop() if len(agents) == 1 else "")
        member = self._members.get(name) or self._failed.get(name)
        if member is not None and member.feed is not None and plan.opens_prompt and plan.blocks:
            member.add_first_block(plan, self._bounds.max_blocks)
        return self._remember_prompt(member, plan, report) and self._feed_is_current(member, plan, report)

    def _apply_residency(
        self,
        member: Member,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None,
    ) -> None:
        """Apply a report on a prompt's first block, the only one right behind the preamble, where others share it."""
        with self._lock:
            tokens = member.first_blocks.get((scope.tenant, keys[0])) if keys else None
            state = self._tenants.states.get(scope.tenant)
            if tokens is None or state is None or not member.alive:
                return
            if resident_blocks > 0:
                state.hold(state.agents[member.name], keys[0], tokens)
            else:
                state.drop(state.agents[member.name], keys[0])
            self._tenants.record(scope.tenant, state)

    def _learn(self, tenant: str | None, orders: Sequence[LearnedOrder]) -> None:
        """Record the segments of other routers."""
        with self._lock:
            names = {member.digest: name for name, member in self._members.items()}
            for segment in map(read_segment, orders):
                state = self._tenants.states.get(tenant)
                if segment is not None and state is not None and segment.agent in names:
                    state.learn(names[segment.agent], segment.blocks, segment.conversation)
                    self._counts["learned"] += len(segment.blocks)
                    self._tenants.record(tenant, state)
            self._sharing_answers = True
            if (arrival := self._arrivals.pop(tenant, None)) is not None:
                arrival.set()

    def _new_tenant(self, tenant: str | None) -> AgentTenant:
        self._sharing.follow(routing_scope(tenant), partial(_learn, weakref.WeakMethod(self._learn), tenant))
        salt = b"" if tenant is None else name_digest("tenant", tenant)
        return AgentTenant(self._members.values(), self._bounds, self._number, salt)

    def _tenant_forgotten(self, tenant: str | None, state: AgentTenant) -> None:
        self._sharing.unfollow(routing_scope(tenant))
        self._arrivals.pop(tenant, None)

    def load(self, tenant: str | None = None) -> dict[str, float]:
        """Return the tokens that each agent was assigned lately, over its weight. Empty for a new tenant."""
        with self._lock:
            state = self._tenants.states.get(tenant)
            return {} if state is None else {name: agent.load for name, agent in state.agents.items()}

    def stats(self) -> RouterStats:
        """Return counts since the router was created or reset. O(agents * tenants)."""
        with self._lock:
            states = self._tenants.states.values()
            return RouterStats(
                **self._counts,
                failures=self._failures,
                open=sum(len(state.open) for state in states),
                tenants=len(states),
                replicas=sum(state.copies for state in states),
                memory_bytes=sum(state.memory_bytes for state in states),
            )

    def reset(self) -> None:
        with self._lock:
            for tenant in self._tenants.states:
                self._sharing.unfollow(routing_scope(tenant))
            self._arrivals.clear()
            for member in [*self._members.values(), *self._failed.values()]:
                member.first_blocks.clear()
            super().reset()

    def close(self) -> None:
        """End the sharing with other routers. Idempotent."""
        self._sharing.close()


def _log_choice() -> None:
    level = logging.WARNING if next(_failed_choices) == 0 else logging.DEBUG
    _log.log(level, "documents are assigned without a function of their choice", exc_info=True)


def _learn(learn: weakref.WeakMethod[Any], tenant: str | None, orders: Sequence[LearnedOrder]) -> None:
    """Call the router's method, unless the router is gone: the sharing must not keep it alive."""
    if (alive := learn()) is not None:
        alive(tenant, orders)


def _digest(conversation: str | None) -> bytes | None:
    return None if conversation is None else name_digest("conversation", conversation)
