"""What one tenant's requests taught of replicas: what they hold, where conversations are, what is under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from warmprefix.plan import PlannedBlock
from warmprefix.residency import EngineReport
from warmprefix.routing.memory import TenantState
from warmprefix.routing.replica_state import Cache, Home, Known, Loads, Member
from warmprefix.routing.underway import PromptsUnderWay

__all__ = ["Bounds", "OpenRoute", "TenantReplicas"]

# Estimated bytes, with CPython on 64 bits and nothing shared with the application; measured by a test.
_TENANT, _REPLICA, _SCOPE, _HOME = 2_800, 160, 3_200, 330
_ROUTE, _KEY = 320, 350
"""Of an open route, and of a block in it."""


class Bounds(NamedTuple):
    """On what is kept of one tenant."""

    capacity_tokens: int | None
    """Of a prefix tree, where the replica has no number of its own."""
    max_nodes: int
    """Of a prefix tree."""
    max_scopes: int
    max_conversations: int
    max_open_routes: int


@dataclass(slots=True)
class OpenRoute:
    """A route that is neither committed nor abandoned, and what it has booked. It keeps no text."""

    member: Member
    prompt_tokens: int
    waiting: int
    """Of those, the ones still to be computed."""
    held: int
    """Of those, the ones that the replica's tree said it held then."""
    under_way: PromptsUnderWay | None
    """Where its blocks count; None if they do not open the prompt."""
    keys: Sequence[bytes]
    """Fingerprints of its blocks, as they were asked for."""


