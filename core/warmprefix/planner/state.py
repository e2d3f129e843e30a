"""The state that all parts of a planner share: scopes, open plans and counters, behind one lock."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

from warmprefix.annotate import Templates
from warmprefix.blocks import fingerprint
from warmprefix.errors import check_names
from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.labels import LabelRegistry
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.ordering import ServedBlock
from warmprefix.ordering.positions import PositionProfile, profiles_of_models
from warmprefix.plan import ContextPlan, Retention, Scope, Touch, tenant_salt
from warmprefix.planner.choices import Flight, ScopeChoices, exposure_stats
from warmprefix.planner.config import PlannerConfig
from warmprefix.planner.retention import ScopeRetention, can_touch
from warmprefix.prefix import PrefixTree
from warmprefix.residency.capacity import Capacities, Capacity, Visit
from warmprefix.residency.profile import EngineProfile
from warmprefix.residency.usage import EngineReport, PredictionErrors, TtftFeedback, UsageFeedback
from warmprefix.telemetry import PlannerMetrics
from warmprefix.tokens import CheckedCounter, NoteWriter

__all__ = ["PlannerState", "ScopeState", "make_scope"]

_MOST_ANNOUNCED = 256
_MOST_RETAINED = 32
"""Scopes whose paths are touched."""
_MOST_WAITING = 32
"""Waiting requests that one plan considers, the first ones."""
_MOST_IN_FLIGHT = 64
_LONGEST_FLIGHT = 1_000
"""Later plans after which an open plan no longer counts as in flight: its caller seems to have lost it."""

_NAME_TYPES = {str, type(None)}


def make_scope(tenant: str | None = None, model: str | None = None, preamble: str | None = None) -> Scope:
    """Return the scope of a request; O(len(preamble)).

    Raises:
        TypeError: An argument is neither a str nor None.
    """
    if not {type(tenant), type(model), type(preamble)} <= _NAME_TYPES:
        check_names(tenant=tenant, model=model, preamble=preamble)
    return Scope(tenant, model, None if preamble is None else fingerprint(preamble))


class ScopeState:
    """What one scope has learned, and its requests under way. Not thread-safe: callers hold the planner's lock."""

    __slots__ = (
        "_config",
        "_profile",
        "cache_salt",
        "capacity",
        "chosen",
        "labels",
        "policy",
        "queue",
        "reader",
        "scope",
        "tree",
        "ttft",
        "usage",
    )

    def __init__(
        self,
        scope: Scope,
        config: PlannerConfig,
        capacity: Capacity,
        profile: EngineProfile,
        reader: PositionProfile | None,
    ) -> None:
        self._config = config
        self._profile = profile
        self.scope = scope
        self.capacity = capacity
        self.tree = capacity.new_tree(config.max_nodes)
        self.policy = config.new_policy()
        self.labels = LabelRegistry(config.max_labels)
        self.cache_salt = None if scope.tenant is None else tenant_salt(config.salt_key, scope.tenant)
        self.usage = UsageFeedback()
        self.ttft = TtftFeedback()
        self.queue = RequestQueue()
        self.reader = reader
        """Where the model reads best; None if that is unknown, or the same everywhere."""
        self.chosen: ScopeChoices | None = None
        """What choices depend on; None before the first one."""

    def choices(self) -> ScopeChoices:
        """Return what choices depend on, made now if new, with the capacity that the engine or the caller states."""
        if self.scope.tenant is None:
            if self.chosen is None:
                self.chosen = ScopeChoices(self.tree, self.policy, is_isolated=False)
            return self.chosen
        stated = self.capacity.stated
        if self.chosen is None:
            tree = PrefixTree[bytes](stated, self._config.max_nodes)
            self.chosen = ScopeChoices(tree, self._config.new_policy(), is_isolated=True)
        tree = self.chosen.tree
        if stated is not None and tree.capacity_tokens != stated:
            tree.capacity_tokens = stated
            tree.evict(tree.resident_tokens - stated)
        return self.chosen

    def predict(self, keys: Sequence[bytes], reorders: bool, opens_prompt: bool) -> tuple[int, Visit | None]:
        """Return the tokens that the engine is predicted to reuse of an order, and what it shares with earlier ones.

        Zero tokens unless the request `reorders`; the other is None unless its context `opens_prompt`. With
        checkpoints, it is the least number of tokens.
        """
        visit = self.capacity.visit(self.scope, keys) if opens_prompt else None
        tokens = 0
        if reorders and visit is not None:
            profile = self._profile.current
            checkpoints = profile.checkpoints
            if checkpoints is None:
                held = keys[: visit.leaf] if profile.host_memory else keys
                tokens = self.tree.match_prefix(held).tokens
            else:
                tokens = self.tree.match_junction(keys).tokens // checkpoints.block * checkpoints.block
        return tokens, visit


