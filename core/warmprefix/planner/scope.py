"""Learned state of scopes: requests share a prefix and statistics only within one."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypedDict

from warmprefix.blocks import ContextBlock, fingerprint, pins
from warmprefix.errors import check_names
from warmprefix.fair_lru import FairLru
from warmprefix.labels import LabelRegistry
from warmprefix.notes import OrderNote
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.ordering import BlockView, PrefixView, ServedBlock
from warmprefix.ordering.runs import Runs
from warmprefix.plan import PlannedBlock, Scope, tenant_salt
from warmprefix.planner.config import PlannerConfig
from warmprefix.planner.label_savings import LabelSavings
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.queue import RequestQueue
from warmprefix.residency.report import (
    DEFAULT_CAPACITY,
    Capacity,
    EngineProfile,
    FixedCapacity,
    LearnedCapacity,
    ScopeFeedback,
)

__all__ = ["ScopeOptions", "ScopeRegistry", "ScopeState", "make_scope"]


_MAX_LEARNED = 64
"""Most pairs of tenant and model whose capacity is learned."""


class ScopeOptions(TypedDict, total=False):
    """The arguments of `ContextPlanner.plan` that name a scope."""

    tenant: str | None
    model: str | None
    preamble: str | None


def make_scope(tenant: str | None = None, model: str | None = None, preamble: str | None = None) -> Scope:
    """Return the scope of a request; O(len(preamble)).

    Raises:
        TypeError: An argument is neither a str nor None.
    """
    check_names(tenant=tenant, model=model, preamble=preamble)
    return Scope(tenant, model, None if preamble is None else fingerprint(preamble))


class ScopeState:
    """What one scope has learned. Not thread-safe: callers hold the planner's lock."""

    __slots__ = (
        "_metrics",
        "_profile",
        "_scope",
        "cache_salt",
        "capacity",
        "feedback",
        "label_savings",
        "labels",
        "policy",
        "queue",
        "tree",
    )

    def __init__(
        self,
        scope: Scope,
        config: PlannerConfig,
        capacity: Capacity,
        profile: EngineProfile,
        metrics: PlannerMetrics,
    ) -> None:
        bounds = config.bounds
        self._profile = profile
        self._scope = scope
        self._metrics = metrics
        self.capacity = capacity
        self.tree = capacity.new_tree(bounds.max_nodes)
        self.policy = config.new_policy()
        self.labels = LabelRegistry(bounds.max_labels)
        self.label_savings = LabelSavings()
        self.cache_salt = None if scope.tenant is None else tenant_salt(config.salt_key, scope.tenant)
        self.feedback = ScopeFeedback(bounds.patience)
        self.queue = RequestQueue()

    def order(
        self,
        blocks: Sequence[ContextBlock],
        reorders: bool,
        *,
        joined: Collection[int],
        waiting: Sequence[Collection[bytes]],
        note: OrderNote,
    ) -> Sequence[int]:
        """Return the planned order of distinct blocks as indices of the relevance order.

        An order that needs a note is used only if one can be written.

        Args:
            blocks: The blocks; pinned ones, with their runs, go to their end of the context.
            reorders: True if the policy may order the blocks without a pin.
            joined: The blocks that stay directly behind the one before them.
            waiting: The blocks of the requests that wait.
            note: The note on an order of all blocks.
        """
        kept_at = pins(blocks, joined)
        starts = [i for i, pin in enumerate(kept_at) if pin == "start"]
        ends = [i for i, pin in enumerate(kept_at) if pin == "end"]
        if not starts and not ends:
            if not reorders:
                return range(len(blocks))
            view = PrefixView(self.tree, (), in_flight=self.queue.in_flight, waiting=waiting, note_tokens=note.price)
            order = self.policy_order(blocks, view, joined)
            return range(len(blocks)) if note.tokens(order) is None else order
        middle = [i for i, pin in enumerate(kept_at) if pin is None]
        as_given = [*starts, *middle, *ends]
        if reorders:
            view = PrefixView(
                self.tree,
                [blocks[i].fingerprint for i in starts],
                in_flight=self.queue.in_flight,
                waiting=waiting,
                note_tokens=lambda order: note.price([*starts, *[middle[i] for i in order], *ends]),
            )
            joined = {place for place, i in enumerate(middle) if i in joined}
            ordered = self.policy_order([blocks[i] for i in middle], view, joined)
            planned = [*starts, *[middle[i] for i in ordered], *ends]
            return as_given if note.tokens(planned) is None else planned
        return as_given

    def policy_order(
        self, blocks: Sequence[ContextBlock], view: PrefixView, joined: Collection[int] = ()
    ) -> Sequence[int]:
        """Return the policy's order of distinct blocks; relevance order, counted, if it fails.

        The policy orders runs: a block that is `joined` to the one before it moves with it.
        """
        units: Sequence[BlockView] = blocks
        runs = Runs(blocks, joined) if joined else None
        if runs is not None:
            units, view = runs.units, runs.view(view)
        try:
            order = [operator.index(i) for i in self.policy.order(units, view)]
            if sorted(order) != list(range(len(units))):
                raise ValueError(f"ordering policy must return a permutation of range({len(units)}), got {order}")
        except Exception:
            self._metrics.degrade("policy")
            return range(len(blocks))
        return order if runs is None else runs.blocks_in(order)

    def resident_tokens(self, planned: Sequence[PlannedBlock]) -> int:
        """Return the tokens that the engine is predicted to reuse; with checkpoints the least number of them."""
        keys = [block.block.fingerprint for block in planned]
        checkpoints = self._profile.current.checkpoints
        if checkpoints is None:
            return self.tree.match_prefix(keys).tokens
        return self.tree.match_junction(keys).tokens // checkpoints.block * checkpoints.block

    def distances(self, blocks: Sequence[PlannedBlock]) -> Sequence[int]:
        """Return the reuse distances of the first blocks of an order: of those that were served in this order."""
        return self.capacity.distances(self._scope, [planned.block.fingerprint for planned in blocks])

    def learn(self, order: LearnedOrder) -> None:
        """Add an order that a model saw to the tree, and pass it to the policy."""
        keys, tokens, ranks = order
        self.capacity.record(self._scope, keys, tokens)
        resident = self.tree.insert(keys, tokens).blocks
        try:
            self.policy.observe(
                [
                    ServedBlock(key, length, rank, i < resident)
                    for i, (key, length, rank) in enumerate(zip(keys, tokens, ranks, strict=True))
                ]
            )
        except Exception:
            self._metrics.degrade("policy")


