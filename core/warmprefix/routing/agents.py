"""`AgentRouter`: each document to the agent that already knows it, and to no agent too many."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks
from warmprefix.errors import NoAgentError
from warmprefix.forks import in_each_process
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency.base import EngineReport, ResidencyFeed, ServedPrompt
from warmprefix.routing.balance import Choice, Item, share_out
from warmprefix.routing.base import Agent, AssignedBlock, Assignment, Held, RouterStats, as_agent
from warmprefix.routing.learning import LearnedSegment, name_digest, read_segment, routing_scope, write_segments
from warmprefix.routing.tenants import Booking, Member, TenantAgents
from warmprefix.sharing.base import LearnedOrder, NoSharing, OrderSharing

if TYPE_CHECKING:
    from typing_extensions import Self

    from warmprefix.settings import SharedSettings

__all__ = ["AgentRouter"]

_log = logging.getLogger("warmprefix")


class AgentRouter:
    """Shares out the documents of a request over agents, each of which has an engine with a prefix cache of its own.

    A block goes to an agent that holds it: one that was told it earlier in the conversation, or whose engine has it
    cached. What nobody holds is spread by rendezvous hashing. No agent is given a block that would take its load above
    `1 + eps` times the agents' mean, unless it is the least loaded; what spills goes to the same further agent each
    time, so that hot documents are soon held by as many agents as their load needs. `warmprefix.routing.balance` says
    it exactly. It solves what ContextPilot calls agent-aware routing, and CRAFT affinity without hotspots.

    An agent that joins, leaves or fails moves only the blocks that go to it, or went.

    Load is counted in tokens of blocks given, cached or not, and forgotten exponentially. All that is known is kept by
    tenant, load included: what one tenant asks changes nothing for another, and a bound that holds for each holds for
    all. No text is kept. Deterministic in what it was told before; thread-safe, and free of I/O.

    >>> router = AgentRouter(["ann", "ben"])
    >>> documents = [ContextBlock("The sea is deep.", id="sea"), ContextBlock("The sky is high.", id="sky")]
    >>> first = router.assign(documents)
    >>> router.commit(first)
    True
    >>> again = router.assign(reversed(documents))
    >>> again.held_tokens == again.total_tokens
    True
    """

    def __init__(
        self,
        agents: Iterable[Agent | str] = (),
        *,
        eps: float = 0.25,
        window_tokens: int = 65_536,
        free_tokens: int = 4_096,
        max_blocks: int = 65_536,
        max_tenants: int = 1_024,
        max_conversations: int = 4_096,
        max_open: int = 65_536,
        sharing: OrderSharing | None = None,
    ) -> None:
        """No agent has been given anything yet.

        Args:
            agents: Those that there are; `join` adds others.
            eps: How far an agent's load may be above the mean, as a share of it; more means more hits and less
                balance.
            window_tokens: After so many tokens an agent, a load counts for 1/e of what it did.
            free_tokens: An agent whose load is no higher than this has room whatever the mean: a tenant of little
                traffic makes no hotspot, and would otherwise lose hits to its first requests.
            max_blocks: Most blocks remembered of an agent, and most of a conversation.
            max_tenants: Most tenants remembered; beyond it the one not heard of longest is forgotten.
            max_conversations: Most conversations remembered of a tenant.
            max_open: Most assignments neither committed nor abandoned; beyond it the oldest count as they are.
            sharing: Where other routers of the same agents are told what this one's did, and the other way round;
                nowhere by default. Not a planner's: it is this router's own, and closed with it.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: Two agents have one name, or a number is out of range.
        """
        if not 0 <= eps < float("inf"):
            raise ValueError(f"eps must be 0 or more, and finite, got {eps}")
        if free_tokens < 0:
            raise ValueError(f"free_tokens must be 0 or more, got {free_tokens}")
        for name, value in (
            ("window_tokens", window_tokens),
            ("max_blocks", max_blocks),
            ("max_tenants", max_tenants),
            ("max_conversations", max_conversations),
            ("max_open", max_open),
        ):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if sharing is not None and not isinstance(sharing, OrderSharing):
            raise TypeError(f"sharing must be an OrderSharing or None, got {type(sharing).__name__}")
        if isinstance(agents, str):
            raise TypeError("agents must be several agents or names, got one str")
        self._eps = eps
        self._window_tokens = window_tokens
        self._free_tokens = free_tokens
        self._max_blocks = max_blocks
        self._max_tenants = max_tenants
        self._max_conversations = max_conversations
        self._max_open = max_open
        self._sharing: OrderSharing = NoSharing() if sharing is None else sharing
        self._agents: dict[str, Agent] = {}
        self._failed: dict[str, Agent] = {}
        self._digests: dict[bytes, str] = {}
        self._feeds: dict[str, _AgentFeed] = {}
        self._tenants: OrderedDict[str | None, TenantAgents] = OrderedDict()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._counts: Counter[str] = Counter()
        in_each_process(self._renew)
        for agent in agents:
            self.join(agent)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._instance = uuid.uuid4().hex
        self._number = 0

    @classmethod
    def from_url(
        cls,
        url: str | None = None,
        agents: Iterable[Agent | str] = (),
        *,
        settings: SharedSettings | None = None,
        **options: object,
    ) -> Self:
        """A router that shares what it learns with all others of the same Redis or Valkey, and of these agents.

        It connects in the background; a server that is down costs hits and nothing else. `close` it at the end, or use
        it as a context manager.

        Args:
            url: As `RedisSeenStore` takes it; by default that of the settings.
            agents: As `AgentRouter` takes them.
            settings: By default, what the environment says: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_KEY_PREFIX`.
            options: As `AgentRouter` takes them.

        Raises:
            MissingExtraError: The extra `redis` is not installed.
            ValueError: Neither gives a URL, or it is none that can be used, or an option is out of range.
        """
        from warmprefix.settings import SharedSettings
        from warmprefix.sharing.redis import RedisOrderSharing

        given = SharedSettings() if settings is None else settings
        address = given.redis_url if url is None else url
        if not address:
            raise ValueError("url must be given, or WARMPREFIX_REDIS_URL be set")
        return cls(agents, sharing=RedisOrderSharing(address, prefix=given.key_prefix), **options)  # type: ignore[arg-type]

    # -- who is there ------------------------------------------------------------------------------------------

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Those that blocks can be given to, in the order in which they joined."""
        with self._lock:
            return tuple(self._agents.values())

    def join(self, agent: Agent | str, feed: ResidencyFeed | None = None) -> None:
        """An agent is there, for the first time or again. It begins with the mean load, and holds nothing.

        Args:
            agent: Or its name.
            feed: Knows from its engine what it holds. It is asked to follow, and not closed by the router.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: An agent of this name is there.
        """
        agent = as_agent(agent)
        if feed is not None and not isinstance(feed, ResidencyFeed):
            raise TypeError(f"feed must be a ResidencyFeed or None, got {type(feed).__name__}")
        with self._lock:
            if agent.name in self._agents:
                raise ValueError(f"agents must have names of their own, got {agent.name!r} twice")
            self._failed.pop(agent.name, None)
            self._agents[agent.name] = agent
            self._digests[name_digest("agent", agent.name)] = agent.name
            for tenant in self._tenants.values():
                tenant.join(agent)
        if feed is not None:
            self._feeds[agent.name] = fed = _AgentFeed(self, agent.name, feed, self._max_blocks)
            feed.follow(fed)

    def leave(self, name: str) -> None:
        """An agent is gone for good: its blocks go to others from now on.

        Raises:
            ValueError: No agent of this name was there.
        """
        with self._lock:
            if self._failed.pop(name, None) is None:
                self._remove(name)

    def fail(self, name: str) -> None:
        """An agent can't be reached: what it held and was told is forgotten, and others get its blocks until it joins.

        Idempotent, so that several who notice can say so.

        Raises:
            ValueError: No agent of this name was there.
        """
        with self._lock:
            if name not in self._failed:
                self._failed[name] = self._remove(name)
                self._counts["failures"] += 1

    def _remove(self, name: str) -> Agent:
        agent = self._agents.pop(name, None)
        if agent is None:
            raise ValueError(f"agents must be registered, got {name!r}")
        self._feeds.pop(name, None)
        del self._digests[name_digest("agent", name)]
        for tenant in self._tenants.values():
            tenant.leave(name)
        return agent

    # -- sharing out -------------------------------------------------------------------------------------------

    def assign(
        self,
        blocks: Iterable[ContextBlock | str],
        agents: Iterable[str] | None = None,
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        together: bool = False,
    ) -> Assignment:
        """Give each distinct block to one agent.

        From then on its load and its holding them count, so that requests at the same time find the same agents. Owe it
        a `commit` once the agents' models have seen them, or an `abandon` of those that have not.

        Args:
            blocks: In relevance order. A string is a block without an id.
            agents: Names of those that can be chosen; None for all that are there. Failed ones are passed over.
            conversation: Names a conversation in which each agent keeps a chat of its own: blocks that one was told go
                to it again.
            tenant: Whose request. Nothing is shared between tenants.
            together: The blocks of one agent are to stand in one prompt rather than each in one of its own. Only the
                first of them is right behind the preamble, so they are spread more evenly, and it saves less. With a
                conversation it is one chat: blocks go behind what it has already, where no cached copy is of use.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: An argument has another type than the above.
            ValueError: `agents` is empty, names one twice, or names one that was never there; or `conversation` is
                empty.
        """
        listed = as_blocks(blocks)
        _check_names(conversation=conversation, tenant=tenant)
        distinct, places = distinct_blocks(listed)
        digest = None if conversation is None else name_digest("conversation", conversation)
        with self._lock:
            names = self._live(agents)
            state = self._tenant(tenant)
            return self._give(state, tenant, conversation, digest, distinct, places, names, together)

    def reassign(self, assignment: Assignment, agent: str) -> Assignment:
        """Give what one agent of an assignment did not read to the others.

        What it had been given is taken back, unless it was committed; then nothing is left to give. Say `fail` first if
        it failed: who is there can be chosen again.

        Returns:
            A new assignment with these blocks only.

        Raises:
            NoAgentError: No other agent of the assignment is there.
            TypeError: `assignment` is none.
        """
        _check_assignment(assignment)
        with self._lock:
            opened = self._open.get(assignment.id)
            # Not known if it is of another process, or long forgotten: then it is all that the agent was given.
            unread = opened.unread(agent) if opened is not None and opened.tenant == assignment.tenant else None
            left = [
                assigned
                for assigned in assignment.blocks
                if assigned.agent == agent and (unread is None or assigned.block.fingerprint in unread)
            ]
            self.abandon(assignment, agent)
            others = [name for name in assignment.agents if name != agent and name in self._agents]
            if not others and left:
                raise NoAgentError(f"no agent is left to read what {agent!r} did not")
            conversation = assignment.conversation
            return self._give(
                self._tenant(assignment.tenant),
                assignment.tenant,
                conversation,
                None if conversation is None else name_digest("conversation", conversation),
                [assigned.block for assigned in left],
                [assigned.positions for assigned in left],
                others,
                assignment.together,
            )

    def _give(
        self,
        state: TenantAgents,
        tenant: str | None,
        conversation: str | None,
        digest: bytes | None,
        blocks: Sequence[ContextBlock],
        places: Sequence[tuple[int, ...]],
        names: Sequence[str],
        together: bool,
    ) -> Assignment:
        members = [state.members[name] for name in names]
        told, chatting = state.told(digest)
        everybody = len(members) == len(state.members)
        items: list[Item] = []
        sources: list[Held] = []
        for block in blocks:
            key = block.fingerprint
            source: Held = "cache"
            holders: Sequence[Member] = ()
            if key in told:
                holders = [member for member in told[key] if member.alive and (everybody or member in members)]
            if holders:
                source = "conversation"
            else:
                holders = state.holders.get(key, ())
                if not everybody:
                    holders = [member for member in holders if member in members]
                if together and chatting:  # behind what the chat has already, no cached copy is of use
                    holders = [member for member in holders if member not in chatting]
            items.append(Item(key, block.tokens, holders))
            sources.append(source)
        choices: list[Choice] = []
        if items:
            state.age(sum([item.tokens for item in items]))
            choices = share_out(items, members, self._eps, self._free_tokens, together)
        bookings: dict[bytes, Booking] = {}
        assigned: list[AssignedBlock] = []
        for block, positions, (chosen, held, spilled), source in zip(blocks, places, choices, sources, strict=True):
            name = chosen.name
            bookings[block.fingerprint] = state.book(state.members[name], block.fingerprint, block.tokens)
            assigned.append(AssignedBlock(block, positions, name, source if held else None, spilled))
        self._number += 1
        assignment = Assignment(
            f"{self._instance}.{self._number}", tenant, conversation, tuple(names), tuple(assigned), together
        )
        if bookings:
            self._open[assignment.id] = _Open(tenant, bookings)
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)
        counts = self._counts
        counts["assignments"] += 1
        counts["blocks"] += len(assigned)
        for given in assigned:
            counts["tokens"] += given.block.tokens
            if given.held is not None:
                counts["held"] += 1
                counts["held_tokens"] += given.block.tokens
            elif given.spilled:
                counts["spilled"] += 1
        return assignment

    def _live(self, agents: Iterable[str] | None) -> list[str]:
        if agents is None:
            names = list(self._agents)
        else:
            if isinstance(agents, str):
                raise TypeError("agents must be several names, got one str")
            named = list(agents)
            if not named:
                raise ValueError("agents must name one or more, got none")
            for name, times in Counter(named).items():
                if times > 1:
                    raise ValueError(f"agents must name each once, got {name!r} twice")
                if name not in self._agents and name not in self._failed:
                    raise ValueError(f"agents must be registered, got {name!r}")
            names = [name for name in named if name in self._agents]
        if not names:
            raise NoAgentError("no agent is there to be given a block")
        return names

    # -- what became of it -------------------------------------------------------------------------------------

    def commit(
        self,
        assignment: Assignment,
        agent: str | None = None,
        report: EngineReport | None = None,
        *,
        blocks: Iterable[ContextBlock] | None = None,
        plan: ContextPlan | None = None,
    ) -> bool:
        """The model of an agent saw what it was given.

        Args:
            assignment: Of this router.
            agent: Whose blocks; None for those of all.
            report: What its engine said of the answer. If hardly anything was cached of a prompt whose first block the
                agent should have held, it is taken to hold nothing that it was given before that.
            blocks: Which of them, if they stand in several prompts; None for all.
            plan: The one that the prompt was made of, whose first block is the prompt's, and in which a feed finds the
                blocks. By default the first block is the most relevant.

        Returns:
            Whether anything was still open; otherwise nothing is learned.

        Raises:
            TypeError: `assignment`, `report` or `plan` has another type than the above.
        """
        _check_assignment(assignment)
        if report is not None and not isinstance(report, EngineReport):
            raise TypeError(f"report must be an EngineReport or None, got {type(report).__name__}")
        if plan is not None and not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan or None, got {type(plan).__name__}")
        fed = None if report is None or agent is None else self._fed(agent, report, plan)
        with self._lock:
            read = self._close(assignment, agent, blocks)
            state = self._tenants.get(assignment.tenant)
            if not read or state is None:
                return bool(read)
            digest = None
            if assignment.conversation is not None:
                digest = name_digest("conversation", assignment.conversation)
            by_member: dict[Member, list[Booking]] = {}
            for booking in read:
                by_member.setdefault(booking.member, []).append(booking)
            for member, bookings in by_member.items():
                if digest is not None and member.alive:
                    state.tell(digest, member, [booking.key for booking in bookings])
                self._share(assignment.tenant, member, digest, bookings)
            if report is not None and not fed and len(by_member) == 1:
                self._correct(state, assignment, read, report, plan)
        return True

    def abandon(
        self, assignment: Assignment, agent: str | None = None, *, blocks: Iterable[ContextBlock] | None = None
    ) -> bool:
        """An agent's model did not see what it was given: its load, and its holding that, are taken back.

        Args and result as for `commit`.

        Raises:
            TypeError: `assignment` is none.
        """
        _check_assignment(assignment)
        with self._lock:
            unread = self._close(assignment, agent, blocks)
            state = self._tenants.get(assignment.tenant)
            if state is not None:
                for booking in unread:
                    state.take_back(booking)
            self._counts["abandoned"] += len(unread)
        return bool(unread)

    def end(self, conversation: str, tenant: str | None = None) -> None:
        """A conversation's chats are gone: what its agents were told counts for nothing any more."""
        with self._lock:
            state = self._tenants.get(tenant)
            if state is not None:
                state.end(name_digest("conversation", conversation))

    def _close(self, assignment: Assignment, agent: str | None, blocks: Iterable[ContextBlock] | None) -> list[Booking]:
        opened = self._open.get(assignment.id)
        if opened is None or opened.tenant != assignment.tenant:  # another tenant's, under an id it has no right to
            return []
        keys = None if blocks is None else {block.fingerprint for block in blocks}
        closed = [
            booking
            for key, booking in opened.bookings.items()
            if (agent is None or booking.member.name == agent) and (keys is None or key in keys)
        ]
        for booking in closed:
            del opened.bookings[booking.key]
        if not opened.bookings:
            del self._open[assignment.id]
        return closed

    def _correct(
        self,
        state: TenantAgents,
        assignment: Assignment,
        read: Sequence[Booking],
        report: EngineReport,
        plan: ContextPlan | None,
    ) -> None:
        """Learn from a report that the first block was not cached."""
        if report.cached_tokens is None:
            return
        first = read[0]
        if plan is not None and plan.blocks:
            if not plan.opens_prompt or plan.blocks[0].reference is not None:
                return
            key = plan.blocks[0].block.fingerprint
            first = next((booking for booking in read if booking.key == key), first)
        cached = any(
            assigned.held == "cache" for assigned in assignment.blocks if assigned.block.fingerprint == first.key
        )
        if cached and report.cached_tokens < first.tokens / 2:
            self._counts["stale"] += state.drop_as_old(first)

    # -- feeds -------------------------------------------------------------------------------------------------

    def _fed(self, agent: str, report: EngineReport, plan: ContextPlan | None) -> bool:
        """Have the agent's feed find the plan's blocks; returns whether it knows better than a report."""
        fed = self._feeds.get(agent)
        if fed is None or plan is None or report.prompt_token_ids is None:
            return False
        try:
            if plan.opens_prompt and plan.blocks:
                fed.remember(plan, report.prompt_token_ids)
            return fed.feed.knows(plan.cache_salt)
        except Exception:
            with self._lock:
                self._counts["feed_errors"] += 1
                first = self._counts["feed_errors"] == 1
            _log.log(logging.WARNING if first else logging.DEBUG, "feed of agent %r failed", agent, exc_info=True)
            return False

    def _residency_changed(self, agent: str, tenant: str | None, key: bytes, tokens: int, resident: bool) -> None:
        with self._lock:
            state = self._tenants.get(tenant)
            member = None if state is None else state.members.get(agent)
            if state is None or member is None:
                return
            if resident:
                state.hold(member, key, tokens)
            else:
                state.drop(member, key)

    # -- others' routers ---------------------------------------------------------------------------------------

    def _share(
        self, tenant: str | None, member: Member, conversation: bytes | None, bookings: Sequence[Booking]
    ) -> None:
        if isinstance(self._sharing, NoSharing):
            return
        blocks = [(booking.key, booking.tokens) for booking in bookings]
        segment = LearnedSegment(name_digest("agent", member.name), conversation, blocks)
        for order in write_segments(segment):
            self._sharing.publish(routing_scope(tenant), order)

    def _learn(self, tenant: str | None, orders: Sequence[LearnedOrder]) -> None:
        for order in orders:
            segment = read_segment(order)
            if segment is None:
                continue
            with self._lock:
                name = self._digests.get(segment.agent)
                state = self._tenants.get(tenant)
                if name is not None and state is not None:
                    self._counts["learned"] += state.learn(name, segment.blocks, segment.conversation)

    def _tenant(self, tenant: str | None) -> TenantAgents:
        state = self._tenants.get(tenant)
        if state is not None:
            self._tenants.move_to_end(tenant)
            return state
        state = TenantAgents(self._agents.values(), self._window_tokens, self._max_blocks, self._max_conversations)
        self._tenants[tenant] = state
        while len(self._tenants) > self._max_tenants:
            self._forget(next(iter(self._tenants)))
        self._sharing.follow(routing_scope(tenant), _Learner(self, tenant))
        return state

    def _forget(self, tenant: str | None) -> None:
        del self._tenants[tenant]
        self._sharing.unfollow(routing_scope(tenant))

    # -- looking at it -----------------------------------------------------------------------------------------

    def load(self, tenant: str | None = None) -> dict[str, float]:
        """Tokens that each agent was given lately, over its weight: what the bound is on. Empty for a new tenant."""
        with self._lock:
            state = self._tenants.get(tenant)
            return {} if state is None else {name: member.load for name, member in state.members.items()}

    def stats(self) -> RouterStats:
        """Counts since the router was made. O(agents * tenants)."""
        with self._lock:
            return RouterStats(
                **self._counts,
                open=len(self._open),
                tenants=len(self._tenants),
                replicas=sum(state.replicas for state in self._tenants.values()),
            )

    def reset(self) -> None:
        """Forget everything but which agents there are."""
        with self._lock:
            for tenant in list(self._tenants):
                self._forget(tenant)
            self._open.clear()
            self._counts.clear()

    def close(self) -> None:
        """End the sharing with other routers. Idempotent; a router that shares nothing has nothing to close."""
        self._sharing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Open(NamedTuple):
    """An assignment of which some blocks are neither committed nor abandoned."""

    tenant: str | None
    bookings: dict[bytes, Booking]

    def unread(self, agent: str) -> set[bytes]:
        return {key for key, booking in self.bookings.items() if booking.member.name == agent}


class _AgentFeed:
    """Has an agent's feed look for blocks, and hands its news to a router, which it does not keep alive."""

    def __init__(self, router: AgentRouter, agent: str, feed: ResidencyFeed, max_blocks: int) -> None:
        self.feed = feed
        self._router = weakref.ref(router)
        self._agent = agent
        self._max_blocks = max_blocks
        self._lengths: OrderedDict[tuple[str | None, bytes], int] = OrderedDict()
        """Tokens of the blocks that it looks for, by tenant; any thread may use it."""

    def remember(self, plan: ContextPlan, token_ids: Sequence[int]) -> None:
        first = plan.blocks[0].block
        self._lengths[plan.scope.tenant, first.fingerprint] = first.tokens
        while len(self._lengths) > self._max_blocks:
            self._lengths.popitem(last=False)
        keys = tuple([planned.block.fingerprint for planned in plan.blocks])
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        self.feed.remember(ServedPrompt(plan.scope, plan.cache_salt, keys, paragraphs, token_ids))

    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        """Only the first block is right behind the preamble, and so the only one that others could share."""
        router = self._router()
        tokens = self._lengths.get((scope.tenant, keys[0])) if keys else None
        if router is not None and tokens is not None:
            router._residency_changed(self._agent, scope.tenant, keys[0], tokens, resident_blocks > 0)  # noqa: SLF001


class _Learner:
    """Hands other routers' segments to a router, which it does not keep alive."""

    def __init__(self, router: AgentRouter, tenant: str | None) -> None:
        self._router = weakref.ref(router)
        self._tenant = tenant

    def __call__(self, orders: Sequence[LearnedOrder]) -> None:
        router = self._router()
        if router is not None:
            router._learn(self._tenant, orders)  # noqa: SLF001 - it is a part of it


def _check_assignment(assignment: Assignment) -> None:
    if not isinstance(assignment, Assignment):
        raise TypeError(f"assignment must be an Assignment, got {type(assignment).__name__}")


def _check_names(**names: str | None) -> None:
    for what, name in names.items():
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{what} must be a str or None, got {type(name).__name__}")
        if what == "conversation" and name == "":
            raise ValueError("conversation must not be empty")
