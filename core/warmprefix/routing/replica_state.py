"""What a `ReplicaRouter` knows of a replica: what it is predicted to hold, and what it has to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from warmprefix.blocks import ContextBlock
from warmprefix.plan import Scope
from warmprefix.prefix.tree import PrefixTree
from warmprefix.residency import ResidencyFeed
from warmprefix.residency.report import UsageFeedback
from warmprefix.routing.base import Agent
from warmprefix.routing.underway import PromptsUnderWay

__all__ = ["Asked", "Cache", "Home", "Known", "Loads", "Member", "Replica", "Tell"]

Tell = Callable[["Member", Scope, Sequence[bytes], int], None]
"""Told of a replica's engine what a `ResidencyTarget` is told."""


@dataclass(frozen=True, slots=True)
class Replica(Agent):
    """One endpoint of a model that has several. Its fields are those of an `Agent`; its name may be its URL."""


class Member:
    """A replica from when it joins until it leaves or fails."""

    def __init__(self, replica: Replica, feed: ResidencyFeed | None, tell: Tell) -> None:
        self.replica = replica
        self.name = replica.name
        self.weight = replica.weight
        self.feed = feed
        self.alive = True
        self.target = _Target(self, tell)
        """Kept here, for feeds hold it weakly."""


class _Target:
    """Hands on what a feed says of one replica."""

    def __init__(self, member: Member, tell: Tell) -> None:
        self._member = member
        self._tell = tell

    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        self._tell(self._member, scope, keys, resident_blocks)


class Asked:
    """The blocks of one request, as trees take them."""

    __slots__ = ("ends", "keys", "locked", "starts", "tokens", "total")

    def __init__(self, blocks: Sequence[ContextBlock], order_locked: bool) -> None:
        starts = [block for block in blocks if block.pinned == "start"]
        ends = [block for block in blocks if block.pinned == "end"]
        if (starts or ends) and not order_locked:
            blocks = [*starts, *[block for block in blocks if block.pinned is None], *ends]
        self.keys = [block.fingerprint for block in blocks]
        """In relevance order, but for pinned ones."""
        self.tokens = [block.tokens for block in blocks]
        self.total = sum(self.tokens)
        self.locked = order_locked
        self.starts = len(starts)
        self.ends = len(ends)

    def resident(self, tree: PrefixTree[bytes]) -> int:
        """Tokens of the best order that a tree holds."""
        if self.locked:
            return tree.match_prefix(self.keys).tokens
        pinned = tree.match_prefix(self.keys[: self.starts])
        if pinned.blocks < self.starts:
            return pinned.tokens
        free = self.keys[self.starts : len(self.keys) - self.ends]
        path = tree.deepest_path(free, self.keys[: self.starts])
        if self.ends and len(path) == len(free):
            best = [*self.keys[: self.starts], *[free[i] for i in path], *self.keys[len(self.keys) - self.ends :]]
            return tree.match_prefix(best).tokens
        return pinned.tokens + sum([self.tokens[self.starts + i] for i in path])


# Estimated bytes, with CPython on 64 bits and nothing shared with the application; measured by a test.
_TREE, _NODE, _BLOCK = 1_100, 400, 110


class Cache:
    """What one replica is predicted to hold of one scope."""

    __slots__ = ("counted_bytes", "tree", "under_way")

    def __init__(self, tree: PrefixTree[bytes]) -> None:
        self.tree = tree
        self.under_way = PromptsUnderWay()
        self.counted_bytes = 0
        """What its tenant has counted for it."""

    @property
    def bytes(self) -> int:
        """Estimated memory of the tree. O(1)."""
        return _TREE + _NODE * self.tree.nodes + _BLOCK * self.tree.blocks


class Known:
    """One scope: what each replica holds, and how its reports compare with predictions."""

    __slots__ = ("_capacity_tokens", "_max_nodes", "caches", "feedback")

    def __init__(self, capacity_tokens: int | None, max_nodes: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self.caches: dict[Member, Cache] = {}
        self.feedback = UsageFeedback()

    def cache(self, member: Member) -> Cache:
        cache = self.caches.get(member)
        if cache is None:
            capacity = member.replica.capacity_tokens
            tree = PrefixTree[bytes](self._capacity_tokens if capacity is None else capacity, self._max_nodes)
            cache = Cache(tree)
            if member.alive:
                self.caches[member] = cache
        return cache

    def held(self, member: Member, asked: Asked) -> int:
        """Tokens that it holds, of what is asked for in the best order."""
        cache = self.caches.get(member)
        return 0 if cache is None or not asked.keys else asked.resident(cache.tree)

    def coming(self, member: Member, asked: Asked) -> int:
        """Tokens that a prompt on its way there begins with, too."""
        cache = self.caches.get(member)
        return 0 if cache is None else cache.under_way.match(asked.keys, asked.tokens)


class Home(NamedTuple):
    """Where a conversation's history is, and how long it is."""

    member: Member
    tokens: int
    computed: int
    """Tokens that the replica had computed for the tenant by then."""


class _Load:
    """What one replica has to do, in tokens, and has had lately."""

    __slots__ = ("in_flight", "recent", "requests", "waiting")

    def __init__(self, recent: float) -> None:
        self.requests = 0
        self.in_flight = 0
        self.waiting = 0
        self.recent = recent


class Loads:
    """The loads that one tenant sees."""

    def __init__(self, window_tokens: int, members: Iterable[Member]) -> None:
        self._window_tokens = window_tokens
        self.by_member = {member: _Load(0.0) for member in members}

    def of(self, member: Member) -> float:
        load = self.by_member[member]
        return load.in_flight + load.recent

    def total(self) -> float:
        return sum([load.in_flight + load.recent for load in self.by_member.values()])

    def join(self, member: Member) -> None:
        """Of what was lately, it begins with the others' mean, or everything would go to it."""
        weights = sum(other.weight for other in self.by_member)
        recent = sum(load.recent for load in self.by_member.values()) / weights if weights else 0.0
        self.by_member[member] = _Load(recent * member.weight)

    def leave(self, member: Member) -> None:
        del self.by_member[member]

    def book(self, member: Member, prompt: int, waiting: int) -> None:
        load = self.by_member[member]
        load.requests += 1
        load.in_flight += prompt
        load.waiting += waiting

    def take_back(self, member: Member, prompt: int, waiting: int) -> None:
        load = self.by_member[member]
        load.requests -= 1
        load.in_flight -= prompt
        load.waiting -= waiting

    def prefilled(self, member: Member, waiting: int) -> None:
        self.by_member[member].waiting -= waiting

    def served(self, member: Member, prompt: int) -> None:
        """What was before counts less, by so many tokens."""
        weights = sum([member.weight for member in self.by_member])
        factor = math.exp(-prompt / (self._window_tokens * weights))
        for load in self.by_member.values():
            load.recent *= factor
        self.by_member[member].recent += prompt
