"""What one tenant's requests taught of the agents: their load, what they hold, what conversations told them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from warmprefix.routing.balance import Candidate
from warmprefix.routing.base import Agent
from warmprefix.routing.caches import AgentCache, HeldBlock
from warmprefix.routing.memory import TenantState

__all__ = ["Booking", "Member", "TenantAgents"]


# Estimated bytes, with CPython on 64 bits and nothing shared with the application; measured by a test.
_TENANT, _MEMBER = 1_200, 480
_BLOCK, _HELD = 250, 210
"""Of a block that agents hold, and of each of these agents."""
_CHAT, _CHATTING, _TOLD, _TELLING = 750, 60, 250, 10
"""Of a conversation, of an agent in it, of a block in it, and of each agent that was given this block."""
_OPEN, _BOOKING = 450, 380
"""Of an open assignment, and of a block in it."""


class Member(Candidate):
    """An agent as one tenant sees it, from when it joins until it leaves or fails."""

    __slots__ = ("alive", "cache")

    def __init__(self, agent: Agent, max_blocks: int, salt: bytes) -> None:
        super().__init__(agent.name, agent.weight, salt)
        self.cache = AgentCache(agent.capacity_tokens, max_blocks)
        self.alive = True


class Booking(NamedTuple):
    """A block given to an agent, of which is not known yet whether it read it."""

    member: Member
    tokens: int
    work: int
    """Tokens to be computed for it, and what its prompt costs."""
    clock: float
    """The tenant's, when the load was added."""
    block: HeldBlock
    number: int
    """Of this use of the block."""
    read_before: int
    """The number of the last use before of which was known that the agent read it; 0 if there was none."""


Bookings = dict[bytes, Booking]
"""By the block's fingerprint."""


class _Chats:
    """A conversation's chats with its agents: which blocks each was told."""

    __slots__ = ("members", "told")

    def __init__(self) -> None:
        self.told: OrderedDict[bytes, list[Member]] = OrderedDict()
        self.members: dict[Member, None] = {}


