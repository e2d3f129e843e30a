"""`ReplicaRouter`: each request to the replica of a model that has to compute the least for it, and soon."""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, fingerprint
from warmprefix.errors import NoAgentError, log_failure
from warmprefix.forks import in_each_process
from warmprefix.plan import ContextPlan, PlannedBlock, Scope
from warmprefix.prefix.tree import PrefixTree
from warmprefix.residency.base import EngineReport, ResidencyFeed, ResidencyTarget, ServedPrompt
from warmprefix.routing.memory import TenantMemory
from warmprefix.routing.replica_state import Asked, Home, Loads, Member, Replica
from warmprefix.routing.replica_tenants import Bounds, OpenRoute, TenantReplicas

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Replica", "ReplicaRouter", "ReplicaStats", "Route"]

_log = logging.getLogger("warmprefix")


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request goes. It knows which request it is, and is handed to `commit` or `abandon` whole."""

    id: str
    """Names this route; unique among all routers."""
    replica: str
    tenant: str | None
    preamble: bytes | None = field(repr=False)
    """Fingerprint of the text in front of the context."""
    conversation: str | None
    blocks: tuple[ContextBlock, ...] = field(repr=False)
    """In relevance order, each distinct block once."""
    prompt_tokens: int
    resident_tokens: int
    """Of the prompt's tokens, those that the replica is predicted to hold already."""
    costs: dict[str, float]
    """What the request costs at each replica, in tokens; the cheapest that has room was taken."""
    spilled: bool
    """Whether a cheaper replica had no room for it."""

    @property
    def cost(self) -> float:
        """At the replica that it goes to."""
        return self.costs[self.replica]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A snapshot; counts since the start or the last reset, but for those behind `feed_errors`."""

    routes: int = 0
    prompt_tokens: int = 0
    """Of all requests routed."""
    resident_tokens: int = 0
    """Of these, predicted to be held by the replica that the request went to."""
    spilled: int = 0
    """Requests that the cheapest replica had no room for."""
    moved: int = 0
    """Of these and all others, turns of a conversation that went elsewhere than the turn before."""
    commits: int = 0
    abandons: int = 0
    """Told by whoever owed them, not for a replica's failure or to keep within the bounds."""
    late_commits: int = 0
    """Commits of a route already committed or abandoned, or forgotten with its replica or to keep within the bounds."""
    reports: int = 0
    """Answers for which the engine told its own count of cached tokens."""
    reported_cached_tokens: int = 0
    """The sum of those counts."""
    stale_paths: int = 0
    """Times that an engine turned out to hold less of a path than predicted, and the rest was marked stale."""
    feed_errors: int = 0
    """Times that a feed failed."""
    open_routes: int = 0
    tenants: int = 0
    scopes: int = 0
    conversations: int = 0
    replicas: int = 0
    memory_bytes: int = 0
    """Estimated, of all tenants; the router's `max_bytes` bounds it."""


