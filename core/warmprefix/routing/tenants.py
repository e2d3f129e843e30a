"""What one tenant's requests taught of the agents: their load, what they hold, what conversations told them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from warmprefix.routing.balance import Candidate
from warmprefix.routing.base import Agent
from warmprefix.routing.caches import AgentCache

__all__ = ["Booking", "Member", "TenantAgents"]


class Member(Candidate):
    """An agent as one tenant sees it, from when it joins until it leaves or fails."""

    __slots__ = ("alive", "cache")

    def __init__(self, agent: Agent, max_blocks: int) -> None:
        super().__init__(agent.name, agent.weight)
        self.cache = AgentCache(agent.capacity_tokens, max_blocks)
        self.alive = True


class Booking(NamedTuple):
    """What giving a block to an agent changed, so that it can be taken back."""

    member: Member
    key: bytes
    tokens: int
    clock: float
    """The tenant's, when the load was added."""
    used: int
    """The number of this use of the block; see `AgentCache`."""
    used_before: int | None
    """The number of the use before; None if the agent did not hold the block."""


class _Chats:
    """A conversation's chats with its agents: which blocks each was told."""

    __slots__ = ("members", "told")

    def __init__(self) -> None:
        self.told: OrderedDict[bytes, list[Member]] = OrderedDict()
        self.members: dict[Member, None] = {}


class TenantAgents:
    """Not thread-safe: the router calls it under its lock. Memory is bounded by what the constructor is given."""

    def __init__(self, agents: Iterable[Agent], window_tokens: float, max_blocks: int, max_conversations: int) -> None:
        self._window_tokens = window_tokens
        self._max_blocks = max_blocks
        self._max_conversations = max_conversations
        self.members: dict[str, Member] = {}
        self.holders: dict[bytes, list[Member]] = {}
        """Who holds a block; no empty lists."""
        self._chats: OrderedDict[bytes, _Chats] = OrderedDict()
        self._clock = 0.0
        """How often all loads were divided by e."""
        for agent in agents:
            self.join(agent)

    @property
    def replicas(self) -> int:
        """Copies of blocks beyond the first. O(agents)."""
        return sum(len(member.cache) for member in self.members.values()) - len(self.holders)

    # -- who is there ------------------------------------------------------------------------------------------

    def join(self, agent: Agent) -> None:
        """It begins with the others' mean load, so that not everything goes to it at once."""
        member = Member(agent, self._max_blocks)
        weights = sum(other.weight for other in self.members.values())
        if weights:
            member.load = sum(other.load * other.weight for other in self.members.values()) / weights
        self.members[agent.name] = member

    def leave(self, name: str) -> None:
        """Forget it, and what it holds. O(blocks that it holds)."""
        member = self.members.pop(name, None)
        if member is not None:
            member.alive = False
            for key in member.cache:
                self._let_go(key, member)

    # -- giving ------------------------------------------------------------------------------------------------

    def age(self, tokens: int) -> None:
        """So many tokens are about to be given: what was given before counts less. O(agents)."""
        elapsed = tokens / (self._window_tokens * max(sum([member.weight for member in self.members.values()]), 1e-9))
        self._clock += elapsed
        factor = math.exp(-elapsed)
        for member in self.members.values():
            member.load *= factor

    def book(self, member: Member, key: bytes, tokens: int) -> Booking:
        """The agent was given a block, and its load told: from now on it holds it."""
        before = self._use(member, key, tokens)
        return Booking(member, key, tokens, self._clock, member.cache.number, before)

    def take_back(self, booking: Booking) -> None:
        """The agent was not given it after all."""
        member = booking.member
        if not member.alive:
            return
        remaining = booking.tokens / member.weight * math.exp(booking.clock - self._clock)
        member.load = max(member.load - remaining, 0.0)
        if booking.used_before is None and member.cache.last_use(booking.key) == booking.used:
            self.drop(member, booking.key)

    def learn(self, name: str, blocks: Sequence[tuple[bytes, int]], conversation: bytes | None) -> int:
        """Another router gave blocks to an agent. Returns how many, 0 if nobody here knows that agent."""
        member = self.members.get(name)
        if member is None:
            return 0
        tokens = sum(length for _, length in blocks)
        self.age(tokens)
        member.load += tokens / member.weight
        for key, length in blocks:
            self._use(member, key, length)
        if conversation is not None:
            self.tell(conversation, member, [key for key, _ in blocks])
        return len(blocks)

    # -- what is held ------------------------------------------------------------------------------------------

    def hold(self, member: Member, key: bytes, tokens: int) -> None:
        """The engine says that it holds this block."""
        if key not in member.cache:
            self._use(member, key, tokens)

    def drop(self, member: Member, key: bytes) -> None:
        """The engine says that it does not."""
        if member.cache.drop(key):
            self._let_go(key, member)

    def drop_as_old(self, booking: Booking) -> int:
        """A block that should have been held was not: nothing that was used before it is held either.

        Returns:
            How many blocks that were.
        """
        member = booking.member
        if not member.alive or booking.used_before is None:
            return 0
        gone = member.cache.drop_before(booking.used_before)
        for key in gone:
            self._let_go(key, member)
        return len(gone) + 1

    def _use(self, member: Member, key: bytes, tokens: int) -> int | None:
        before, left = member.cache.use(key, tokens)
        if before is None:
            self.holders.setdefault(key, []).append(member)
        for gone in left:
            self._let_go(gone, member)
        return before

    def _let_go(self, key: bytes, member: Member) -> None:
        holders = self.holders[key]
        holders.remove(member)
        if not holders:
            del self.holders[key]

    # -- conversations -----------------------------------------------------------------------------------------

    def told(self, conversation: bytes | None) -> tuple[dict[bytes, list[Member]], dict[Member, None]]:
        """Which agents' chats have which blocks, and with whom there is a chat; both to be read only."""
        chats = None if conversation is None else self._chats.get(conversation)
        if chats is None:
            return {}, {}
        return chats.told, chats.members

    def tell(self, conversation: bytes, member: Member, keys: Iterable[bytes]) -> None:
        """The conversation's chat with this agent has these blocks now."""
        chats = self._chats.setdefault(conversation, _Chats())
        self._chats.move_to_end(conversation)
        chats.members[member] = None
        for key in keys:
            members = chats.told.setdefault(key, [])
            chats.told.move_to_end(key)
            members[:] = [other for other in members if other.alive and other is not member] + [member]
        while len(chats.told) > self._max_blocks:
            chats.told.popitem(last=False)
        while len(self._chats) > self._max_conversations:
            self._chats.popitem(last=False)

    def end(self, conversation: bytes) -> None:
        """The conversation's chats are gone."""
        self._chats.pop(conversation, None)