class TenantReplicas(TenantState):
    """Not thread-safe: the router calls it under its lock. Memory is bounded by what the constructor is given.

    To `shrink`, it forgets what it has most of: paths of trees, conversations, or open routes.

    Args:
        bounds: The router's.
        loads: What this tenant sees of the replicas' loads; its own, or everybody's.
    """

    def __init__(self, bounds: Bounds, loads: Loads) -> None:
        self._bounds = bounds
        self.loads = loads
        self.scopes: OrderedDict[bytes | None, Known] = OrderedDict()
        """By the fingerprint of the preamble."""
        self.homes: OrderedDict[str, Home] = OrderedDict()
        """By the conversation."""
        self._computed: dict[Member, int] = {}
        """Tokens that each has computed, so far."""
        self.open: OrderedDict[str, OpenRoute] = OrderedDict()
        """By the route's id."""
        self._open_bytes = self._tree_bytes = 0

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        fixed = _TENANT + _REPLICA * len(self.loads.by_member)
        return fixed + self._open_bytes + self._tree_bytes + _HOME * len(self.homes)

    def shrink(self, excess: int) -> bool:
        target = self.memory_bytes - excess
        shrunk = False
        while self.memory_bytes > target and (self.open or self.scopes or self.homes):
            home_bytes = _HOME * len(self.homes)
            most = max(self._open_bytes, self._tree_bytes, home_bytes)
            if most == self._tree_bytes:
                self._shrink_oldest_scope()
            elif most == home_bytes:
                self.homes.popitem(last=False)
            else:
                self.close(next(iter(self.open)))
            shrunk = True
        return shrunk

    def compact(self) -> None:
        """Stale paths go too: a copy of a tree is without them."""
        self.open = OrderedDict(self.open)
        self.homes = OrderedDict(self.homes)
        self.scopes = OrderedDict(self.scopes)
        for known in self.scopes.values():
            for cache in known.caches.values():
                cache.tree = cache.tree.copy()
                self.recount(cache)

    def _shrink_oldest_scope(self) -> None:
        """Forget a part of its largest tree, or the scope if it has none."""
        preamble, known = next(iter(self.scopes.items()))
        if not known.caches:
            self._forget_scope(preamble)
            return
        member, cache = max(known.caches.items(), key=_counted_bytes)
        before = cache.counted_bytes
        cache.tree.evict(cache.tree.resident_tokens // 16 + 1)
        self.recount(cache)
        if cache.counted_bytes == before:
            del known.caches[member]
            self._tree_bytes -= before

    def _forget_scope(self, preamble: bytes | None) -> None:
        known = self.scopes.pop(preamble)
        self._tree_bytes -= _SCOPE + sum([cache.counted_bytes for cache in known.caches.values()])

    def recount(self, cache: Cache) -> None:
        """Record that the tree of one of the caches changed."""
        before, cache.counted_bytes = cache.counted_bytes, cache.bytes
        self._tree_bytes += cache.counted_bytes - before

    # -- what replicas hold ------------------------------------------------------------------------------------

    def known(self, preamble: bytes | None) -> Known:
        """What replicas hold behind this preamble; if there are too many, the one not used longest is forgotten."""
        known = self.scopes.get(preamble)
        if known is not None:
            self.scopes.move_to_end(preamble)
            return known
        known = self.scopes[preamble] = Known(self._bounds.capacity_tokens, self._bounds.max_nodes)
        self._tree_bytes += _SCOPE
        if len(self.scopes) > self._bounds.max_scopes:
            self._forget_scope(next(iter(self.scopes)))
        return known

    def cache(self, known: Known, member: Member) -> Cache:
        """What a replica that is there holds behind the preamble."""
        cache = known.caches.get(member)
        if cache is None:
            cache = known.cache(member)
            self.recount(cache)
        return cache

    # -- routes whose end is not known -------------------------------------------------------------------------

    def opened(self, id: str, route: OpenRoute) -> None:
        """Book it. If there are too many, nobody will tell of the oldest: it counts as abandoned."""
        self.loads.book(route.member, route.prompt_tokens, route.waiting)
        if route.under_way is not None:
            route.under_way.add(route.keys)
        self.open[id] = route
        self._open_bytes += _ROUTE + _KEY * len(route.keys)
        if len(self.open) > self._bounds.max_open_routes:
            self.close(next(iter(self.open)))

    def prefilled(self, id: str) -> bool:
        """Others do not wait for it any more. Returns whether it was open."""
        route = self.open.get(id)
        if route is None:
            return False
        self.loads.prefilled(route.member, route.waiting)
        route.waiting = 0
        return True

    def close(self, id: str) -> OpenRoute | None:
        """Take back what it had booked; None if it was not open."""
        route = self.open.pop(id, None)
        if route is not None:
            self.loads.take_back(route.member, route.prompt_tokens, route.waiting)
            if route.under_way is not None:
                route.under_way.remove(route.keys)
            self._open_bytes -= _ROUTE + _KEY * len(route.keys)
        return route

    def close_all(self, member: Member | None = None) -> None:
        """Those of one replica, or all. O(open routes)."""
        for id, route in list(self.open.items()):
            if member is None or route.member is member:
                self.close(id)

    def leave(self, member: Member) -> None:
        """A replica is gone; its load is the router's to forget."""
        self.close_all(member)
        self._computed.pop(member, None)
        for known in self.scopes.values():
            cache = known.caches.pop(member, None)
            if cache is not None:
                self._tree_bytes -= cache.counted_bytes

    # -- what was served ---------------------------------------------------------------------------------------

    def history(self, home: Home, member: Member) -> int:
        """Tokens of a conversation's history that a replica still holds: all, or nothing.

        Nothing if it has computed so much since that its cache must have lost the history's end, and more and more of
        it soon.
        """
        if home.member is not member or not member.alive:
            return 0
        capacity = member.replica.capacity_tokens
        if capacity is None:
            capacity = self._bounds.capacity_tokens
        since = self._computed.get(member, 0) - home.computed
        return home.tokens if capacity is None or home.tokens + since <= capacity else 0

    def answered(self, conversation: str | None, route: OpenRoute, report: EngineReport) -> None:
        """The replica has computed the route's prompt; if it ends a conversation's history, that is there now.

        The engine's counts of tokens go before the route's.
        """
        member = route.member
        tokens = route.prompt_tokens if report.prompt_tokens is None else report.prompt_tokens
        cached = route.held if report.cached_tokens is None else report.cached_tokens
        computed = self._computed[member] = self._computed.get(member, 0) + max(tokens - cached, 0)
        if conversation is None:
            return
        self.homes[conversation] = Home(member, tokens, computed)
        self.homes.move_to_end(conversation)
        if len(self.homes) > self._bounds.max_conversations:
            self.homes.popitem(last=False)

    def served(
        self,
        preamble: bytes | None,
        route: OpenRoute,
        planned: Sequence[PlannedBlock],
        report: EngineReport,
        fed: bool,
    ) -> bool:
        """The replica holds these blocks now, in this order, right behind the preamble.

        Args:
            preamble: Its fingerprint.
            route: The one that was closed.
            planned: At least one.
            report: Of the engine.
            fed: Whether what the replica holds is known better than by a report.

        Returns:
            Whether less was held than predicted, and the rest is not counted on any more.
        """
        known = self.known(preamble)
        cache = known.cache(route.member)
        tree = cache.tree
        keys = [block.block.fingerprint for block in planned]
        tokens = [block.block.tokens for block in planned]
        # What was inserted since it was routed may have been computed at the same time, and so proves nothing.
        before = sum(end <= route.held for end in accumulate(tokens))
        expected = min(tree.match_prefix(keys).blocks, before)
        comparison = known.feedback.compare(planned, expected, report)
        is_stale = comparison is not None and comparison.resident_blocks < expected and not fed
        if comparison is not None and is_stale:
            tree.mark_stale(keys, comparison.resident_blocks)
        tree.insert(keys, tokens)
        self.recount(cache)
        return is_stale


def _counted_bytes(held: tuple[Member, Cache]) -> int:
    return held[1].counted_bytes
