"""`ReplicaRouter`: each request to the replica of a model that computes the least for it, and soon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, fingerprint, joined_blocks
from warmprefix.cache_profiles import CacheProfile, vllm_checkpoints
from warmprefix.errors import NoAgentError
from warmprefix.plan import ContextPlan, PlannedBlock, Scope
from warmprefix.prefix import PrefixTree
from warmprefix.residency import EngineProfile, EngineReport, FoundCheckpoints, ResidencyTarget, ReuseTree
from warmprefix_routing.assignments import ReplicaStats
from warmprefix_routing.balance import rendezvous_score
from warmprefix_routing.fleet import Fleet, check_request, listed
from warmprefix_routing.members import Member, Replica, check_range, check_type
from warmprefix_routing.replica_state import (
    OpenRoute,
    ReplicaBounds,
    ReplicaLoad,
    ReplicaLoads,
    ReplicaTenant,
    RequestBlocks,
)

__all__ = ["ReplicaRouter", "Route"]

_TEMPLATES = Templates()
_CONVERSATION_EPS = 3.0
"""Factor on `eps` for a conversation that has a replica."""
_PART_OF_SERVED = 16
"""The served orders take at most one part in this many of the memory."""
_MOST_SERVED = 8_192
_NODE, _BLOCK = 600, 110
"""Estimated bytes of the served orders, with their part of the clock."""


@dataclass(frozen=True, slots=True)
class Route:
    """The replica of one request. It identifies its request: pass it whole to `commit` or `abandon`."""

    id: str
    """Unique among all routers."""
    replica: str
    """Name of the chosen replica."""
    tenant: str | None
    """Name of the tenant; None without one."""
    preamble: bytes | None = field(repr=False)
    """Fingerprint of the text in front of the context."""
    conversation: str | None
    """The id of the conversation; None without one."""
    blocks: tuple[ContextBlock, ...] = field(repr=False)
    """In relevance order, each distinct block once."""
    prompt_tokens: int
    """Length of the prompt in tokens."""
    resident_tokens: int
    """Tokens of the prompt that the replica is predicted to hold."""
    costs: dict[str, float]
    """Tokens that the request costs at each replica; the router chose the cheapest with room."""
    spilled: bool
    """True if a cheaper replica had no room for it."""

    @property
    def cost(self) -> float:
        """Tokens that the request costs at its replica."""
        return self.costs[self.replica]


class ReplicaRouter(Fleet[ReplicaTenant]):
    """Chooses the replica for each request, by what it is predicted to hold and by its load. Without I/O.

    It chooses the cheapest of the replicas that have room, where

        cost(r) = (prompt - resident(r) + waiting_weight * waiting(r) + held_weight * in_flight(r)) / weight(r)

    all in tokens: `prompt`, the request's; `resident(r)`, the part that `r` is predicted to hold in the best order of
    the blocks, or of the conversation's history; `waiting(r)`, what `r` has yet to compute of prompts sent there, until
    their first token (`prefilled`) or end; `in_flight(r)`, all tokens of the prompts it works on.

    A replica has room if the request does not take its load above `(1 + eps)` times the mean, or `floor_tokens`; or if
    no other replica has less load; or if it has nothing in flight. For a conversation that has a replica, `eps` counts
    three times, because a move computes its whole history again. Load is what is in flight there, and what was lately,
    by weight. Among replicas of equal cost, rendezvous hashing by the conversation or the first block decides: requests
    with the same beginning meet there, also those that other processes route, and no replica is preferred for its place
    in a list. If the order is locked, it is the first block that not all of these replicas hold.

    One tenant's requests, their load included, have no influence on another's (see `share_load`); all bounds except
    those on tenants and memory are per tenant. Deterministic given the earlier calls. Thread-safe. No text is kept.
    O(replicas * blocks) per request, plus the path search of `PrefixTree`, however many requests there were before.

    >>> router = ReplicaRouter(["http://a/v1", "http://b/v1"])
    >>> sky, sea = ContextBlock("The sky is blue.", id="sky"), ContextBlock("The sea is deep.", id="sea")
    >>> first = router.route([sky, sea])
    >>> router.commit(first)
    True
    >>> second = router.route([sea, sky])
    >>> second.replica == first.replica, second.resident_tokens
    (True, 8)
    """

    _kind = "replica"
    _spec = Replica
    _closes_feeds = True

    def __init__(
        self,
        replicas: Iterable[Replica | str] = (),
        *,
        capacity_tokens: int | None = 500_000,
        bounds: ReplicaBounds | None = None,
        share_load: bool = False,
        listener: ResidencyTarget | None = None,
        profile: CacheProfile | str = "auto",
    ) -> None:
        """Start with empty caches.

        Args:
            capacity_tokens: Tokens of context in a replica's prefix cache, for replicas without a number of their own;
                None for no bound.
            bounds: Numbers that are rarely changed; None for the defaults.
            share_load: Count the load of all tenants together. It balances better where many tenants have little to do
                each. But then one tenant's requests influence where another's go, which their latencies can reveal.
            listener: Receives the feeds' reports on plans as well: the planner's `residency`, whose scopes they have.
            profile: Where the caches of the replicas can match, as for `ContextPlanner`.

        Raises:
            TypeError: `replicas` is one string, or has an element of another type.
            ValueError: Two replicas have one name, `capacity_tokens` is below 1, or the profile is unknown.
        """
        self._profile = EngineProfile(profile)
        bounds = ReplicaBounds() if bounds is None else bounds
        check_type("bounds", bounds, ReplicaBounds)
        PrefixTree[bytes](capacity_tokens, bounds.max_nodes)  # so that bad bounds fail here, not at the first request
        self._bounds = bounds
        self._served = _ServedOrders(bounds.max_bytes)
        self._capacity_tokens = capacity_tokens
        self._share_load = share_load
        self._listener = listener
        self._shared_load = ReplicaLoads(bounds.window_tokens, ())
        """The load that all tenants see if they share it."""
        super().__init__(replicas, bounds.max_tenants, bounds.max_bytes)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that requests can go to."""
        with self._lock:
            return tuple(cast(Replica, member.spec) for member in self._members.values())

    def target(self, name: str) -> ResidencyTarget:
        """Return the target for a feed that a replica did not join with.

        Of a scope only tenant and preamble count. The target lives as long as the replica is a member.

        Raises:
            ValueError: No replica has this name.
        """
        with self._lock:
            return self._member(name)

    def route(
        self,
        blocks: Iterable[ContextBlock | str] = (),
        *,
        tenant: str | None = None,
        preamble: str | None = None,
        conversation: str | None = None,
        parent: str | None = None,
        prompt_tokens: int | None = None,
        order_locked: bool = False,
        replicas: Iterable[str] | None = None,
    ) -> Route:
        """Choose the replica of a request. Call `commit` once it was answered, or `abandon` if it was not.

        Args:
            blocks: The context, in relevance order. A string is a block without an id.
            tenant: Tenants share nothing, except load if `share_load`.
            preamble: The text in front of the context, or anything that names it, as for `ContextPlanner.plan`.
            conversation: Names one linear message history that opens the prompt and is kept (placement "tail"). Omit
                it where the context stands in front of the history (placement "head").
            parent: Names a conversation whose history opens this one, as for a sub-agent that begins with its parent's
                messages (`warmprefix_requests.fork`). It counts until this conversation has a replica of its own.
            prompt_tokens: Tokens of the whole prompt; by default those of the blocks and of the history so far.
            order_locked: True if the blocks will be sent in this order.
            replicas: Names of the replicas to choose from; None for all. Failed ones are skipped.

        Raises:
            NoAgentError: All of these replicas have failed or left.
            TypeError: An argument has another type.
            ValueError: `conversation` or `replicas` is empty, a name is unknown or repeated, or `prompt_tokens` is
                negative.
        """
        given = as_blocks(blocks)
        distinct, positions = distinct_blocks(given)
        check_request(conversation, tenant=tenant, preamble=preamble, parent=parent)
        check_type("prompt_tokens", prompt_tokens, int, optional=True)
        if prompt_tokens is not None:
            check_range(0, prompt_tokens=prompt_tokens)
        behind = None if preamble is None else fingerprint(preamble)
        request = RequestBlocks(distinct, order_locked, joined_blocks(given, positions))
        with self._lock:
            names = list(self._members) if replicas is None else self._available(replicas)
            if not names:
                failed = f"; {listed(self._failed)} failed" if self._failed else ""
                raise NoAgentError(f"no replica is available{failed}")
            state = self._tenants.use(tenant)
            scope, loads = state.scope(behind), state.loads
            own, opening = map(state.conversations.get, (conversation or "", parent or ""))
            placement = own or opening
            prompt = prompt_tokens
            if prompt is None:
                prompt = request.total + (0 if placement is None else placement.tokens)
            held, residents = {}, {}
            for member in map(self._members.__getitem__, names):
                if placement is None:
                    held[member], resident = scope.predict(member, request)
                else:
                    held[member] = resident = state.history(placement, member)
                residents[member] = min(resident, prompt)
            costs: dict[Member, float] = {}
            for member, resident in residents.items():
                load = loads.total(member)
                waits = self._bounds.waiting_weight * load.waiting + self._bounds.held_weight * load.in_flight
                costs[member] = (prompt - resident + waits) / member.weight

            def seed(best: Sequence[Member]) -> bytes:
                """Return what the request has in common with those that should meet it at one of these replicas."""
                parts = [b"" if tenant is None else fingerprint(tenant), behind or b""]
                if conversation is not None:
                    parts.append(fingerprint(conversation))
                elif distinct:
                    held_by_all = min(residents[member] for member in best) if order_locked else 0
                    parts.append(_first_behind(distinct, held_by_all).fingerprint)
                return b"|".join(parts)

            eps = self._bounds.eps if placement is None else _CONVERSATION_EPS * self._bounds.eps
            chosen, spilled = self._choose(loads, costs, prompt, eps, seed)
            self._number += 1
            route = Route(
                id=f"{self._instance}.{self._number}",
                replica=chosen.name,
                tenant=tenant,
                preamble=behind,
                conversation=conversation,
                blocks=tuple(distinct),
                prompt_tokens=prompt,
                resident_tokens=residents[chosen],
                costs={member.name: cost for member, cost in costs.items()},
                spilled=spilled,
            )
            moved = own is not None and own.member is not chosen
            self._counts.update(routes=1, prompt_tokens=prompt, resident_tokens=route.resident_tokens)
            self._counts.update(spilled=spilled, moved=moved)
            in_flight = state.cache(scope, chosen).in_flight if placement is None and request.keys else None
            waiting = prompt - residents[chosen]
            state.add_open(route.id, OpenRoute(chosen, prompt, waiting, held[chosen], in_flight, request.keys))
            self._tenants.record(tenant, state, used=True)
        return route

    def _choose(
        self,
        loads: ReplicaLoads,
        costs: dict[Member, float],
        prompt: int,
        eps: float,
        seed: Callable[[Sequence[Member]], bytes],
    ) -> tuple[Member, bool]:
        """Return the cheapest replica with room, and whether a cheaper one has none."""
        relative = {member: loads.of(member) / member.weight for member in costs}
        mean = (sum(map(loads.of, costs)) + prompt) / sum(member.weight for member in costs)
        limit = max(self._bounds.floor_tokens, (1 + eps) * mean)
        least = min(relative.values())
        with_room = [
            member
            for member, load in relative.items()
            if load <= least or load + prompt / member.weight <= limit or not loads.total(member).requests
        ]
        cheapest = min(costs[member] for member in with_room)
        best = [member for member in with_room if costs[member] <= cheapest]
        spilled = cheapest > min(costs.values())
        if len(best) == 1:
            return best[0], spilled
        key = blake2b(seed(best), digest_size=32).digest()
        return max(best, key=lambda member: (_preference(member, key), member.name)), spilled

    def prefilled(self, route: Route) -> bool:
        """Record the first token of the answer: others do not wait for the prompt any more. True if it was open."""
        check_type("route", route, Route)
        with self._lock:
            state = self._tenants.states.get(route.tenant)
            return state is not None and state.prefilled(route.id)

    def commit(self, route: Route, report: EngineReport | None = None, plan: ContextPlan | None = None) -> bool:
        """Record that the request was answered: the replica holds its prompt now.

        Args:
            route: One of this router's.
            report: The engine's report on the answer. If less was cached than predicted, the rest of the predicted path
                is marked stale.
            plan: The plan that was sent: its order counts, not that of the route's blocks.

        Returns:
            True if the route was open. Otherwise it was committed or abandoned before, its replica has left or failed,
            or a bound has closed it; then nothing is recorded.

        Raises:
            TypeError: An argument has another type.
            ValueError: The plan has another tenant or preamble.
        """
        check_type("route", route, Route)
        check_type("report", report, EngineReport, optional=True)
        check_type("plan", plan, ContextPlan, optional=True)
        if plan is not None and plan.scope.tenant != route.tenant:
            raise ValueError(f"plan must have the route's tenant {route.tenant!r}, got {plan.scope.tenant!r}")
        if plan is not None and plan.scope.preamble != route.preamble:
            raise ValueError(f"plan must have the route's preamble {route.preamble!r}, got {plan.scope.preamble!r}")
        is_current = self._feed_is_current(self._members.get(route.replica), plan, report)
        given = EngineReport() if report is None else report
        with self._lock:
            state = self._tenants.states.get(route.tenant)
            closed = None if state is None else state.close(route.id)
            self._counts["late_commits" if closed is None else "commits"] += 1
            if state is None or closed is None:
                return False
            if given.cached_tokens is not None:
                self._counts["reports"] += 1
                self._counts["reported_cached_tokens"] += given.cached_tokens
            state.loads.serve(closed.member, closed.prompt_tokens)
            state.record_answer(route.conversation, closed, given)
            opens_prompt = closed.in_flight is not None if plan is None else plan.opens_prompt
            planned = [*map(_as_planned, route.blocks)] if plan is None else plan.blocks
            if opens_prompt and planned:
                self._counts["stale_paths"] += state.record_context(
                    route.preamble, closed, planned, given, is_current, route.tenant, self._profile, self._served
                )
                self._tenants.shared_bytes = self._served.trim()
            self._tenants.record(route.tenant, state)
        self._remember_prompt(closed.member, plan, report)
        return True

    def abandon(self, route: Route) -> bool:
        """Take back a request that was not answered: nothing is learned from it. True if the route was open."""
        check_type("route", route, Route)
        with self._lock:
            state = self._tenants.states.get(route.tenant)
            was_open = state is not None and state.close(route.id) is not None
            self._counts["abandons"] += was_open
        return was_open

    def exchange_load(self, elsewhere: dict[str, ReplicaLoad], tenant: str | None = None) -> dict[str, ReplicaLoad]:
        """Count what other routers sent to replicas, in place of the counts before; return what this one sent."""
        with self._lock:
            if (loads := self._loads(tenant)) is None:
                return {}
            loads.elsewhere = elsewhere
            return {name: loads.by_member[member] for name, member in self._members.items()}

    def load(self, tenant: str | None = None) -> dict[str, float]:
        """Return each replica's tokens, in flight and lately, of one tenant; of all if they share load."""
        with self._lock:
            loads = self._loads(tenant)
            return {name: 0.0 if loads is None else loads.of(member) for name, member in self._members.items()}

    def _loads(self, tenant: str | None) -> ReplicaLoads | None:
        state = self._tenants.states.get(tenant)
        return self._shared_load if self._share_load else None if state is None else state.loads

    def stats(self) -> ReplicaStats:
        """Return counts since the router was created or reset. O(tenants)."""
        with self._lock:
            states = self._tenants.states.values()
            return ReplicaStats(
                **self._counts,
                open_routes=sum(len(state.open) for state in states),
                tenants=len(states),
                scopes=sum(len(state.scopes) for state in states),
                conversations=sum(len(state.conversations) for state in states),
                replicas=len(self._members),
                memory_bytes=sum(state.memory_bytes for state in states) + self._tenants.shared_bytes,
            )

    def _new_tenant(self, tenant: str | None) -> ReplicaTenant:
        loads = self._shared_load
        if not self._share_load:
            loads = ReplicaLoads(self._bounds.window_tokens, self._members.values())
        return ReplicaTenant(self._bounds, self._capacity_tokens, loads, not self._share_load)

    def _tenant_forgotten(self, tenant: str | None, state: ReplicaTenant) -> None:
        state.close_all()

    def _forget_tenants(self) -> None:
        super()._forget_tenants()
        self._served = _ServedOrders(self._bounds.max_bytes)
        self._shared_load = ReplicaLoads(self._bounds.window_tokens, self._members.values())

    def _release_open(self) -> None:
        for state in self._tenants.states.values():
            state.close_all()
        self._tenants.record_all()

    def _joined(self, member: Member) -> None:
        self._shared_load.join(member)

    def _removed(self, member: Member) -> None:
        del self._shared_load.by_member[member]

    def _apply_residency(
        self,
        member: Member,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None,
    ) -> None:
        with self._lock:
            if not member.alive:  # a feed may keep the target of an earlier life
                return
            state = self._tenants.states.get(scope.tenant)
            caches = None if state is None else state.scopes.get(scope.preamble)
            cache = None if caches is None else caches.caches.get(member)
            if state is not None and cache is not None:
                cache.tree.set_path(keys, resident_blocks, None if checkpoints is None else checkpoints.ends)
                state.record(cache)
                self._tenants.record(scope.tenant, state)
            if checkpoints is not None and self._profile.current.checkpoints is None:
                self._profile.learn(vllm_checkpoints(checkpoints.block))
        if self._listener is not None:
            self._listener.residency_changed(scope, keys, resident_blocks, checkpoints)


