"""What a `ReplicaRouter` keeps per tenant: predicted caches, loads, conversations, open routes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import add
from typing import NamedTuple

from warmprefix.blocks import ContextBlock, pins
from warmprefix.plan import PlannedBlock
from warmprefix.prefix import PrefixTree
from warmprefix.residency import EngineProfile, EngineReport, ReuseTree, UsageFeedback
from warmprefix_routing.members import Member, check_range
from warmprefix_routing.tenants import TenantState

__all__ = [
    "OpenRoute",
    "ReplicaBounds",
    "ReplicaCache",
    "ReplicaLoad",
    "ReplicaLoads",
    "ReplicaTenant",
    "RequestBlocks",
]

# Estimated bytes, with CPython on 64 bits and nothing shared with the application; a test measures them.
_TENANT, _REPLICA, _SCOPE, _CONVERSATION = 2_800, 160, 3_200, 330
_TREE, _NODE, _BLOCK = 1_100, 400, 110
_ROUTE, _KEY = 320, 350
"""Per open route, and per block in it."""


class RequestBlocks:
    """The blocks of one request, in the form that prefix trees take."""

    __slots__ = ("ends", "joined", "keys", "locked", "starts", "tokens", "total")

    def __init__(
        self, blocks: Sequence[ContextBlock], order_locked: bool, joined: frozenset[int] = frozenset()
    ) -> None:
        kept_at = pins(blocks, joined)
        pinned = ("start", None, "end")
        starts, middle, ends = ([i for i, pin in enumerate(kept_at) if pin == place] for place in pinned)
        self.joined = {place for place, i in enumerate(middle) if i in joined}
        """Of the blocks without a pin, those that stay directly behind the one before them."""
        if (starts or ends) and not order_locked:
            blocks = [blocks[i] for i in [*starts, *middle, *ends]]
        self.keys = [block.fingerprint for block in blocks]
        """In relevance order, pinned blocks at their ends."""
        self.tokens = [block.tokens for block in blocks]
        self.total = sum(self.tokens)
        self.locked = order_locked
        self.starts = len(starts)
        self.ends = len(ends)

    def resident(self, tree: PrefixTree[bytes]) -> int:
        """Return the tokens of the best order that a tree holds."""
        if not self.keys:
            return 0
        if self.locked:
            return tree.match_prefix(self.keys).tokens
        first, last = self.keys[: self.starts], self.keys[len(self.keys) - self.ends :]
        pinned = tree.match_prefix(first)
        if pinned.blocks < self.starts:
            return pinned.tokens
        free = self.keys[self.starts : len(self.keys) - self.ends]
        path = tree.deepest_path(free, first, joined=self.joined)
        if self.ends and len(path) == len(free):
            return tree.match_prefix([*first, *[free[i] for i in path], *last]).tokens
        return pinned.tokens + sum([self.tokens[self.starts + i] for i in path])


@dataclass(slots=True)
class PromptsInFlight:
    """Counts the prompts in flight by their first blocks, so that a request can follow one not answered yet."""

    count: int = 0
    next: dict[bytes, PromptsInFlight] = field(default_factory=dict)
    """The prompts that continue with a block."""

    def add(self, keys: Sequence[bytes]) -> None:
        """Count a prompt until it is removed. O(blocks)."""
        prompts = self
        for key in keys:
            following = prompts.next.get(key)
            if following is None:
                following = prompts.next[key] = PromptsInFlight()
            following.count += 1
            prompts = following

    def remove(self, keys: Sequence[bytes]) -> None:
        """Stop counting a prompt. O(blocks)."""
        prompts = self
        for key in keys:
            following = prompts.next[key]
            following.count -= 1
            if not following.count:
                del prompts.next[key]
                if not self.next:
                    self.next.clear()  # releases its table
                return
            prompts = following

    def match(self, keys: Sequence[bytes], tokens: Sequence[int]) -> int:
        """Return the tokens of the longest prefix of `keys` that a prompt in flight shares. O(blocks)."""
        matched = 0
        prompts = self
        for key, length in zip(keys, tokens, strict=True):
            following = prompts.next.get(key)
            if following is None:
                break
            matched += length
            prompts = following
        return matched


@dataclass(slots=True)
class ReplicaCache:
    """The predicted cache of one replica in one scope."""

    tree: PrefixTree[bytes]
    in_flight: PromptsInFlight = field(default_factory=PromptsInFlight)
    recorded_bytes: int = 0
    """Bytes that the tenant counts for it."""

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the tree. O(1)."""
        return _TREE + _NODE * self.tree.nodes + _BLOCK * self.tree.blocks