class RequestQueue:
    """Announced requests and open plans of one scope. Bounded; callers hold the planner's lock."""

    __slots__ = ("_numbers", "announced", "flights")

    def __init__(self) -> None:
        self._numbers = count()
        self.announced: OrderedDict[int, frozenset[bytes]] = OrderedDict()
        self.flights: OrderedDict[str, Flight] = OrderedDict()

    def announce(self, keys: Iterable[bytes]) -> int:
        """Add a request that will be planned later; return a number to withdraw it."""
        number = next(self._numbers)
        self.announced[number] = frozenset(keys)
        if len(self.announced) > _MOST_ANNOUNCED:
            self.announced.popitem(last=False)
        return number

    def withdraw(self, number: int) -> None:
        """Remove an announced request, if it is still there."""
        self.announced.pop(number, None)

    def take(
        self, keys: Iterable[bytes], first: Iterable[bytes]
    ) -> tuple[list[tuple[bytes, ...]], list[Collection[bytes]]]:
        """Remove one announcement of exactly these blocks, or better, of those that relevance alone would feed.

        Returns:
            The orders of the open plans that begin with one of these blocks, oldest first, and the first of the other
            announcements.
        """
        own = frozenset(keys)
        if self.announced:
            for wanted in (frozenset(first), own):
                number = next((number for number, blocks in self.announced.items() if blocks == wanted), None)
                if number is not None:
                    del self.announced[number]
                    break
        in_flight = [each.order for each in self.flights.values() if not own.isdisjoint(each.order[:1])]
        return in_flight, list(islice(self.announced.values(), _MOST_WAITING))

    def mirrored(self, keys: Sequence[bytes]) -> list[Sequence[bytes]]:
        """Return the mirror's orders of the open plans that begin with one of these blocks, oldest first."""
        return [each.mirrored for each in self.flights.values() if each.mirrored and each.mirrored[0] in keys]

    def awaits(self, path: Sequence[bytes]) -> bool:
        """Return True if an announced request has all blocks of a path, which its order can then begin with."""
        return any(blocks.issuperset(path) for blocks in self.announced.values())

    def start(self, plan_id: str, order: Sequence[bytes], mirrored: Sequence[bytes]) -> None:
        """Add an open plan whose context opens its prompt."""
        number = next(self._numbers)
        self.flights[plan_id] = Flight(number, tuple(order), tuple(mirrored))
        oldest = next(iter(self.flights.values()))
        if len(self.flights) > _MOST_IN_FLIGHT or oldest.number < number - _LONGEST_FLIGHT:
            self.flights.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of announced requests."""
        return len(self.announced)


class _OpenBatch(NamedTuple):
    """The plans of a batch, in execution order."""

    is_open: bytearray
    """1 for each plan that is neither committed nor abandoned."""
    scopes: Sequence[Scope]


class Prediction(NamedTuple):
    """What the planner expected when it made a plan."""

    scope: Scope
    """The scope of the plan."""
    visit: Visit | None
    """What its order had in common with earlier ones; None once the engine has reported its cached tokens."""


class OpenPlans:
    """Ids and scopes of open plans, and predictions of these and of plans closed lately.

    Bounded; callers hold the planner's lock.

    Args:
        max_open_plans: Beyond this number, the tenant with the most single plans loses the oldest of them. Whole
            batches whose plans are more than this together are dropped, oldest first, except the last batch.
    """

    def __init__(self, max_open_plans: int) -> None:
        self._max_open_plans = max_open_plans
        self._instance = os.urandom(16).hex()
        self._planned = 0
        self._scopes: FairLru[str, Scope] = FairLru()
        self._predictions: FairLru[str, Prediction] = FairLru()
        self._batches: OrderedDict[str, _OpenBatch] = OrderedDict()

    def new_id(self) -> str:
        """Return an id that no other plan has, whatever planner or process made it."""
        self._planned += 1
        # The process id matters after a fork: parent and child have the same `_instance`.
        return f"{self._instance}-{os.getpid()}-{self._planned}"

    def add(self, plan: ContextPlan, visit: Visit | None) -> None:
        """Add a single plan, and keep what is known of its order, if it is, until the engine reports on it. O(1)."""
        self._scopes.put(plan.id, plan.scope, plan.scope.tenant)
        if self._scopes.size > self._max_open_plans:
            self._scopes.evict()
        if visit is not None:
            self._predictions.put(plan.id, Prediction(plan.scope, visit), plan.scope.tenant)
            if self._predictions.size > self._max_open_plans:
                self._predictions.evict()

    def add_batch(self, batch_id: str, scopes: Sequence[Scope]) -> None:
        """Add the plans `{batch_id}.{place}`, given the scope of each."""
        if scopes:
            self._batches[batch_id] = _OpenBatch(bytearray(b"\1" * len(scopes)), scopes)
        total = sum(len(batch.scopes) for batch in self._batches.values())
        while total > self._max_open_plans and len(self._batches) > 1:
            total -= len(self._batches.popitem(last=False)[1].scopes)

    def close(self, plan: ContextPlan) -> bool:
        """Remove a plan; True if it was open."""
        # A plan of another scope could be another tenant's, with an id that it must not close.
        if self._scopes.get(plan.id) == plan.scope:
            self._scopes.pop(plan.id)
            return True
        batch_id, _, number = plan.id.rpartition(".")
        batch = self._batches.get(batch_id)
        if batch is None:
            return False
        try:
            place = int(number)
        except ValueError:  # no planner makes such an id
            return False
        if str(place) != number or not 0 <= place < len(batch.scopes) or not batch.is_open[place]:
            return False
        if batch.scopes[place] != plan.scope:
            return False
        batch.is_open[place] = False
        if batch.is_open.rfind(1) < 0:
            del self._batches[batch_id]
        return True

    def predict(self, plan: ContextPlan, scope: ScopeState, keys: Sequence[bytes]) -> None:
        """Keep what is known of a plan's order until the engine reports on it, unless it was kept before."""
        if self._predictions.get(plan.id) is None:
            self._keep(plan, Prediction(plan.scope, scope.capacity.visit(plan.scope, keys)))

    def take_prediction(self, plan: ContextPlan) -> Prediction | None:
        """Return the prediction of a plan that the engine reports on; None if it is forgotten."""
        prediction = self._predictions.get(plan.id)
        if prediction is None or prediction.scope != plan.scope:
            return None
        self._keep(plan, Prediction(plan.scope, None))
        return prediction

    def _keep(self, plan: ContextPlan, prediction: Prediction) -> None:
        self._predictions.put(plan.id, prediction, plan.scope.tenant)
        if self._predictions.size > self._max_open_plans:
            self._predictions.evict()

    def clear(self) -> None:
        """Forget all open plans: none of them can be committed any more."""
        self._scopes.clear()
        self._predictions.clear()
        self._batches.clear()

    def __len__(self) -> int:
        return len(self._scopes) + sum(sum(batch.is_open) for batch in self._batches.values())


