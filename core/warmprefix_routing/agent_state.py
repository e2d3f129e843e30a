"""What an `AgentRouter` keeps per tenant: the agents' loads and caches, conversations, open assignments."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import NamedTuple

from warmprefix.blocks import ContextBlock
from warmprefix.choice import Candidates
from warmprefix.ordering import runs_of
from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport
from warmprefix_routing.agent_cache import AgentCache, HeldBlock, RecentReads
from warmprefix_routing.assignments import AssignedBlock, Assignment, Holding
from warmprefix_routing.balance import BlockItem, Candidate, Placing, share_out
from warmprefix_routing.members import Agent, Member, check_range
from warmprefix_routing.tenants import TenantState

__all__ = ["AgentBounds", "AgentTenant", "AgentView", "Booking", "Bookings"]

_KV_BLOCK = 32
"""Tokens. Engines count whole KV blocks, so the cached part may end this much before the end of a context block."""

# Estimated bytes, with CPython on 64 bits and nothing shared with the application; a test measures them.
_TENANT, _MEMBER = 1_200, 480
_BLOCK, _COPY = 250, 210
"""Per held block, and per agent that holds it."""
_CHAT, _CHAT_AGENT, _CHAT_BLOCK, _CHAT_COPY = 750, 60, 250, 10
"""Per conversation, per agent in it, per block in it, and per agent that read this block there."""
_OPEN, _BOOKING = 450, 380
"""Per open assignment, and per block in it."""
_RECENT = 250
"""Per record of what choices go by."""


class AgentView(Candidate):
    """An agent as one tenant sees it, from when it joins until it leaves or fails."""

    __slots__ = ("alive", "cache")

    def __init__(self, agent: Agent, max_blocks: int, salt: bytes) -> None:
        super().__init__(agent.name, agent.weight, salt)
        self.cache = AgentCache(agent.capacity_tokens, max_blocks)
        self.alive = True


class Booking(NamedTuple):
    """A block assigned to an agent, which may not have read it yet."""

    agent: AgentView
    tokens: int
    work: int
    """As in `Placing`."""
    clock: float
    """The tenant's clock when the load was added."""
    block: HeldBlock
    number: int
    """Number of this use of the block."""
    read_before: int
    """Number of the last earlier use that the agent has certainly read; 0 if there was none."""


Bookings = dict[bytes, Booking]
"""By the block's fingerprint."""


@dataclass(frozen=True, slots=True)
class AgentBounds:
    """Numbers of an `AgentRouter`: of the choice, and bounds per tenant, except those on tenants and memory.

    Raises:
        TypeError: A field is no number.
        ValueError: A field is out of range.
    """

    eps: float = 0.25
    """How far an agent's load may be above the mean, as a share of it: a higher value means more hits, less balance."""
    window_tokens: int = 65_536
    """Tokens read per agent after which a load counts 1/e."""
    free_tokens: int = 4_096
    """An agent with no more load than this has room whatever the mean is: a tenant with little traffic makes no
    hotspot, and would otherwise lose hits to its first requests."""
    prompt_tokens: int = 256
    """What a prompt costs an engine in addition to its documents, as tokens that it could compute in that time. An
    agent gets several documents of a request if it holds them and this is faster than computing them elsewhere."""
    max_blocks: int = 16_384
    """Most blocks remembered per agent, about 450 bytes each; and most per conversation."""
    max_conversations: int = 4_096
    """Most conversations."""
    max_open: int = 10_000
    """Most open assignments; beyond it the oldest counts as read."""
    max_tenants: int = 1_024
    """Most tenants; beyond it the least recently used is forgotten."""
    max_bytes: int = 500_000_000
    """Most memory of all tenants together, estimated to within a quarter. Beyond it, tenants that take more than
    `max_bytes / max_tenants` forget their oldest records, the least recently used tenant first; a tenant that takes
    less is never affected. Feeds add 350 bytes for each of `max_blocks` per agent."""

    def __post_init__(self) -> None:
        bounds = asdict(self)
        check_range(0, True, eps=bounds.pop("eps"))
        check_range(0, free_tokens=bounds.pop("free_tokens"), prompt_tokens=bounds.pop("prompt_tokens"))
        check_range(1, **bounds)


@dataclass(slots=True)
class _Chats:
    """A conversation's chats with its agents."""

    readers: OrderedDict[bytes, list[AgentView]] = field(default_factory=OrderedDict)
    """The agents whose chats have a block, by fingerprint, least recently read first."""
    agents: dict[AgentView, None] = field(default_factory=dict)