@dataclass(slots=True)
class ScopeCaches:
    """The replicas' predicted caches in one scope, and how reports compare with the predictions."""

    caches: dict[Member, ReplicaCache] = field(default_factory=dict)
    feedback: UsageFeedback = field(default_factory=UsageFeedback)

    def predict(self, member: Member, request: RequestBlocks) -> tuple[int, int]:
        """Return the tokens that a replica holds in the request's best order, now and after its prompts in flight."""
        cache = self.caches.get(member)
        if cache is None:
            return 0, 0
        held = request.resident(cache.tree)
        return held, max(held, cache.in_flight.match(request.keys, request.tokens))


class ConversationPlacement(NamedTuple):
    """The replica of a conversation's history."""

    member: Member
    tokens: int
    """Length of the history."""
    computed: int
    """Tokens that the replica had computed for the tenant by then."""


@dataclass(slots=True)
class OpenRoute:
    """What a route that is neither committed nor abandoned has booked."""

    member: Member
    prompt_tokens: int
    waiting: int
    """Tokens of the prompt that are still to be computed."""
    held: int
    """Tokens of the prompt that the replica's tree held when it was routed."""
    in_flight: PromptsInFlight | None
    """Counts the blocks; None if they do not open the prompt."""
    keys: Sequence[bytes]
    """Fingerprints of the request's blocks."""


class ReplicaLoad(NamedTuple):
    """What routers sent to a replica, in tokens."""

    recent: float = 0.0
    requests: int = 0
    """Number in flight."""
    in_flight: int = 0
    waiting: int = 0
    """Of these tokens, those that are still to be computed."""

    def plus(self, other: Sequence[float]) -> ReplicaLoad:
        """Return the sum of two loads."""
        return ReplicaLoad._make(map(add, self, other))


class ReplicaLoads:
    """The replicas' loads, of one tenant or of all together."""

    def __init__(self, window_tokens: int, members: Iterable[Member]) -> None:
        self._window_tokens = window_tokens
        self.by_member = {member: ReplicaLoad() for member in members}
        """What this router sent."""
        self.elsewhere: Mapping[str, ReplicaLoad] = {}
        """What other routers sent to replicas, by their names."""

    def total(self, member: Member) -> ReplicaLoad:
        """Return what all routers sent to a replica."""
        elsewhere = self.elsewhere.get(member.name)
        return self.by_member[member] if elsewhere is None else self.by_member[member].plus(elsewhere)

    def of(self, member: Member) -> float:
        """Return a replica's tokens in flight and lately."""
        load = self.total(member)
        return load.in_flight + load.recent

    def join(self, member: Member) -> None:
        """Add a replica, with the others' mean recent load so that it does not receive everything at once."""
        weights = sum(other.weight for other in self.by_member)
        recent = sum(load.recent for load in self.by_member.values()) / weights if weights else 0.0
        self.by_member[member] = ReplicaLoad(recent * member.weight)

    def add(self, member: Member, requests: int, prompt: int, waiting: int) -> None:
        """Add requests in flight, their tokens, and those still to be computed; negative numbers take back."""
        self.by_member[member] = self.by_member[member].plus((0.0, requests, prompt, waiting))

    def serve(self, member: Member, prompt: int) -> None:
        """Record a served prompt as recent load; all earlier load decays by its tokens."""
        weights = sum([member.weight for member in self.by_member])
        factor = math.exp(-prompt / (self._window_tokens * weights))
        for other, load in self.by_member.items():
            self.by_member[other] = load._replace(recent=load.recent * factor + prompt * (other is member))


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Numbers of a `ReplicaRouter`: of the choice, and bounds per tenant, except those on tenants and memory.

    Raises:
        TypeError: A field is no number.
        ValueError: A field is out of range.
    """

    eps: float = 0.25
    """How far a replica's load may be above the mean, as a share of it."""
    floor_tokens: int = 50_000
    """A load that is never too high, so that a few requests are not spread for balance alone."""
    waiting_weight: float = 0.25
    """Cost of a token that the replica computes first, relative to one of the request's own. It is less than 1, because
    a prompt computed at another replica costs twice: there it evicts other prefixes."""
    held_weight: float = 0.02
    """Cost of a token in flight: what an engine decodes slows a newcomer down a little."""
    window_tokens: int = 1_000_000
    """Tokens per replica after which load counts 1/e."""
    max_nodes: int = 16_384
    """Most nodes of a prefix tree, per replica and scope."""
    max_scopes: int = 1_024
    """Most preambles; beyond it the least recently used is forgotten."""
    max_conversations: int = 10_000
    """Most conversations."""
    max_open_routes: int = 10_000
    """Most open routes; beyond it the oldest counts as abandoned."""
    max_tenants: int = 1_024
    """Most tenants; beyond it the least recently used is forgotten."""
    max_bytes: int = 500_000_000
    """Most memory of all tenants together, estimated to within a quarter. Beyond it, tenants that take more than
    `max_bytes / max_tenants` forget their oldest records, the least recently used tenant first; a tenant that takes
    less is never affected. Up to a sixteenth holds the latest orders, if engines report cached tokens."""

    def __post_init__(self) -> None:
        bounds = asdict(self)
        may_be_zero = ("eps", "floor_tokens", "waiting_weight", "held_weight")
        check_range(0, True, **{name: bounds.pop(name) for name in may_be_zero})
        del bounds["max_nodes"]  # which `PrefixTree` checks
        check_range(1, **bounds)