class PlannerState:
    """The state of one planner, which all its parts share.

    Beyond `max_scopes`, the tenant with the most scopes loses the one not used longest. Callers hold the lock unless
    a method is documented otherwise.

    - The lock is re-entrant: the garbage collector may close a generator that is suspended in `planning`, and so call
      `abandon` in the middle of any other call on the same thread, even one that holds the lock.
    - It is not held during calls of the store, the feed, the recorder or the observer. These can be slow, and the
      feed's thread takes this lock in `residency_changed` while it holds locks of its own.
    - It is held during calls of policies, and of `sharing`, which only queues. Orders of other workers arrive on a
      thread of `sharing`, which holds no lock and has only a weak reference, so that it does not keep the planner
      alive.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._states: FairLru[Scope, ScopeState] = FairLru()
        self._capacities = Capacities(config.capacity_tokens)
        self._readers = profiles_of_models(config.positions, config.points_per_percent)
        self.lock = fork_safe_lock(self.clear)
        self.metrics = metrics = PlannerMetrics(self.lock, config.observer, config.recorder)
        counter = CheckedCounter(config.token_counter(), lambda: metrics.count("tokenizer_errors"))
        self.profile = EngineProfile(config.profile)
        templates, separator = config.templates or Templates(), self.profile.current.separator
        self.writer = NoteWriter(templates, config.annotate, counter, dict(config.annotations), separator)
        self.sharing: OrderSharing = NoSharing() if config.sharing is None else config.sharing
        self.open_plans = OpenPlans(config.max_open_plans)
        self.errors = PredictionErrors()
        self._retained: FairLru[Scope, ScopeRetention] = FairLru()

    def use(self, scope: Scope) -> ScopeState:
        """Return the state of a scope, made now if new, and count it as used."""
        state = self._states.use(scope)
        if state is not None:
            state.capacity.fit(state.tree)
            return state
        reader = self._readers.get(scope.model or "*", self._readers.get("*"))
        state = ScopeState(scope, self._config, self._capacities.of_scope(scope), self.profile, reader)
        self._states.put(scope, state, scope.tenant)
        if len(self._states) > self._config.max_scopes:
            evicted = self._states.evict()[0]
            self._retained.pop(evicted)
            self.sharing.unfollow(evicted)
        self.sharing.follow(scope, self._learner(scope))
        return state

    def _learner(self, scope: Scope) -> Callable[[Sequence[LearnedOrder]], None]:
        reference = weakref.ref(self)

        def learn(orders: Sequence[LearnedOrder]) -> None:
            state = reference()
            if state is not None:
                state.learn_from_others(scope, orders)

        return learn

    def close(self, plan: ContextPlan) -> bool:
        """Remove a plan from the open ones; True if it was one."""
        scope = self._states.get(plan.scope)
        if scope is not None:
            scope.queue.flights.pop(plan.id, None)
        return self.open_plans.close(plan)

    def profile_changed(self) -> None:
        """Forget the capacities that reports suggested under another profile, which explains these reports better."""
        self._capacities.forget_reports()

    def find(self, scope: Scope) -> ScopeState | None:
        """Return the state of a scope; None if it has no state."""
        return self._states.get(scope)

    def retention(self, scope: ScopeState, keys: Sequence[bytes]) -> Retention | None:
        """Return what an order deserves of an engine that takes priorities; None as long as none pays."""
        if self.profile.current.eviction != "priority":
            return None
        retention = self._retained.get(scope.scope)
        return None if retention is None else retention.of_order(scope.tree, keys)

    def touches(self, scope: Scope, most: int) -> list[Touch]:
        """Return the paths of a scope to touch now; the first call has its ghosts follow its requests."""
        state = self._states.get(scope)
        if state is None or not can_touch(self.profile.current):
            return []
        retention = self._retained.get(scope)
        if retention is None or retention.eviction != self.profile.current.eviction:
            self._retained.put(scope, ScopeRetention(self.profile.current), scope.tenant)
            if len(self._retained) > _MOST_RETAINED:
                self._retained.evict()
            return []
        capacity = state.capacity.share_of(state.tree)
        return retention.touches(scope, state.tree, capacity, most, state.queue.awaits)

    def touched(self, touch: Touch, report: EngineReport) -> None:
        """Count a touch that the engine has answered as a request for its path."""
        state, retention = self._states.get(touch.scope), self._retained.get(touch.scope)
        named = None if retention is None else retention.answered(touch, report)
        if state is not None and named is not None:
            self.metrics.counts["touches"] += 1
            if report.prompt_tokens is not None:
                self.metrics.counts["touch_tokens"] += max(report.prompt_tokens - (report.cached_tokens or 0), 0)
            state.capacity.record(touch.scope, named.keys, named.tokens)
            state.tree.touch(*named)

    def learn(self, scope: ScopeState, plan: ContextPlan) -> None:
        """Learn a planned order that a model saw, and share it with other planners."""
        blocks = plan.blocks
        if not blocks:
            return
        order = LearnedOrder(
            [planned.block.fingerprint for planned in blocks],
            [planned.block.tokens for planned in blocks],
            [planned.positions[0] for planned in blocks],
        )
        self._learn(scope, order, plan)
        self.sharing.publish(scope.scope, order)

    def learn_from_others(self, scope: Scope, orders: Sequence[LearnedOrder]) -> None:
        """Learn orders of other planners. Called without the lock."""
        for order in orders:
            with self.lock:  # taken for each order, because requests wait for it
                state = self._states.get(scope)
                if state is None:
                    return
                self._learn(state, order)
                self.metrics.counts["shared_orders"] += 1

    def _learn(self, state: ScopeState, order: LearnedOrder, plan: ContextPlan | None = None) -> None:
        """Add an order that a model saw to the scope's tree, and pass it to its policy. Others' orders have no plan."""
        keys, tokens, ranks = order
        try:
            state.capacity.record(state.scope, keys, tokens)
            held = state.tree.insert(keys, tokens, None if plan is None else plan.id)
            resident = held.blocks
            retention = self._retained.use(state.scope)
            try:
                if retention is not None:
                    retention.learn(order, held.tokens, state.tree, state.capacity.share_of(state.tree))
            except Exception:
                self._retained.pop(state.scope)  # it has half learned the order
                self.metrics.degrade("policy")
            served = [
                ServedBlock(key, length, rank, i < resident)
                for i, (key, length, rank) in enumerate(zip(keys, tokens, ranks, strict=True))
            ]
            try:
                state.policy.observe(served)
            except Exception:
                self.metrics.degrade("policy")
            try:
                if state.chosen is not None:
                    state.chosen.learn(order, plan)
            except Exception:
                self.metrics.degrade("policy")
        except BaseException:  # such as KeyboardInterrupt: do not trust a scope that has half learned an order
            if self._states.pop(state.scope) is not None:
                self.sharing.unfollow(state.scope)
            raise

    def stats(self) -> dict[str, Any]:
        """Return the fields of `PlannerStats`, without those of store and feed."""
        shared = self.sharing.stats()
        mean, p95 = self.errors.mean_and_p95()
        return {
            **self.metrics.stats(),
            **self._capacities.stats(self.profile.match),
            **exposure_stats([state.chosen for state in self if state.chosen is not None]),
            "open_plans": len(self.open_plans),
            "scopes": len(self._states),
            "queued_requests": sum(len(state.queue) for state in self),
            "disabled_scopes": sum(state.capacity.is_off for state in self),
            "retaining_scopes": sum(retention.choice.best is not None for retention in self._retained.values()),
            "tree_nodes": sum(state.tree.nodes for state in self),
            "profile": self.profile.current.name,
            "profile_source": self.profile.source,
            "published_orders": shared.published,
            "sharing_errors": shared.dropped + shared.malformed + shared.errors,
            "prediction_error_mean": mean,
            "prediction_error_p95": p95,
            "residency_confidence": self.errors.agreement(),
        }

    def clear(self) -> None:
        """Forget all that was learned, all open plans and all counts. Called without the lock."""
        with self.lock:
            for scope in self._states:
                self.sharing.unfollow(scope)
            for part in (self._states, self._capacities, self._retained, self.open_plans, self.metrics, self.errors):
                part.clear()

    def __iter__(self) -> Iterator[ScopeState]:
        return self._states.values()