class TenantAgents(TenantState):
    """Not thread-safe: the router calls it under its lock. Memory is bounded by what the constructor is given.

    To `shrink`, it forgets what it has most of: conversations, assignments whose end is not known, or held blocks.

    Args:
        agents: Those that there are.
        window_tokens: After so many tokens an agent, a load counts for 1/e of what it did.
        max_blocks: Most blocks an agent, and most a conversation.
        max_conversations: Most of them.
        max_open: Most assignments whose end is not known.
        number: The router's last assignment's: what became of those before is not known.
        salt: The tenant's, up to 16 bytes. Tenants share no cached prefix, so what many of them read, a little each,
            is not to meet at one agent.
    """

    def __init__(
        self,
        agents: Iterable[Agent],
        window_tokens: float,
        max_blocks: int,
        max_conversations: int,
        max_open: int,
        number: int,
        salt: bytes,
    ) -> None:
        self._window_tokens = window_tokens
        self._max_blocks = max_blocks
        self._max_conversations = max_conversations
        self._max_open = max_open
        self._salt = salt
        self.forgotten = number
        """What became of assignments with higher numbers is known: they are open, or were ended."""
        self._open: OrderedDict[str, tuple[int, Bookings]] = OrderedDict()
        self.members: dict[str, Member] = {}
        self.holders: dict[bytes, list[Member]] = {}
        """Who holds a block; no empty lists."""
        self._chats: OrderedDict[bytes, _Chats] = OrderedDict()
        self._clock = 0.0
        """How often all loads were divided by e."""
        self._fixed_bytes = _TENANT
        self._held_bytes = self._chat_bytes = self._open_bytes = 0
        for agent in agents:
            self.join(agent)

    @property
    def replicas(self) -> int:
        """Copies of blocks beyond the first. O(agents)."""
        return sum(len(member.cache) for member in self.members.values()) - len(self.holders)

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        return self._fixed_bytes + self._held_bytes + self._chat_bytes + self._open_bytes

    def shrink(self, excess: int) -> bool:
        target = self.memory_bytes - excess
        shrunk = False
        while self.memory_bytes > target and (self._held_bytes or self._chat_bytes or self._open_bytes):
            most = max(self._held_bytes, self._chat_bytes, self._open_bytes)
            if most == self._chat_bytes:
                self._shorten_oldest_chat()
            elif most == self._open_bytes:
                self._settle_oldest()
            else:
                member = max(self.members.values(), key=_blocks_held)
                for key in list(islice(member.cache, -(-(self.memory_bytes - target) // (_BLOCK + _HELD)))):
                    self.drop(member, key)
            shrunk = True
        return shrunk

    def compact(self) -> None:
        self.holders = dict(self.holders)
        self._open = OrderedDict(self._open)
        self._chats = OrderedDict(self._chats)
        for chats in self._chats.values():
            chats.told = OrderedDict(chats.told)
        for member in self.members.values():
            member.cache.compact()

    def _shorten_oldest_chat(self) -> None:
        conversation, chats = next(iter(self._chats.items()))
        if chats.told:
            self._forget_oldest_told(chats)
        if not chats.told:
            self.end(conversation)

    # -- who is there ------------------------------------------------------------------------------------------

    def join(self, agent: Agent) -> None:
        """It begins with the others' mean load, so that not everything goes to it at once."""
        member = Member(agent, self._max_blocks, self._salt)
        weights = sum(other.weight for other in self.members.values())
        if weights:
            member.load = sum(other.load * other.weight for other in self.members.values()) / weights
        self.members[agent.name] = member
        self._fixed_bytes += _MEMBER

    def leave(self, name: str) -> None:
        """Forget it, and what it holds. O(blocks that it holds)."""
        member = self.members.pop(name, None)
        if member is not None:
            self._fixed_bytes -= _MEMBER
            member.alive = False
            for key in member.cache:
                self._let_go(key, member)
            member.cache = AgentCache()  # bookings and conversations may hold on to the member for long

    # -- giving ------------------------------------------------------------------------------------------------

    def book(self, member: Member, key: bytes, tokens: int, work: int) -> Booking:
        """The agent, whose load was told, is given a block: from now on it holds it."""
        block = self._use(member, key, tokens)
        block.under_way += 1
        member.queue += work
        return Booking(member, tokens, work, self._clock, block, block.used, block.read)

    def take_back(self, bookings: Bookings) -> None:
        """The agents were not given these after all."""
        for key, (member, tokens, work, clock, block, _, _) in bookings.items():
            member.queue -= work
            if not member.alive:
                continue
            remaining = tokens / member.weight * math.exp(clock - self._clock)
            member.load = max(member.load - remaining, 0.0)
            block.under_way -= 1
            if not block.under_way and not block.read and member.cache.get(key) is block:
                self.drop(member, key)

    def settle(self, bookings: Iterable[Booking]) -> None:
        """The agents read these, or it is not known whether they did."""
        tokens = 0
        for booking in bookings:
            tokens += booking.tokens
            booking.member.queue -= booking.work
            block = booking.block
            block.under_way -= 1
            block.read = max(block.read, booking.number)
        self._age(tokens)

    def _age(self, tokens: int) -> None:
        """So many tokens were read: what was given before counts less. O(agents)."""
        elapsed = tokens / (self._window_tokens * max(sum([member.weight for member in self.members.values()]), 1e-9))
        self._clock += elapsed
        factor = math.exp(-elapsed)
        for member in self.members.values():
            member.load *= factor

    def learn(self, name: str, blocks: Sequence[tuple[bytes, int]], conversation: bytes | None) -> int:
        """Another router gave blocks to an agent. Returns how many, 0 if nobody here knows that agent."""
        member = self.members.get(name)
        if member is None:
            return 0
        tokens = sum(length for _, length in blocks)
        self._age(tokens)
        member.load += tokens / member.weight
        for key, length in blocks:
            block = self._use(member, key, length)
            block.read = block.used
        if conversation is not None:
            self.tell(conversation, member, [key for key, _ in blocks])
        return len(blocks)

    # -- assignments whose end is not known --------------------------------------------------------------------

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._open)

    def opened(self, id: str, number: int, bookings: Bookings) -> None:
        """An assignment was made. If there are too many, nobody will tell of the oldest: it counts as it is."""
        self._open[id] = number, bookings
        self._open_bytes += _OPEN + _BOOKING * len(bookings)
        if len(self._open) > self._max_open:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        _, (self.forgotten, oldest) = self._open.popitem(last=False)
        self._open_bytes -= _OPEN + _BOOKING * len(oldest)
        self.settle(oldest.values())

    def unread(self, id: str) -> Bookings:
        """What of an assignment is neither settled nor taken back; to be read only."""
        opened = self._open.get(id)
        return {} if opened is None else opened[1]

    def close(self, id: str, agent: str | None, keys: Collection[bytes] | None) -> Bookings:
        """Take out of an assignment what is to be settled or taken back: all but what belongs to others."""
        unread = self.unread(id)
        closed = {
            key: booking
            for key, booking in unread.items()
            if (agent is None or booking.member.name == agent) and (keys is None or key in keys)
        }
        for key in closed:
            del unread[key]
        self._open_bytes -= _BOOKING * len(closed)
        if not unread and self._open.pop(id, None) is not None:
            self._open_bytes -= _OPEN
        return closed

    # -- what is held ------------------------------------------------------------------------------------------

    def hold(self, member: Member, key: bytes, tokens: int) -> None:
        """The engine says that it holds this block."""
        block = member.cache.get(key) or self._use(member, key, tokens)
        block.read = block.used

    def drop(self, member: Member, key: bytes) -> None:
        """The engine says that it does not."""
        if member.cache.drop(key):
            self._let_go(key, member)

    def drop_as_old(self, booking: Booking) -> int:
        """A block that should have been held was not: nothing that was used before it is held either.

        Only if the agent had read it before this was booked. Else it may have been on its way to be held.

        Returns:
            How many blocks that were.
        """
        member = booking.member
        if not member.alive or not booking.read_before:
            return 0
        gone = member.cache.drop_before(booking.read_before)
        for key in gone:
            self._let_go(key, member)
        return len(gone) + 1

    def _use(self, member: Member, key: bytes, tokens: int) -> HeldBlock:
        if key not in member.cache:
            holders = self.holders.get(key)
            if holders is None:
                holders = self.holders[key] = []
                self._held_bytes += _BLOCK
            holders.append(member)
            self._held_bytes += _HELD
        block, left = member.cache.use(key, tokens)
        for gone in left:
            self._let_go(gone, member)
        return block

    def _let_go(self, key: bytes, member: Member) -> None:
        holders = self.holders[key]
        holders.remove(member)
        self._held_bytes -= _HELD
        if not holders:
            del self.holders[key]
            self._held_bytes -= _BLOCK

    # -- conversations -----------------------------------------------------------------------------------------

    def told(self, conversation: bytes | None) -> tuple[dict[bytes, list[Member]], dict[Member, None]]:
        """Which agents' chats have which blocks, and with whom there is a chat; both to be read only."""
        chats = None if conversation is None else self._chats.get(conversation)
        if chats is None:
            return {}, {}
        return chats.told, chats.members

    def tell(self, conversation: bytes, member: Member, keys: Iterable[bytes]) -> None:
        """The conversation's chat with this agent has these blocks now."""
        chats = self._chats.get(conversation)
        if chats is None:
            chats = self._chats[conversation] = _Chats()
            self._chat_bytes += _CHAT
        self._chats.move_to_end(conversation)
        agents_before = len(chats.members)
        if len(chats.members) >= len(self.members):  # some of them may be gone
            chats.members = {other: None for other in chats.members if other.alive}
        chats.members[member] = None
        self._chat_bytes += _CHATTING * (len(chats.members) - agents_before)
        for key in keys:
            members = chats.told.get(key)
            if members is None:
                members = chats.told[key] = []
                self._chat_bytes += _TOLD
            else:
                chats.told.move_to_end(key)
            before = len(members)
            members[:] = [other for other in members if other.alive and other is not member] + [member]
            self._chat_bytes += _TELLING * (len(members) - before)
        while len(chats.told) > self._max_blocks:
            self._forget_oldest_told(chats)
        while len(self._chats) > self._max_conversations:
            self.end(next(iter(self._chats)))

    def _forget_oldest_told(self, chats: _Chats) -> None:
        _, members = chats.told.popitem(last=False)
        self._chat_bytes -= _TOLD + _TELLING * len(members)

    def end(self, conversation: bytes) -> None:
        """The conversation's chats are gone. O(blocks told in them)."""
        chats = self._chats.pop(conversation, None)
        if chats is not None:
            told = sum([_TOLD + _TELLING * len(members) for members in chats.told.values()])
            self._chat_bytes -= _CHAT + _CHATTING * len(chats.members) + told


def _blocks_held(member: Member) -> int:
    return len(member.cache)
