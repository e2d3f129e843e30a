"""What one tenant's requests taught of replicas: what they hold, where conversations are, what is under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from warmprefix.plan import PlannedBlock
from warmprefix.residency.base import EngineReport
from warmprefix.routing.replica_state import Cache, Home, Known, Loads, Member

__all__ = ["Bounds", "OpenRoute", "TenantReplicas"]


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
    cache: Cache | None
    """Where its blocks count as under way; None if they do not open the prompt."""
    keys: Sequence[bytes]
    """Fingerprints of its blocks, as they were asked for."""


class TenantReplicas:
    """Not thread-safe: the router calls it under its lock. Memory is bounded by what the constructor is given.

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

    def known(self, preamble: bytes | None) -> Known:
        """What replicas hold behind this preamble; if there are too many, the one not used longest is forgotten."""
        known = self.scopes.get(preamble)
        if known is not None:
            self.scopes.move_to_end(preamble)
            return known
        known = self.scopes[preamble] = Known(self._bounds.capacity_tokens, self._bounds.max_nodes)
        if len(self.scopes) > self._bounds.max_scopes:
            self.scopes.popitem(last=False)
        return known

    # -- routes whose end is not known -------------------------------------------------------------------------

    def opened(self, id: str, route: OpenRoute) -> None:
        """Book it. If there are too many, nobody will tell of the oldest: it counts as abandoned."""
        self.loads.book(route.member, route.prompt_tokens, route.waiting)
        if route.cache is not None:
            route.cache.under_way.add(route.keys)
        self.open[id] = route
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
            if route.cache is not None:
                route.cache.under_way.remove(route.keys)
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
            known.caches.pop(member, None)

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
        tree = known.cache(route.member).tree
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
        return is_stale