class ReplicaRouter:
    """Picks the replica for each request: by what it is predicted to hold, and by what it has to do. No I/O.

    Of the replicas that have room the cheapest is taken, where

        cost(r) = (prompt - resident(r) + waiting_weight * waiting(r) + held_weight * in_flight(r)) / weight(r)

    all in tokens: `prompt`, those of the request; `resident(r)`, those of them that `r` is predicted to hold in the
    best order of the blocks, or of the conversation's history; `waiting(r)`, what `r` has still to compute of prompts
    sent there, until their first token (`prefilled`) or end; `in_flight(r)`, all of the prompts that it works on.

    A replica has room if the request does not take its load above `(1 + eps)` times the mean, or `floor_tokens`; or if
    nobody has less load; or it has nothing in flight. Load is what is in flight there, and what was lately, by weight.
    Of replicas that cost the same, rendezvous hashing takes one, by the conversation or the first block: requests that
    begin alike meet there, also those that other processes route, and no replica is preferred for its place in a list.

    What is known of one tenant's requests, their load included, has no influence on another's (see `share_load`); all
    bounds but those on tenants and memory are a tenant's own. Deterministic given the calls before. Thread-safe. No
    text is kept. O(replicas * blocks) a request, and what `PrefixTree` needs to find a path, however many there were
    before.

    >>> router = ReplicaRouter(["http://a/v1", "http://b/v1"])
    >>> sky, sea = ContextBlock("The sky is blue.", id="sky"), ContextBlock("The sea is deep.", id="sea")
    >>> first = router.route([sky, sea])
    >>> router.commit(first)
    True
    >>> second = router.route([sea, sky])
    >>> second.replica == first.replica, second.resident_tokens
    (True, 8)
    """

    def __init__(
        self,
        replicas: Iterable[Replica | str] = (),
        *,
        eps: float = 0.25,
        floor_tokens: int = 50_000,
        waiting_weight: float = 0.4,
        held_weight: float = 0.02,
        window_tokens: int = 1_000_000,
        capacity_tokens: int | None = 500_000,
        max_nodes: int = 16_384,
        max_tenants: int = 1_024,
        max_scopes: int = 1_024,
        max_conversations: int = 10_000,
        max_open_routes: int = 10_000,
        max_bytes: int = 500_000_000,
        share_load: bool = False,
        listener: ResidencyTarget | None = None,
    ) -> None:
        """Start with nothing known.

        Args:
            replicas: `join`ed at once.
            eps: How far above the mean a replica's load may be.
            floor_tokens: A load that is never too high, so that few requests are not spread for the sake of balance.
            waiting_weight: What a token to be computed before its own costs a newcomer, relative to one of its own:
                less, since a prompt that is computed at another replica costs twice, by what it drives out there.
            held_weight: What a token in flight costs a newcomer: what an engine decodes slows it down, but little.
            window_tokens: After so many tokens a replica, on average, load counts 1/e; so does load of long ago.
            capacity_tokens: Tokens of context that a replica's prefix cache holds, where it has no number of its own;
                None for no bound.
            max_nodes: Most nodes of a prefix tree, a replica and scope.
            max_tenants: Most tenants remembered; beyond it the one not heard of longest is forgotten.
            max_scopes: Most preambles of a tenant; beyond it the one not used longest is forgotten.
            max_conversations: Most conversations remembered of a tenant.
            max_open_routes: Most routes of a tenant neither committed nor abandoned; beyond it the oldest counts as
                abandoned.
            max_bytes: Most memory for all tenants together, estimated to within a quarter. Beyond it, of the tenants
                that take more than `max_bytes / max_tenants`, the one not used longest forgets its oldest paths,
                conversations and open routes; a tenant that takes less is never affected by another's requests.
            share_load: Count the load of all tenants together. It balances better where tenants are many and each has
                little to do; but then one tenant's requests have an influence on where another's go, who could tell
                from his latencies that they exist.
            listener: Is told, too, what feeds tell of plans: the planner, whose scopes they have.

        Raises:
            TypeError: `replicas` is one string, or holds something else than the above.
            ValueError: Two replicas have one name, or a number is out of bounds.
        """
        if isinstance(replicas, str | bytes):
            raise TypeError(f"replicas must be an iterable of names, got one {type(replicas).__name__}")
        for name, bound in (
            ("window_tokens", window_tokens),
            ("max_tenants", max_tenants),
            ("max_scopes", max_scopes),
            ("max_conversations", max_conversations),
            ("max_open_routes", max_open_routes),
            ("max_bytes", max_bytes),
        ):
            if bound < 1:
                raise ValueError(f"{name} must be 1 or more, got {bound}")
        for name, number in (
            ("eps", eps),
            ("floor_tokens", floor_tokens),
            ("waiting_weight", waiting_weight),
            ("held_weight", held_weight),
        ):
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} must be 0 or more, and finite, got {number}")
        PrefixTree[bytes](capacity_tokens, max_nodes)  # so that bad bounds fail here, not at the first request
        self._eps = eps
        self._floor_tokens = floor_tokens
        self._waiting_weight = waiting_weight
        self._held_weight = held_weight
        self._window_tokens = window_tokens
        self._max_tenants = max_tenants
        self._bounds = Bounds(capacity_tokens, max_nodes, max_scopes, max_conversations, max_open_routes)
        self._share_load = share_load
        self._listener = listener
        self._feeds: list[ResidencyFeed] = []
        self._members: dict[str, Member] = {}
        self._failed: dict[str, Member] = {}
        self._tenants: OrderedDict[str | None, TenantReplicas] = OrderedDict()
        self._memory = TenantMemory(max_bytes, max_tenants)
        self._everybodys = Loads(window_tokens, ())
        """What all tenants see of the load, if they share it."""
        self._counts: Counter[str] = Counter()
        # Guards all above. Re-entrant, for the garbage collector may have something abandon a route in the middle of
        # any other call.
        self._lock = threading.RLock()
        in_each_process(self._renew)
        for replica in replicas:
            self.join(replica)

    def _renew(self) -> None:
        """What each process has for itself."""
        if self._lock.acquire(blocking=False):
            for tenant in self._tenants.values():
                tenant.close_all()  # in a fork: these are the parent's to end
            self._remember_all()
        else:  # in a fork: somebody was about to change what is known
            self._forget()
        self._lock = threading.RLock()
        self._instance = uuid.uuid4().hex
        self._routed = 0

    # -- who is there ------------------------------------------------------------------------------------------

    def join(self, replica: Replica | str, *, feed: ResidencyFeed | None = None) -> None:
        """From now on it gets requests: at first no more than the others get, for its load begins as their mean.

        Args:
            replica: Or its name, for one as all others are, or for one that failed and is back.
            feed: Knows from its engine what it holds, and no other's; is `close`d when the replica leaves, or with the
                router. It needs to be told of prompts: `commit` plans, with reports that have the prompt's tokens.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: It is there already, or its name is empty.
        """
        if not isinstance(replica, Replica | str):
            raise TypeError(f"replica must be a Replica or its name, got {type(replica).__name__}")
        if feed is not None and not isinstance(feed, ResidencyFeed):
            raise TypeError(f"feed must be a ResidencyFeed or None, got {type(feed).__name__}")
        name = replica if isinstance(replica, str) else replica.name
        with self._lock:
            if name in self._members:
                raise ValueError(f"replica {name!r} is there already")
            before = self._failed.get(name)
            if isinstance(replica, str):
                replica = Replica(name) if before is None else before.replica
            if feed is None and before is not None:
                feed = before.feed
            self._failed.pop(name, None)
            member = self._members[name] = Member(replica, feed, self._residency_changed)
            for loads in self._all_loads():
                loads.join(member)
            self._remember_all()
            if feed is not None and feed not in self._feeds:
                self._feeds.append(feed)
        if before is not None and before.feed is not feed:
            self._end(before.feed)
        if feed is not None:
            self._follow(feed, member.target)

    def leave(self, name: str) -> None:
        """It gets no more requests, and is forgotten. What it holds, too: its conversations find another replica.

        Raises:
            ValueError: There is no such replica.
        """
        with self._lock:
            gone = self._failed.pop(name, None) or self._drop(name)
        self._end(gone.feed)

    def fail(self, name: str) -> None:
        """Its engine can't be reached: it gets no request until it `join`s again, by its name, holding nothing.

        What is in flight there counts as abandoned. Idempotent.

        Raises:
            ValueError: There is no such replica.
        """
        with self._lock:
            if name not in self._failed:
                self._failed[name] = self._drop(name)

    def _drop(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise ValueError(f"there is no replica {name!r}, only {_listed(self._members)}")
        del self._members[name]
        member.alive = False
        for tenant in self._tenants.values():
            tenant.leave(member)
        for loads in self._all_loads():
            loads.leave(member)
        self._remember_all()
        return member

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those that get requests."""
        with self._lock:
            return tuple(member.replica for member in self._members.values())

    def target(self, name: str) -> ResidencyTarget:
        """Whom to tell what the engine of a replica holds, as a feed does that it did not `join` with.

        Of a scope only tenant and preamble count. It lives as long as the replica is there.

        Raises:
            ValueError: There is no such replica.
        """
        with self._lock:
            member = self._members.get(name)
            if member is None:
                raise ValueError(f"there is no replica {name!r}, only {_listed(self._members)}")
            return member.target

    # -- routing -----------------------------------------------------------------------------------------------

    def route(
        self,
        blocks: Iterable[ContextBlock | str] = (),
        *,
        tenant: str | None = None,
        preamble: str | None = None,
        conversation: str | None = None,
        prompt_tokens: int | None = None,
        order_locked: bool = False,
    ) -> Route:
        """Where to send a request. Owe it a `commit` once it was answered, or an `abandon` if it was not.

        Args:
            blocks: The context, in relevance order. A string is a block without an id.
            tenant: Whose request.
            preamble: The text in front of the context, or anything that names it, as for `ContextPlanner.plan`.
            conversation: Names one linear message history that opens the prompt and is kept (placement "tail"). Leave
                it out where the context stands in front of the history (placement "head").
            prompt_tokens: Of the whole prompt; by default, those of the blocks, and of the history that is known.
            order_locked: The blocks will be sent in this order, and no other is to be hoped for.

        Raises:
            NoAgentError: All replicas have failed or left.
            TypeError: An argument has another type than the above.
            ValueError: `conversation` is empty, or `prompt_tokens` is negative.
        """
        distinct, _ = distinct_blocks(as_blocks(blocks))
        for name, value in (("tenant", tenant), ("preamble", preamble), ("conversation", conversation)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a str or None, got {type(value).__name__}")
        if conversation == "":
            raise ValueError("conversation must not be empty; give None for a request outside any conversation")
        if prompt_tokens is not None:
            if isinstance(prompt_tokens, bool) or not isinstance(prompt_tokens, int):
                raise TypeError(f"prompt_tokens must be an int or None, got {type(prompt_tokens).__name__}")
            if prompt_tokens < 0:
                raise ValueError(f"prompt_tokens must be 0 or more, got {prompt_tokens}")
        behind = None if preamble is None else fingerprint(preamble)
        asked = Asked(distinct, order_locked)
        with self._lock:
            if not self._members:
                down = f"; {_listed(self._failed)} failed" if self._failed else ""
                raise NoAgentError(f"no replica is there to route to{down}")
            state = self._tenant(tenant)
            known, loads = state.known(behind), state.loads
            home = None if conversation is None else state.homes.get(conversation)
            prompt = prompt_tokens
            if prompt is None:
                prompt = asked.total + (0 if home is None else home.tokens)
            held, residents = {}, {}
            for member in self._members.values():
                held[member] = known.held(member, asked) if home is None else state.history(home, member)
                coming = known.coming(member, asked) if home is None else 0
                residents[member] = min(max(held[member], coming), prompt)
            costs = {member: self._cost(loads, member, prompt, resident) for member, resident in residents.items()}
            place = _place(tenant, behind, conversation, distinct)
            chosen, spilled = self._choose(loads, costs, prompt, place)
            self._routed += 1
            route = Route(
                id=f"{self._instance}-{self._routed}",
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
            self._count(route, home, chosen)
            under_way = state.cache(known, chosen).under_way if home is None and asked.keys else None
            waiting = prompt - residents[chosen]
            state.opened(route.id, OpenRoute(chosen, prompt, waiting, held[chosen], under_way, asked.keys))
            self._remember_tenant(tenant, state, used=True)
        return route

    def prefilled(self, route: Route) -> bool:
        """The first token of its answer came: others do not wait for it any more. True if the route was open."""
        _check_route(route)
        with self._lock:
            state = self._tenants.get(route.tenant)
            return state is not None and state.prefilled(route.id)

    def commit(self, route: Route, report: EngineReport | None = None, plan: ContextPlan | None = None) -> bool:
        """The request was answered: the replica holds its prompt now.

        Args:
            route: One of this router's.
            report: What the engine said of it. If it had less cached than it should have, what else was predicted to
                lie behind is not counted on any more.
            plan: The plan that was sent: its order counts, and not that of the route's blocks.

        Returns:
            Whether that was recorded. It is not, and does no harm, if the route was committed or abandoned before, or
            its replica has left or failed, or it came too late.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: The plan is of another tenant, or has another preamble.
        """
        _check_route(route)
        if report is not None and not isinstance(report, EngineReport):
            raise TypeError(f"report must be an EngineReport or None, got {type(report).__name__}")
        if plan is not None and not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan or None, got {type(plan).__name__}")
        if plan is not None and (plan.scope.tenant, plan.scope.preamble) != (route.tenant, route.preamble):
            raise ValueError("plan must have the route's tenant and preamble")
        heard = EngineReport() if report is None else report
        member = self._members.get(route.replica)
        fed = member is not None and self._is_fed(member, plan, heard)
        with self._lock:
            state = self._tenants.get(route.tenant)
            opened = None if state is None else state.close(route.id)
            self._counts["late_commits" if opened is None else "commits"] += 1
            if state is None or opened is None:
                return False
            if heard.cached_tokens is not None:
                self._counts["reports"] += 1
                self._counts["reported_cached_tokens"] += heard.cached_tokens
            state.loads.served(opened.member, opened.prompt_tokens)
            state.answered(route.conversation, opened, heard)
            opens_prompt = opened.under_way is not None if plan is None else plan.opens_prompt
            planned = [*map(_as_planned, route.blocks)] if plan is None else plan.blocks
            if opens_prompt and planned:
                self._counts["stale_paths"] += state.served(route.preamble, opened, planned, heard, fed)
            if state.memory_bytes > state.recorded_bytes:  # what became less is found out before anything shrinks
                self._remember_tenant(route.tenant, state)
        self._remember(opened.member, plan, heard)
        return True

    def abandon(self, route: Route) -> bool:
        """The request was not answered: its load is taken back, and nothing learned. True if the route was open."""
        _check_route(route)
        with self._lock:
            state = self._tenants.get(route.tenant)
            was_open = state is not None and state.close(route.id) is not None
            self._counts["abandons"] += was_open
        return was_open

    # -- looking at it -----------------------------------------------------------------------------------------

    def load(self, tenant: str | None = None) -> dict[str, float]:
        """Each replica's tokens of this tenant, in flight and lately; of all tenants, if they share it."""
        with self._lock:
            state = self._tenants.get(tenant)
            loads = None if state is None else state.loads
            if self._share_load:
                loads = self._everybodys
            return {name: 0.0 if loads is None else loads.of(member) for name, member in self._members.items()}

    def stats(self) -> ReplicaStats:
        """O(tenants)."""
        with self._lock:
            return ReplicaStats(
                **self._counts,
                open_routes=sum(len(state.open) for state in self._tenants.values()),
                tenants=len(self._tenants),
                scopes=sum(len(state.scopes) for state in self._tenants.values()),
                conversations=sum(len(state.homes) for state in self._tenants.values()),
                replicas=len(self._members),
                memory_bytes=sum(state.memory_bytes for state in self._tenants.values()),
            )

    def reset(self) -> None:
        """Forget everything but the replicas: what they hold, loads, conversations, open routes, counts."""
        with self._lock:
            self._forget()
            self._counts.clear()

    def close(self) -> None:
        """Close the feeds that replicas joined with. Idempotent."""
        for feed in list(self._feeds):
            self._end(feed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- the choice; the lock is held --------------------------------------------------------------------------

    def _cost(self, loads: Loads, member: Member, prompt: int, resident: int) -> float:
        load = loads.by_member[member]
        waits = self._waiting_weight * load.waiting + self._held_weight * load.in_flight
        return (prompt - resident + waits) / member.weight

    def _choose(
        self, loads: Loads, costs: dict[Member, float], prompt: int, place: Callable[[Member], float]
    ) -> tuple[Member, bool]:
        """The cheapest that has room, and whether there is a cheaper one that has none."""
        relative = {member: loads.of(member) / member.weight for member in costs}
        mean = (loads.total() + prompt) / sum(member.weight for member in costs)
        limit = max(self._floor_tokens, (1 + self._eps) * mean)
        least = min(relative.values())
        open_to = [
            member
            for member, load in relative.items()
            if load <= least or load + prompt / member.weight <= limit or not loads.by_member[member].requests
        ]
        cheapest = min(costs[member] for member in open_to)
        best = [member for member in open_to if costs[member] <= cheapest]
        chosen = best[0] if len(best) == 1 else max(best, key=lambda member: (place(member), member.name))
        return chosen, cheapest > min(costs.values())

    def _count(self, route: Route, home: Home | None, chosen: Member) -> None:
        self._counts["routes"] += 1
        self._counts["prompt_tokens"] += route.prompt_tokens
        self._counts["resident_tokens"] += route.resident_tokens
        self._counts["spilled"] += route.spilled
        self._counts["moved"] += home is not None and home.member is not chosen

    # -- what is known; the lock is held -----------------------------------------------------------------------

    def _tenant(self, tenant: str | None) -> TenantReplicas:
        state = self._tenants.get(tenant)
        if state is not None:
            self._tenants.move_to_end(tenant)
            return state
        loads = self._everybodys if self._share_load else Loads(self._window_tokens, self._members.values())
        state = self._tenants[tenant] = TenantReplicas(self._bounds, loads)
        if len(self._tenants) > self._max_tenants:
            self._forget_tenant(next(iter(self._tenants)))
        self._remember_tenant(tenant, state, used=True)
        return state

    def _forget_tenant(self, tenant: str | None) -> None:
        state = self._tenants.pop(tenant)
        state.close_all()
        self._memory.remove(tenant, state)

    def _remember_tenant(self, tenant: str | None, state: TenantReplicas, used: bool = False) -> None:
        """Keep within `max_bytes`, this tenant's memory having changed."""
        for forgotten in self._memory.update(tenant, state, used):
            self._forget_tenant(forgotten)

    def _remember_all(self) -> None:
        for tenant, state in list(self._tenants.items()):
            if tenant in self._tenants:  # not forgotten for the sake of one before
                self._remember_tenant(tenant, state)

    def _all_loads(self) -> Iterable[Loads]:
        return [self._everybodys, *[state.loads for state in self._tenants.values() if not self._share_load]]

    def _forget(self) -> None:
        self._tenants.clear()
        self._memory.clear()
        self._everybodys = Loads(self._window_tokens, self._members.values())

    # -- feeds -------------------------------------------------------------------------------------------------

    def _residency_changed(self, member: Member, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        with self._lock:
            if not member.alive:  # a feed may hold on to whom it told before
                return
            state = self._tenants.get(scope.tenant)
            known = None if state is None else state.scopes.get(scope.preamble)
            cache = None if known is None else known.caches.get(member)
            if state is not None and cache is not None:
                cache.tree.mark_resident(keys[:resident_blocks])
                cache.tree.mark_stale(keys, resident_blocks)
                state.recount(cache)
                self._remember_tenant(scope.tenant, state)
        if self._listener is not None:
            self._listener.residency_changed(scope, keys, resident_blocks)

    def _follow(self, feed: ResidencyFeed, target: ResidencyTarget) -> None:
        try:
            feed.follow(target)
        except Exception:
            self._feed_failed()

    def _end(self, feed: ResidencyFeed | None) -> None:
        """Close a feed that no replica has any more."""
        with self._lock:
            if feed is None or feed not in self._feeds:
                return
            self._feeds.remove(feed)
        try:
            feed.close()
        except Exception:
            self._feed_failed()

    def _is_fed(self, member: Member, plan: ContextPlan | None, report: EngineReport) -> bool:
        """Whether its feed knows better than a report. Not to be asked under the lock: the feed's thread takes that."""
        if member.feed is None or plan is None or report.prompt_token_ids is None:
            return False
        try:
            return member.feed.knows(plan.cache_salt)
        except Exception:
            self._feed_failed()
            return False

    def _remember(self, member: Member, plan: ContextPlan | None, report: EngineReport) -> None:
        """Have its feed find the plan's blocks among the engine's KV blocks."""
        if member.feed is None or plan is None or report.prompt_token_ids is None:
            return
        if not plan.opens_prompt or not plan.blocks:
            return
        keys = tuple([planned.block.fingerprint for planned in plan.blocks])
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        try:
            member.feed.remember(ServedPrompt(plan.scope, plan.cache_salt, keys, paragraphs, report.prompt_token_ids))
        except Exception:
            self._feed_failed()

    def _feed_failed(self) -> None:
        """The one place where a failing feed degrades to none."""
        with self._lock:
            self._counts["feed_errors"] += 1
            first = self._counts["feed_errors"] == 1
        log_failure(_log, "residency feed failed", first=first)


_TEMPLATES = Templates()


def _as_planned(block: ContextBlock) -> PlannedBlock:
    return PlannedBlock(block, (0,), block.id or "", None, _TEMPLATES)


def _place(
    tenant: str | None, preamble: bytes | None, conversation: str | None, blocks: Sequence[ContextBlock]
) -> Callable[[Member], float]:
    """How much a request would like to be at a replica, whoever else is there: weighted rendezvous hashing."""
    parts = [b"" if tenant is None else fingerprint(tenant), preamble or b""]
    if conversation is not None:
        parts.append(fingerprint(conversation))
    elif blocks:
        parts.append(blocks[0].fingerprint)
    seed = b"|".join(parts)

    def place(member: Member) -> float:
        name = member.name.encode("utf-8", "surrogatepass")
        digest = blake2b(name, digest_size=8, key=blake2b(seed, digest_size=32).digest(), person=b"wp-replica").digest()
        drawn = (int.from_bytes(digest, "big") >> 12) + 0.5  # as many bits as are exact, so that it is below 2**52
        return -member.weight / math.log(drawn / 2.0**52)

    return place


def _check_route(route: Route) -> None:
    if not isinstance(route, Route):
        raise TypeError(f"route must be a Route, got {type(route).__name__}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