class ReplicaTenant(TenantState):
    """One tenant of a `ReplicaRouter`. It does not own the loads that it sees if tenants share them."""

    def __init__(
        self, bounds: ReplicaBounds, capacity_tokens: int | None, loads: ReplicaLoads, owns_loads: bool
    ) -> None:
        self._bounds = bounds
        self._capacity_tokens = capacity_tokens
        self.loads = loads
        self._owns_loads = owns_loads
        self.scopes: OrderedDict[bytes | None, ScopeCaches] = OrderedDict()
        """By the fingerprint of the preamble."""
        self.conversations: OrderedDict[str, ConversationPlacement] = OrderedDict()
        self._computed: dict[Member, int] = {}
        """Tokens that each replica has computed so far."""
        self.open: OrderedDict[str, OpenRoute] = OrderedDict()
        """By the route's id."""
        self._open_bytes = self._tree_bytes = 0

    @property
    def fixed_bytes(self) -> int:
        return _TENANT + _REPLICA * len(self.loads.by_member)

    def shrinkable(self) -> Sequence[tuple[int, Callable[[int], object]]]:
        return (
            (self._tree_bytes, self._shrink_oldest_scope),
            (_CONVERSATION * len(self.conversations), lambda _: self.conversations.popitem(last=False)),
            (self._open_bytes, lambda _: self.close(next(iter(self.open)))),
        )

    def compact(self) -> None:
        """Release the tables of forgotten entries, and stale paths, which a copy of a tree omits."""
        self.open = OrderedDict(self.open)
        self.conversations = OrderedDict(self.conversations)
        self.scopes = OrderedDict(self.scopes)
        for scope in self.scopes.values():
            for cache in scope.caches.values():
                cache.tree = cache.tree.copy()
                self.record(cache)

    def _shrink_oldest_scope(self, _: int) -> None:
        """Evict a part of the scope's largest tree; forget the tree if nothing is left, or the scope without trees."""
        preamble, scope = next(iter(self.scopes.items()))
        if not scope.caches:
            self._forget_scope(preamble)
            return
        member, cache = max(scope.caches.items(), key=lambda entry: entry[1].recorded_bytes)
        before = cache.recorded_bytes
        cache.tree.evict(cache.tree.resident_tokens // 16 + 1)
        self.record(cache)
        if cache.recorded_bytes == before:
            del scope.caches[member]
            self._tree_bytes -= before

    def _forget_scope(self, preamble: bytes | None) -> None:
        scope = self.scopes.pop(preamble)
        self._tree_bytes -= _SCOPE + sum([cache.recorded_bytes for cache in scope.caches.values()])

    def record(self, cache: ReplicaCache) -> None:
        """Record a cache's memory after its tree changed."""
        before, cache.recorded_bytes = cache.recorded_bytes, cache.memory_bytes
        self._tree_bytes += cache.recorded_bytes - before

    def join(self, member: Member) -> None:
        if self._owns_loads:
            self.loads.join(member)

    def leave(self, member: Member) -> None:
        """Remove a replica: its open routes count as abandoned, its caches are forgotten."""
        self.close_all(member)
        self._computed.pop(member, None)
        for scope in self.scopes.values():
            cache = scope.caches.pop(member, None)
            if cache is not None:
                self._tree_bytes -= cache.recorded_bytes
        if self._owns_loads:
            del self.loads.by_member[member]

    def scope(self, preamble: bytes | None) -> ScopeCaches:
        """Return the caches behind a preamble. Beyond `max_scopes`, the least recently used scope is forgotten."""
        scope = self.scopes.get(preamble)
        if scope is not None:
            self.scopes.move_to_end(preamble)
            return scope
        scope = self.scopes[preamble] = ScopeCaches()
        self._tree_bytes += _SCOPE
        if len(self.scopes) > self._bounds.max_scopes:
            self._forget_scope(next(iter(self.scopes)))
        return scope

    def cache(self, scope: ScopeCaches, member: Member) -> ReplicaCache:
        """Return a replica's cache in a scope, created if new."""
        cache = scope.caches.get(member)
        if cache is None:
            tree = PrefixTree[bytes](self._capacity(member), self._bounds.max_nodes)
            cache = scope.caches[member] = ReplicaCache(tree)
            self.record(cache)
        return cache

    def _capacity(self, member: Member) -> int | None:
        capacity = member.spec.capacity_tokens
        return self._capacity_tokens if capacity is None else capacity

    def add_open(self, id: str, route: OpenRoute) -> None:
        """Book a route. Beyond `max_open_routes`, the oldest open route counts as abandoned."""
        self.loads.add(route.member, 1, route.prompt_tokens, route.waiting)
        if route.in_flight is not None:
            route.in_flight.add(route.keys)
        self.open[id] = route
        self._open_bytes += _ROUTE + _KEY * len(route.keys)
        if len(self.open) > self._bounds.max_open_routes:
            self.close(next(iter(self.open)))

    def prefilled(self, id: str) -> bool:
        """Record that a route's prompt is computed. True if the route was open."""
        route = self.open.get(id)
        if route is None:
            return False
        self.loads.add(route.member, 0, 0, -route.waiting)
        route.waiting = 0
        return True

    def close(self, id: str) -> OpenRoute | None:
        """Remove and return an open route, without its bookings; None if it was not open."""
        route = self.open.pop(id, None)
        if route is not None:
            self.loads.add(route.member, -1, -route.prompt_tokens, -route.waiting)
            if route.in_flight is not None:
                route.in_flight.remove(route.keys)
            self._open_bytes -= _ROUTE + _KEY * len(route.keys)
        return route

    def close_all(self, member: Member | None = None) -> None:
        """Close the routes to one replica, or all. O(open routes)."""
        for id, route in list(self.open.items()):
            if member is None or route.member is member:
                self.close(id)

    def history(self, placement: ConversationPlacement, member: Member) -> int:
        """Return the tokens of a conversation's history that a replica holds: all, or 0.

        It is 0 if the replica has computed so much since that its cache must have lost the end of the history.
        """
        if placement.member is not member or not member.alive:
            return 0
        capacity = self._capacity(member)
        since = self._computed.get(member, 0) - placement.computed
        return placement.tokens if capacity is None or placement.tokens + since <= capacity else 0

    def record_answer(self, conversation: str | None, route: OpenRoute, report: EngineReport) -> None:
        """Record that a replica computed a prompt, by the engine's counts if any, and holds the conversation now."""
        member = route.member
        tokens = route.prompt_tokens if report.prompt_tokens is None else report.prompt_tokens
        cached = route.held if report.cached_tokens is None else report.cached_tokens
        computed = self._computed[member] = self._computed.get(member, 0) + max(tokens - cached, 0)
        if conversation is None:
            return
        self.conversations[conversation] = ConversationPlacement(member, tokens, computed)
        self.conversations.move_to_end(conversation)
        if len(self.conversations) > self._bounds.max_conversations:
            self.conversations.popitem(last=False)

    def record_context(
        self,
        preamble: bytes | None,
        route: OpenRoute,
        planned: Sequence[PlannedBlock],
        report: EngineReport,
        is_current: bool,
        tenant: str | None,
        profile: EngineProfile,
        served: ReuseTree,
    ) -> bool:
        """Record that a replica holds one or more blocks, in this order, right behind the preamble.

        The `profile` of the replicas learns from the report, given the orders `served` before; with checkpoints a
        shortfall shows nothing of residency.
        `is_current` means that a feed makes the report superfluous. Returns True if less was held than predicted, and
        the rest of the path is now marked stale.
        """
        scope = self.scope(preamble)
        cache = self.cache(scope, route.member)
        tree = cache.tree
        keys = [block.block.fingerprint for block in planned]
        tokens = [block.block.tokens for block in planned]
        # Blocks inserted since the routing may have been computed at the same time, and so prove nothing.
        before = sum(end <= route.held for end in accumulate(tokens))
        expected = min(tree.match_prefix(keys).blocks, before)
        comparison = scope.feedback.compare(planned, expected, report)
        is_stale = False
        if report.profile is not None:
            profile.learn(report.profile)
        path = [(tenant, preamble, route.member.name), *keys]
        if comparison is not None:
            profile.observe(served.visit(path), tokens, comparison, tree.capacity_tokens)
            held = comparison.likely_blocks + 1  # one may have been miscounted
            is_stale = held < expected and profile.current.checkpoints is None and not is_current
            if is_stale:
                tree.mark_stale(keys, held)
        if comparison is not None or served.nodes:  # without reports there is nothing to explain
            served.insert(path, [0, *tokens])
        tree.insert(keys, tokens)
        self.record(cache)
        return is_stale