# One lock per planner guards scopes, open plans and counters.
# - It is re-entrant: the garbage collector may close a generator that is suspended in `planning`, and so call `abandon`
#   in the middle of any other call on the same thread, even one that holds the lock.
# - It is not held during calls of the store, the feed, the recorder or the observer. These can be slow, and the feed's
#   thread takes this lock in `residency_changed` while it holds locks of its own.
# - It is held during calls of policies, and of `sharing`, which only queues. Orders of other workers arrive on a thread
#   of `sharing`, which holds no lock and has only a weak reference, so that it does not keep the planner alive.


class ScopeRegistry:
    """The scopes in use, and the orders they exchange with other planners.

    Beyond `max_scopes`, the tenant with the most scopes loses the one not used longest. Callers hold the lock unless
    a method is documented otherwise.
    """

    def __init__(self, config: PlannerConfig, lock: threading.RLock, metrics: PlannerMetrics) -> None:
        self._config = config
        self._lock = lock
        self._metrics = metrics
        self._states: FairLru[Scope, ScopeState] = FairLru()
        self._capacities = Capacities(config.bounds.capacity_tokens)
        self.profile = EngineProfile(config.profile)
        self.sharing: OrderSharing = NoSharing() if config.sharing is None else config.sharing

    def use(self, scope: Scope) -> ScopeState:
        """Return the state of a scope, made now if new, and count it as used."""
        state = self._states.use(scope)
        if state is not None:
            state.capacity.fit(state.tree)
            return state
        capacity = self._capacities.of_scope(scope)
        state = ScopeState(scope, self._config, capacity, self.profile, self._metrics)
        self._states.put(scope, state, scope.tenant)
        if len(self._states) > self._config.bounds.max_scopes:
            self.sharing.unfollow(self._states.evict()[0])
        self.sharing.follow(scope, self._learner(scope))
        return state

    def _learner(self, scope: Scope) -> Callable[[Sequence[LearnedOrder]], None]:
        registry = weakref.ref(self)

        def learn(orders: Sequence[LearnedOrder]) -> None:
            scopes = registry()
            if scopes is not None:
                scopes.learn_from_others(scope, orders)

        return learn

    def profile_changed(self) -> None:
        """Forget the capacities that reports suggested under another profile, which explains these reports better."""
        self._capacities.forget_reports()

    def find(self, scope: Scope) -> ScopeState | None:
        """Return the state of a scope; None if it has no state."""
        return self._states.get(scope)

    def learn(self, scope: Scope, blocks: Sequence[PlannedBlock]) -> None:
        """Learn a planned order that a model saw, and share it with other planners."""
        if not blocks:
            return
        order = LearnedOrder(
            [planned.block.fingerprint for planned in blocks],
            [planned.block.tokens for planned in blocks],
            [planned.rank for planned in blocks],
        )
        self._learn(scope, self.use(scope), order)
        self.sharing.publish(scope, order)

    def learn_from_others(self, scope: Scope, orders: Sequence[LearnedOrder]) -> None:
        """Learn orders of other planners. Called without the lock."""
        for order in orders:
            with self._lock:  # taken for each order, because requests wait for it
                state = self._states.get(scope)
                if state is None:
                    return
                self._learn(scope, state, order)
                self._metrics.counts["shared_orders"] += 1

    def _learn(self, scope: Scope, state: ScopeState, order: LearnedOrder) -> None:
        try:
            state.learn(order)
        except BaseException:  # such as KeyboardInterrupt: do not trust a scope that has half learned an order
            self._drop(scope)
            raise

    def _drop(self, scope: Scope) -> None:
        if self._states.pop(scope) is not None:
            self.sharing.unfollow(scope)

    def stats(self) -> dict[str, Any]:
        """Return the fields of `PlannerStats` that concern scopes and sharing."""
        shared = self.sharing.stats()
        return {
            "scopes": len(self._states),
            "queued_requests": sum(len(state.queue) for state in self),
            "disabled_scopes": sum(state.feedback.evidence.is_off for state in self),
            "tree_nodes": sum(state.tree.nodes for state in self),
            **self._capacities.stats(),
            "profile": self.profile.current.name,
            "profile_source": self.profile.source,
            "published_orders": shared.published,
            "sharing_errors": shared.dropped + shared.malformed + shared.errors,
        }

    def clear(self) -> None:
        """Forget all scopes."""
        for scope in self._states:
            self.sharing.unfollow(scope)
        self._states.clear()
        self._capacities.clear()

    def __iter__(self) -> Iterator[ScopeState]:
        return self._states.values()


