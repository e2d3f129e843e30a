"""`AgentRouter`: each document to the agent that already knows it, and to no agent too many."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypedDict

from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks
from warmprefix.errors import NoAgentError
from warmprefix.failures import log_failure
from warmprefix.forks import in_each_process
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency.base import EngineReport, ResidencyFeed, ServedPrompt
from warmprefix.routing.balance import Choice, Item, share_out
from warmprefix.routing.base import Agent, AssignedBlock, Assignment, Held, RouterStats, as_agent
from warmprefix.routing.learning import LearnedSegment, name_digest, read_segment, routing_scope, write_segments
from warmprefix.routing.memory import TenantMemory
from warmprefix.routing.tenants import Bookings, Member, TenantAgents

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from warmprefix.settings import SharedSettings

__all__ = ["AgentRouter", "RouterOptions"]

_log = logging.getLogger("warmprefix")

_KV_BLOCK = 32
"""Tokens; engines count whole KV blocks, so what is cached may end this much before the block that it holds."""


class RouterOptions(TypedDict, total=False):
    """The keyword arguments of `AgentRouter`, which documents them, without those that `from_url` decides."""

    eps: float
    window_tokens: int
    free_tokens: int
    prompt_tokens: int
    max_blocks: int
    max_tenants: int
    max_conversations: int
    max_open: int
    max_bytes: int


class AgentRouter:
    """Shares out the documents of a request over agents, each of which has an engine with a prefix cache of its own.

    A block goes to an agent that holds it: one that was told it earlier in the conversation, or whose engine has it
    cached. What nobody holds goes to those with the least to do, by rendezvous hashing. No agent is given a block that
    would take its load above `1 + eps` times the agents' mean, unless it is the least loaded; what spills goes to the
    same further agent each time, so that hot documents are soon held by as many agents as their load needs.
    `warmprefix.routing.balance` says it exactly. It solves what ContextPilot calls agent-aware routing, and CRAFT
    affinity without hotspots.

    An agent that joins, leaves or fails moves only the blocks that go to it, or went.

    Load is counted in tokens of blocks given, cached or not, and forgotten exponentially. All that is known is kept by
    tenant, load included: what one tenant asks changes nothing for another, and a bound that holds for each holds for
    all; what is below `free_tokens`, each tenant's hash spreads anew. No text is kept. Deterministic in what it was
    told before; thread-safe, and free of I/O.

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
        prompt_tokens: int = 256,
        max_blocks: int = 16_384,
        max_tenants: int = 1_024,
        max_conversations: int = 4_096,
        max_open: int = 10_000,
        max_bytes: int = 500_000_000,
        sharing: OrderSharing | None = None,
    ) -> None:
        """No agent has been given anything yet.

        Args:
            agents: Those that there are; `join` adds others.
            eps: How far an agent's load may be above the mean, as a share of it; more means more hits and less
                balance.
            window_tokens: After so many tokens an agent that were read, a load counts for 1/e of what it did.
            free_tokens: An agent whose load is no higher than this has room whatever the mean: a tenant of little
                traffic makes no hotspot, and would otherwise lose hits to its first requests.
            prompt_tokens: What a prompt costs an engine beside its documents, as tokens that it could compute in that
                time: the question, what to do with it, and what any prompt takes. An agent gets several documents of a
                request if it holds them and that is quicker than to compute them elsewhere: more means more agents
                at work on a request, less means more hits.
            max_blocks: Most blocks remembered per agent and tenant, some 450 bytes each; and most of a conversation.
            max_tenants: Most tenants remembered; beyond it the one not heard of longest is forgotten.
            max_conversations: Most conversations remembered of a tenant.
            max_open: Most assignments of a tenant neither committed nor abandoned; beyond it the oldest count as they
                are.
            max_bytes: Most memory for all tenants together, estimated to within a quarter. Beyond it, of the tenants
                that take more than `max_bytes / max_tenants`, the one not used longest forgets its oldest
                conversations, open assignments and blocks; a tenant that takes less is never affected by another's
                requests. Not in it: what feeds remember, some 350 bytes for each of up to `max_blocks` blocks per fed
                agent.
            sharing: Where other routers of the same agents are told what this one's did, and the other way round;
                nowhere by default. Not a planner's: it is this router's own, and closed with it.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: Two agents have one name, or a number is out of range.
        """
        if not 0 <= eps < float("inf"):
            raise ValueError(f"eps must be 0 or more, and finite, got {eps}")
        for name, value in (("free_tokens", free_tokens), ("prompt_tokens", prompt_tokens)):
            if value < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name, value in (
            ("window_tokens", window_tokens),
            ("max_blocks", max_blocks),
            ("max_tenants", max_tenants),
            ("max_conversations", max_conversations),
            ("max_open", max_open),
            ("max_bytes", max_bytes),
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
        self._prompt_tokens = prompt_tokens
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
        self._memory = TenantMemory(max_bytes, max_tenants)
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        in_each_process(self._renew)
        for agent in agents:
            self.join(agent)

    def _renew(self) -> None:
        """What each process has for itself."""
        if not self._lock.acquire(blocking=False):  # in a fork: somebody was about to change what is known
            self._tenants.clear()
            self._memory.clear()
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
        **options: Unpack[RouterOptions],
    ) -> Self:
        """A router that shares what it learns with all others of the same Redis or Valkey, and of these agents.

        It connects in the background; a server that is down costs hits and nothing else. `close` it at the end, or use
        it as a context manager.

        Args:
            url: As `RedisSeenStore` takes it; by default that of the settings.
            agents: As `AgentRouter` takes them.
            settings: By default, what the environment says: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_KEY_PREFIX`, and
                `WARMPREFIX_SHARE_ORDERS`, without which nothing is shared.
            options: As `AgentRouter` takes them.

        Raises:
            MissingExtraError: The extra `redis` is not installed.
            ValueError: Neither gives a URL, or it is none that can be used, or an option is out of range.
        """
        from warmprefix.order_sharing.redis import RedisOrderSharing
        from warmprefix.settings import SharedSettings

        given = SharedSettings() if settings is None else settings
        address = given.redis_url if url is None else url
        if not address:
            raise ValueError("url must be given, or WARMPREFIX_REDIS_URL be set")
        sharing = RedisOrderSharing(address, prefix=given.key_prefix) if given.share_orders else None
        return cls(agents, sharing=sharing, **options)

    # -- who is there ------------------------------------------------------------------------------------------

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Those that blocks can be given to, in the order in which they joined."""
        with self._lock:
            return tuple(self._agents.values())

    @property
    def failed(self) -> tuple[Agent, ...]:
        """Those that failed, and have not joined again since."""
        with self._lock:
            return tuple(self._failed.values())

    def join(self, agent: Agent | str, feed: ResidencyFeed | None = None) -> None:
        """An agent is there, for the first time or again. It begins with the mean load, and holds nothing.

        Args:
            agent: Or its name; that of one that failed brings it back as it was.
            feed: Knows from its engine what it holds. One that failed keeps the feed that it had, unless it is given
                another. A feed is asked to follow, tells this router alone, and is not closed by it.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: An agent of this name is there.
        """
        joining = as_agent(agent)
        if feed is not None and not isinstance(feed, ResidencyFeed):
            raise TypeError(f"feed must be a ResidencyFeed or None, got {type(feed).__name__}")
        with self._lock:
            if joining.name in self._agents:
                raise ValueError(f"agents must have names of their own, got {joining.name!r} twice")
            failed = self._failed.pop(joining.name, None)
            if failed is not None and isinstance(agent, str):
                joining = failed
            self._agents[joining.name] = joining
            self._digests[name_digest("agent", joining.name)] = joining.name
            for state in self._tenants.values():
                state.join(joining)
            self._remember_all()
        if feed is not None:
            fed = self._feeds[joining.name] = _AgentFeed(self, joining.name, feed, self._max_blocks)
            try:
                feed.follow(fed)
            except Exception:
                self._feed_failed(joining.name)

    def leave(self, name: str) -> None:
        """An agent is gone for good: its blocks go to others from now on.

        Raises:
            ValueError: No agent of this name was there.
        """
        with self._lock:
            if self._failed.pop(name, None) is None:
                self._remove(name)
            self._feeds.pop(name, None)

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
        del self._digests[name_digest("agent", name)]
        for state in self._tenants.values():
            state.leave(name)
        self._remember_all()
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

        That is what was neither committed nor abandoned; all that it was given, if the assignment is another process's
        or so old that nothing is known of it. It is taken back from the agent. Say `fail` first if it failed: who is
        there can be chosen again.

        Returns:
            A new assignment with these blocks only.

        Raises:
            NoAgentError: No other agent of the assignment is there.
            TypeError: `assignment` is none.
        """
        _check_assignment(assignment)
        conversation = assignment.conversation
        with self._lock:
            state = self._tenant(assignment.tenant)
            unread: Iterable[bytes] = state.unread(assignment.id)
            if not unread and not self._knows_end(state, assignment):
                unread = {assigned.block.fingerprint for assigned in assignment.blocks}
            left = [
                assigned
                for assigned in assignment.blocks
                if assigned.agent == agent and assigned.block.fingerprint in unread
            ]
            others = [name for name in assignment.agents if name != agent and name in self._agents]
            if not others and left:
                raise NoAgentError(f"no agent is left to read what {agent!r} did not")
            self.abandon(assignment, agent)
            return self._give(
                state,
                assignment.tenant,
                conversation,
                None if conversation is None else name_digest("conversation", conversation),
                [assigned.block for assigned in left],
                [assigned.positions for assigned in left],
                others,
                assignment.together,
            )

    def _knows_end(self, state: TenantAgents, assignment: Assignment) -> bool:
        """Whether an assignment that is not open is known to have been ended."""
        instance, _, number = assignment.id.rpartition(".")
        return instance == self._instance and number.isdecimal() and int(number) > state.forgotten

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
            items.append(Item(key, block.tokens or 1, holders))
            sources.append(source)
        choices: list[Choice] = []
        if items:
            choices = share_out(items, members, self._eps, self._free_tokens, self._prompt_tokens, together)
        bookings: Bookings = {}
        assigned: list[AssignedBlock] = []
        held_blocks = spilled_blocks = tokens = held_tokens = 0
        for block, positions, (chosen, held, spilled, work), source, item in zip(
            blocks, places, choices, sources, items, strict=True
        ):
            name = chosen.name
            bookings[item.key] = state.book(state.members[name], item.key, item.tokens, work)
            assigned.append(AssignedBlock(block, positions, name, source if held else None, spilled))
            tokens += block.tokens
            if held:
                held_blocks += 1
                held_tokens += block.tokens
            spilled_blocks += spilled
        self._number += 1
        assignment = Assignment(
            f"{self._instance}.{self._number}", tenant, conversation, tuple(names), tuple(assigned), together
        )
        if bookings:
            state.opened(assignment.id, self._number, bookings)
        self._remember(tenant, state, used=True)
        counts = self._counts
        counts["assignments"] += 1
        counts["blocks"] += len(assigned)
        counts["held"] += held_blocks
        counts["spilled"] += spilled_blocks
        counts["tokens"] += tokens
        counts["held_tokens"] += held_tokens
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
        blocks: Iterable[ContextBlock | str] | None = None,
        plan: ContextPlan | None = None,
    ) -> bool:
        """The model of an agent saw what it was given.

        Args:
            assignment: Of this router.
            agent: Whose blocks; None for those of all.
            report: What its engine said of the answer. If hardly anything was cached of a prompt whose first block the
                agent had read before, it is taken to hold nothing that it read before that.
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
        keys = None if blocks is None else {block.fingerprint for block in as_blocks(blocks)}
        reader = agent or _only_agent(assignment)
        fed = report is not None and reader is not None and self._fed(reader, report, plan)
        digest = None
        if assignment.conversation is not None:
            digest = name_digest("conversation", assignment.conversation)
        with self._lock:
            state = self._tenants.get(assignment.tenant)
            read = {} if state is None else state.close(assignment.id, agent, keys)
            if state is None or not read:
                return False
            state.settle(read.values())
            by_member: dict[Member, Bookings] = {}
            for key, booking in read.items():
                by_member.setdefault(booking.member, {})[key] = booking
            for member, bookings in by_member.items():
                if member.alive:
                    if digest is not None:
                        state.tell(digest, member, bookings)
                    self._share(assignment.tenant, member, digest, bookings)
            if report is not None and not fed and len(by_member) == 1:
                self._correct(state, assignment, read, report, plan)
            if state.memory_bytes > state.recorded_bytes:  # what became less is found out before anything shrinks
                self._remember(assignment.tenant, state)
        return True

    def abandon(
        self, assignment: Assignment, agent: str | None = None, *, blocks: Iterable[ContextBlock | str] | None = None
    ) -> bool:
        """An agent's model did not see what it was given: its load, and its holding that, are taken back.

        What is thought to have left its cache for it does not come back.

        Args and result as for `commit`.

        Raises:
            TypeError: `assignment` is none.
        """
        _check_assignment(assignment)
        keys = None if blocks is None else {block.fingerprint for block in as_blocks(blocks)}
        with self._lock:
            state = self._tenants.get(assignment.tenant)
            unread = {} if state is None else state.close(assignment.id, agent, keys)
            if state is None or not unread:
                return False
            state.take_back(unread)
            self._counts["abandoned"] += len(unread)
        return True

    def end(self, conversation: str, tenant: str | None = None) -> None:
        """A conversation's chats are gone: what its agents were told counts for nothing any more.

        Raises:
            TypeError: `conversation` or `tenant` is no `str`.
        """
        _check_names(conversation=conversation, tenant=tenant)
        with self._lock:
            state = self._tenants.get(tenant)
            if state is not None:
                state.end(name_digest("conversation", conversation))
                self._remember(tenant, state)

    def _correct(
        self,
        state: TenantAgents,
        assignment: Assignment,
        read: Bookings,
        report: EngineReport,
        plan: ContextPlan | None,
    ) -> None:
        """Learn from a report that the first block was not cached."""
        if report.cached_tokens is None:
            return
        first = next(iter(read))
        if plan is not None and plan.blocks:
            if not plan.opens_prompt or plan.blocks[0].reference is not None:
                return
            first = plan.blocks[0].block.fingerprint
        booking = read.get(first)
        if booking is None or report.cached_tokens + _KV_BLOCK >= booking.tokens / 2:
            return
        if any(assigned.held == "cache" for assigned in assignment.blocks if assigned.block.fingerprint == first):
            self._counts["stale"] += state.drop_as_old(booking)

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
            self._feed_failed(agent)
            return False

    def _feed_failed(self, agent: str) -> None:
        """The one place where a failing feed degrades to none."""
        with self._lock:
            self._counts["feed_errors"] += 1
            first = self._counts["feed_errors"] == 1
        log_failure(_log, f"feed of agent {agent!r} failed", first=first)

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
            self._remember(tenant, state)

    # -- others' routers ---------------------------------------------------------------------------------------

    def _share(self, tenant: str | None, member: Member, conversation: bytes | None, bookings: Bookings) -> None:
        if isinstance(self._sharing, NoSharing):
            return
        blocks = [(key, booking.tokens) for key, booking in bookings.items()]
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
                    self._remember(tenant, state)

    def _tenant(self, tenant: str | None) -> TenantAgents:
        state = self._tenants.get(tenant)
        if state is not None:
            self._tenants.move_to_end(tenant)
            return state
        state = self._tenants[tenant] = TenantAgents(
            self._agents.values(),
            self._window_tokens,
            self._max_blocks,
            self._max_conversations,
            self._max_open,
            self._number,
            b"" if tenant is None else name_digest("tenant", tenant),
        )
        while len(self._tenants) > self._max_tenants:
            self._forget(next(iter(self._tenants)))
        self._remember(tenant, state, used=True)
        self._sharing.follow(routing_scope(tenant), _Learner(self, tenant))
        return state

    def _remember(self, tenant: str | None, state: TenantAgents, used: bool = False) -> None:
        """Keep within `max_bytes`, this tenant's memory having changed."""
        for forgotten in self._memory.update(tenant, state, used):
            self._forget(forgotten)

    def _remember_all(self) -> None:
        for tenant, state in list(self._tenants.items()):
            if tenant in self._tenants:  # not forgotten for the sake of one before
                self._remember(tenant, state)

    def _forget(self, tenant: str | None) -> None:
        self._memory.remove(tenant, self._tenants.pop(tenant))
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
                open=sum(state.open for state in self._tenants.values()),
                tenants=len(self._tenants),
                replicas=sum(state.replicas for state in self._tenants.values()),
                memory_bytes=sum(state.memory_bytes for state in self._tenants.values()),
            )

    def reset(self) -> None:
        """Forget everything but which agents there are."""
        with self._lock:
            for tenant in list(self._tenants):
                self._forget(tenant)
            for fed in self._feeds.values():
                fed.forget()
            self._counts.clear()

    def close(self) -> None:
        """End the sharing with other routers. Idempotent; a router that shares nothing has nothing to close."""
        self._sharing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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

    def forget(self) -> None:
        """News of what was remembered so far is of no account."""
        self._lengths.clear()

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


def _only_agent(assignment: Assignment) -> str | None:
    """The one that got all of the blocks, if there is one."""
    agents = {assigned.agent for assigned in assignment.blocks}
    return agents.pop() if len(agents) == 1 else None


def _check_names(**names: str | None) -> None:
    for what, name in names.items():
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{what} must be a str or None, got {type(name).__name__}")
        if what == "conversation" and name == "":
            raise ValueError("conversation must not be empty")