class AgentTenant(TenantState):
    """One tenant of an `AgentRouter`.

    `number` is that of the router's last assignment. `salt` has up to 16 bytes: tenants share no cached prefix, so a
    document that many of them read a little should not go to one agent.
    """

    def __init__(self, members: Iterable[Member], bounds: AgentBounds, number: int, salt: bytes) -> None:
        self._bounds = bounds
        self._salt = salt
        self.forgotten = number
        """Number of the last assignment whose end may be unknown: later ones are open, or were ended."""
        self.open: OrderedDict[str, tuple[int, Bookings]] = OrderedDict()
        """Number and bookings of each open assignment, by its id."""
        self.agents: dict[str, AgentView] = {}
        self.holders: dict[bytes, list[AgentView]] = {}
        """The agents that hold a block; no list is empty."""
        self.chats: OrderedDict[bytes, _Chats] = OrderedDict()
        self.recent: RecentReads | None = None
        """What choices go by; None until the first one."""
        self._clock = 0.0
        """How often all loads were divided by e."""
        self._copies = self._booked = self._chat_bytes = 0
        for member in members:
            self.join(member)

    @property
    def copies(self) -> int:
        """Number of copies of blocks beyond the first."""
        return self._copies - len(self.holders)

    @property
    def fixed_bytes(self) -> int:
        return _TENANT + _MEMBER * len(self.agents)

    def shrinkable(self) -> Sequence[tuple[int, Callable[[int], object]]]:
        return (
            (self._chat_bytes, self._shorten_oldest_chat),
            (_OPEN * len(self.open) + _BOOKING * self._booked, self._settle_oldest),
            (_BLOCK * len(self.holders) + _COPY * self._copies, self._drop_oldest),
            (0 if self.recent is None else _RECENT * self.recent.records, self._forget_recent),
        )

    def compact(self) -> None:
        self.holders = dict(self.holders)
        self.open = OrderedDict(self.open)
        self.chats = OrderedDict(self.chats)
        for chats in self.chats.values():
            chats.readers = OrderedDict(chats.readers)
        for agent in self.agents.values():
            agent.cache.blocks = OrderedDict(agent.cache.blocks)

    def _drop_oldest(self, excess: int) -> None:
        agent = max(self.agents.values(), key=lambda agent: len(agent.cache.blocks))
        for key in list(islice(agent.cache.blocks, -(-excess // (_BLOCK + _COPY)))):
            self.drop(agent, key)

    def _shorten_oldest_chat(self, _: int) -> None:
        conversation, chats = next(iter(self.chats.items()))
        if chats.readers:
            self._forget_oldest_read(chats)
        if not chats.readers:
            self.end(conversation)

    def _forget_recent(self, _: int) -> None:
        self.recent = None

    def choose(self, candidates: Candidates, conversation: str | None) -> Sequence[int]:
        """Return the indices of the candidates to read, ascending; in a conversation, those of the first ones."""
        if conversation is not None:
            return candidates.first
        if self.recent is None:
            sizes = [agent.cache.capacity_tokens for agent in self.agents.values()]
            self.recent = RecentReads(sum(sizes), self._bounds.max_blocks)
        return self.recent.choose(candidates)

    def join(self, member: Member) -> None:
        agent = AgentView(member.spec, self._bounds.max_blocks, self._salt)
        weights = sum(other.weight for other in self.agents.values())
        if weights:
            agent.load = sum(other.load * other.weight for other in self.agents.values()) / weights
        self.agents[agent.name] = agent

    def leave(self, member: Member) -> None:
        agent = self.agents.pop(member.name)
        agent.alive = False
        for key in agent.cache.blocks:
            self._remove_holder(key, agent)
        agent.cache = AgentCache()  # bookings and conversations may keep the agent for long

    def assign(
        self,
        id: str,
        number: int,
        blocks: Sequence[ContextBlock],
        places: Sequence[tuple[int, ...]],
        joined: Collection[int],
        names: Sequence[str],
        conversation: bytes | None,
        together: bool,
    ) -> tuple[AssignedBlock, ...]:
        """Assign blocks to these agents: they count as load and as held from now on.

        In one prompt, a block that is `joined` to the one before it goes to the same agent. Beyond `max_open`, the
        oldest open assignment counts as read.
        """
        agents = [self.agents[name] for name in names]
        items, holdings = self._items(blocks, agents, conversation, together)
        bounds = self._bounds
        eps, floor, prompt = bounds.eps, bounds.free_tokens, bounds.prompt_tokens
        runs = runs_of(len(items), joined) if together and joined else [range(i, i + 1) for i in range(len(items))]
        shared = [items[run.start]._replace(tokens=sum([items[i].tokens for i in run])) for run in runs]
        chosen_for = share_out(shared, agents, eps, floor, prompt, together) if items else []
        choices = [choice for run, made in zip(runs, chosen_for, strict=True) for choice in _of_each(made, items, run)]
        bookings: Bookings = {}
        assigned: list[AssignedBlock] = []
        for block, positions, (chosen, held, spilled, work), holding, item in zip(
            blocks, places, choices, holdings, items, strict=True
        ):
            agent = self.agents[chosen.name]
            used = self._use(agent, item.key, item.tokens)
            used.pending += 1
            agent.queue += work
            bookings[item.key] = Booking(agent, item.tokens, work, self._clock, used, used.used, used.read)
            assigned.append(AssignedBlock(block, positions, agent.name, holding if held else None, spilled))
        if bookings:
            self.open[id] = number, bookings
            self._booked += len(bookings)
            if len(self.open) > bounds.max_open:
                self._settle_oldest()
        return tuple(assigned)

    def _items(
        self, blocks: Sequence[ContextBlock], agents: Sequence[AgentView], conversation: bytes | None, together: bool
    ) -> tuple[list[BlockItem], list[Holding]]:
        """Return the blocks with the agents that hold them, and where these do."""
        chats = None if conversation is None else self.chats.get(conversation)
        readers = {} if chats is None else chats.readers
        among_all = len(agents) == len(self.agents)
        items: list[BlockItem] = []
        holdings: list[Holding] = []
        for block in blocks:
            key = block.fingerprint
            holding: Holding = "cache"
            holders: Sequence[AgentView] = ()
            if key in readers:
                holders = [agent for agent in readers[key] if agent.alive and (among_all or agent in agents)]
            if holders:
                holding = "conversation"
            else:
                holders = self.holders.get(key, ())
                if not among_all:
                    holders = [agent for agent in holders if agent in agents]
                if together and chats is not None:  # behind a chat, a cached copy is of no use
                    holders = [agent for agent in holders if agent not in chats.agents]
            items.append(BlockItem(key, block.tokens or 1, holders))
            holdings.append(holding)
        return items, holdings

    def take_back(self, bookings: Bookings) -> None:
        """Undo bookings that the agents did not read."""
        for key, (agent, tokens, work, clock, block, _, _) in bookings.items():
            agent.queue -= work
            if not agent.alive:
                continue
            remaining = tokens / agent.weight * math.exp(clock - self._clock)
            agent.load = max(agent.load - remaining, 0.0)
            block.pending -= 1
            if not block.pending and not block.read and agent.cache.blocks.get(key) is block:
                self.drop(agent, key)

    def settle(self, bookings: Iterable[Booking]) -> None:
        """Record that the agents read these blocks, or may have."""
        tokens = 0
        for booking in bookings:
            tokens += booking.tokens
            booking.agent.queue -= booking.work
            block = booking.block
            block.pending -= 1
            block.read = max(block.read, booking.number)
        self._age(tokens)

    def _age(self, tokens: int) -> None:
        """Let all loads decay by the tokens that were read. O(agents)."""
        weights = max(sum([agent.weight for agent in self.agents.values()]), 1e-9)
        elapsed = tokens / (self._bounds.window_tokens * weights)
        self._clock += elapsed
        factor = math.exp(-elapsed)
        for agent in self.agents.values():
            agent.load *= factor

    def learn(self, name: str, blocks: Sequence[tuple[bytes, int]], conversation: bytes | None) -> None:
        """Record the blocks that another router assigned to an agent."""
        agent = self.agents[name]
        tokens = sum(length for _, length in blocks)
        self._age(tokens)
        agent.load += tokens / agent.weight
        for key, length in blocks:
            block = self._use(agent, key, length)
            block.read = block.used
        if conversation is not None:
            self.record_read(conversation, agent, [key for key, _ in blocks])

    def _settle_oldest(self, _: int = 0) -> None:
        self.forgotten, oldest = self.open.popitem(last=False)[1]
        self._booked -= len(oldest)
        self.settle(oldest.values())

    def unread(self, id: str) -> Bookings:
        """Return an assignment's bookings that are neither settled nor taken back; to be read only."""
        opened = self.open.get(id)
        return {} if opened is None else opened[1]

    def left(self, assignment: Assignment, agent: str, instance: str) -> list[AssignedBlock]:
        """Return what an agent has not read: all of its blocks if another router made the assignment, or long ago."""
        unread: Iterable[bytes] = self.unread(assignment.id)
        maker, _, number = assignment.id.rpartition(".")
        has_ended = maker == instance and number.isdecimal() and int(number) > self.forgotten
        if not unread and not has_ended:
            unread = {assigned.block.fingerprint for assigned in assignment.blocks}
        return [each for each in assignment.blocks if each.agent == agent and each.block.fingerprint in unread]

    def close(self, id: str, agent: str | None, keys: Collection[bytes] | None) -> Bookings:
        """Remove and return an assignment's bookings, all or those of one agent or some blocks."""
        unread = self.unread(id)
        closed = {
            key: booking
            for key, booking in unread.items()
            if (agent is None or booking.agent.name == agent) and (keys is None or key in keys)
        }
        for key in closed:
            del unread[key]
        self._booked -= len(closed)
        if not unread:
            self.open.pop(id, None)
        return closed

    def hold(self, agent: AgentView, key: bytes, tokens: int) -> None:
        """Record the engine's report that it holds a block."""
        block = agent.cache.blocks.get(key) or self._use(agent, key, tokens)
        block.read = block.used

    def drop(self, agent: AgentView, key: bytes) -> None:
        """Record that the engine does not hold a block."""
        if agent.cache.drop(key):
            self._remove_holder(key, agent)

    def correct(self, assignment: Assignment, read: Bookings, report: EngineReport, plan: ContextPlan | None) -> int:
        """Drop what an agent has lost if, by a report, the prompt's first block was not cached. Returns how many.

        That is every block used before the first one was last read. If it never was, the block may have been
        pending still, which proves nothing.
        """
        first = next(iter(read))
        if plan is not None and plan.blocks:
            if not plan.opens_prompt or plan.blocks[0].reference is not None:
                return 0
            first = plan.blocks[0].block.fingerprint
        booking = read.get(first)
        if booking is None or not booking.agent.alive or not booking.read_before or report.cached_tokens is None:
            return 0
        if report.cached_tokens + _KV_BLOCK >= booking.tokens / 2:
            return 0
        if not any(each.held == "cache" for each in assignment.blocks if each.block.fingerprint == first):
            return 0
        dropped = booking.agent.cache.drop_before(booking.read_before)
        for key in dropped:
            self._remove_holder(key, booking.agent)
        return len(dropped) + 1

    def _use(self, agent: AgentView, key: bytes, tokens: int) -> HeldBlock:
        if key not in agent.cache.blocks:
            self.holders.setdefault(key, []).append(agent)
            self._copies += 1
        block, evicted = agent.cache.use(key, tokens)
        for gone in evicted:
            self._remove_holder(gone, agent)
        return block

    def _remove_holder(self, key: bytes, agent: AgentView) -> None:
        holders = self.holders[key]
        holders.remove(agent)
        self._copies -= 1
        if not holders:
            del self.holders[key]

    def record_read(self, conversation: bytes, agent: AgentView, keys: Iterable[bytes]) -> None:
        """Add blocks to a conversation's chat with an agent."""
        chats = self.chats.get(conversation)
        if chats is None:
            chats = self.chats[conversation] = _Chats()
            self._chat_bytes += _CHAT
        self.chats.move_to_end(conversation)
        before = len(chats.agents)
        if before >= len(self.agents):  # some may have left
            chats.agents = {other: None for other in chats.agents if other.alive}
        chats.agents[agent] = None
        self._chat_bytes += _CHAT_AGENT * (len(chats.agents) - before)
        for key in keys:
            readers = chats.readers.get(key)
            if readers is None:
                readers = chats.readers[key] = []
                self._chat_bytes += _CHAT_BLOCK
            else:
                chats.readers.move_to_end(key)
            before = len(readers)
            readers[:] = [other for other in readers if other.alive and other is not agent] + [agent]
            self._chat_bytes += _CHAT_COPY * (len(readers) - before)
        while len(chats.readers) > self._bounds.max_blocks:
            self._forget_oldest_read(chats)
        while len(self.chats) > self._bounds.max_conversations:
            self.end(next(iter(self.chats)))

    def _forget_oldest_read(self, chats: _Chats) -> None:
        _, readers = chats.readers.popitem(last=False)
        self._chat_bytes -= _CHAT_BLOCK + _CHAT_COPY * len(readers)

    def end(self, conversation: bytes) -> None:
        """Forget a conversation's chats. O(blocks in them)."""
        chats = self.chats.pop(conversation, None)
        if chats is not None:
            copies = sum([len(readers) for readers in chats.readers.values()])
            self._chat_bytes -= _CHAT + _CHAT_AGENT * len(chats.agents)
            self._chat_bytes -= _CHAT_BLOCK * len(chats.readers) + _CHAT_COPY * copies


def _of_each(choice: Placing, items: Sequence[BlockItem], run: Sequence[int]) -> Iterator[Placing]:
    """Yield the choice for each block of a run; the first one counts its work."""
    yield choice
    for i in run[1:]:
        yield Placing(choice.candidate, choice.candidate in items[i].holders, False, 0)