class Capacities:
    """The capacity of the engine of each tenant and model: given for all of them, or learned for each.

    Tenants share an engine, but no tenant's plans may depend on the requests of another. So each learns the part of the
    cache that the others leave to it.
    """

    def __init__(self, tokens: int | Literal["auto"] | None) -> None:
        self._given = None if tokens == "auto" else FixedCapacity(tokens)
        self._learned: FairLru[tuple[str | None, str | None], LearnedCapacity] = FairLru()

    def of_scope(self, scope: Scope) -> Capacity:
        """Return the capacity that the scopes of one tenant and model share."""
        if self._given is not None:
            return self._given
        owner = scope.tenant, scope.model
        capacity = self._learned.use(owner)
        if capacity is None:
            capacity = LearnedCapacity()
            self._learned.put(owner, capacity, scope.tenant)
            if len(self._learned) > _MAX_LEARNED:
                self._learned.evict()
        return capacity

    def forget_reports(self) -> None:
        """Return to the capacity in the engine's metrics, or else to the default."""
        for capacity in self._learned.values():
            capacity.forget_reports()

    def stats(self) -> dict[str, Any]:
        """Return the fields of `PlannerStats` that concern the capacity: the smallest one in use."""
        if self._given is not None:
            return {"capacity_tokens": self._given.tokens, "capacity_source": self._given.source}
        if not len(self._learned):
            return {"capacity_tokens": DEFAULT_CAPACITY, "capacity_source": "default"}
        capacity = min(self._learned.values(), key=lambda capacity: capacity.tokens)
        return {"capacity_tokens": capacity.tokens, "capacity_source": capacity.source}

    def clear(self) -> None:
        """Forget what was learned."""
        self._learned.clear()