class _ServedOrders(ReuseTree):
    """The latest orders that replicas served, of all tenants together, from the first report on."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes // _PART_OF_SERVED
        most = max(min(self._max_bytes // (2 * _NODE), _MOST_SERVED), 1)
        super().__init__(most, most)

    def trim(self) -> int:
        """Forget the oldest orders beyond the bound; return the estimated memory of the others."""
        while self.nodes:
            size = _NODE * self.nodes + _BLOCK * self.blocks
            if size <= self._max_bytes:
                return size
            self._pop_last_block(self.order.next_leaf())
        return 0


def _as_planned(block: ContextBlock) -> PlannedBlock:
    return PlannedBlock(block, (0,), block.id or "", None, _TEMPLATES)


def _first_behind(blocks: Sequence[ContextBlock], tokens: int) -> ContextBlock:
    """Return the first block behind the first `tokens`; the first of all if none is left."""
    for block in blocks:
        if block.tokens > tokens:
            return block
        tokens -= block.tokens
    return blocks[0]


def _preference(member: Member, key: bytes) -> float:
    """Return how much requests with this key prefer a replica, whatever others there are: rendezvous hashing."""
    name = member.name.encode("utf-8", "surrogatepass")
    digest = blake2b(name, digest_size=8, key=key, person=b"wp-replica").digest()
    return rendezvous_score(member.weight, int.from_bytes(digest, "big"))
