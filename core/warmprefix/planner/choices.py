"""What the choices of one scope depend on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from warmprefix.choice import Candidates
from warmprefix.order_sharing import LearnedOrder
from warmprefix.ordering import OrderingPolicy, PrefixView, ServedBlock
from warmprefix.ordering.choosing import Exposure, choose_candidates
from warmprefix.plan import ContextPlan
from warmprefix.planner.queue import RequestQueue
from warmprefix.prefix import PrefixTree

__all__ = ["ScopeChoices", "exposure_stats"]


class ScopeChoices:
    """A mirror of the cache by which one scope chooses. Not thread-safe: callers hold the planner's lock.

    What tenants feed may not depend on other tenants, who share the engine's cache with them. So an isolated mirror has
    a tree and a policy of its own, which know the scope's committed requests alone, in the orders that the mirror
    itself plans: no report or feed of the engine, which show what others evict, and no served order that follows these.
    Requests without a tenant use what their scope has learned.
    """

    __slots__ = ("exposure", "is_isolated", "policy", "tree")

    def __init__(self, tree: PrefixTree[bytes], policy: OrderingPolicy, is_isolated: bool) -> None:
        self.tree = tree
        self.policy = policy
        self.is_isolated = is_isolated
        self.exposure = Exposure()

    def choose(self, candidates: Candidates, queue: RequestQueue) -> list[int]:
        """Return the indices of the candidates to feed, ascending."""
        in_flight = queue.mirrored() if self.is_isolated else [order for _, order, _ in queue.flights.values()]
        return choose_candidates(candidates, PrefixView(self.tree, (), in_flight), *self.exposure.allowed(candidates))

    def learn(self, order: LearnedOrder, plan: ContextPlan | None, mirrored: Sequence[bytes]) -> None:
        """Learn an order that a model saw. May raise what a policy does.

        Args:
            order: The order.
            plan: Its plan; None for the order of another worker.
            mirrored: The mirror's own order; empty if that is unknown.
        """
        keys, _, ranks = order
        entered = None if plan is None else [keys[ranks.index(position)] for position in plan.entered or ()]
        self.exposure.add(keys, entered)
        if not self.is_isolated:
            return
        given = {key: (length, rank) for key, length, rank in sorted(zip(*order, strict=True), key=itemgetter(2))}
        if plan is not None and plan.is_own_order:
            mirrored = keys
        elif not mirrored:  # it was ordered by what the engine holds
            blocks = [ServedBlock(key, *given[key], False) for key in given]
            mirrored = [blocks[i].fingerprint for i in self.policy.order(blocks, PrefixView(self.tree))]
        resident = self.tree.insert(mirrored, [given[key][0] for key in mirrored]).blocks
        self.policy.observe([ServedBlock(key, *given[key], place < resident) for place, key in enumerate(mirrored)])


def exposure_stats(scopes: Sequence[ScopeChoices]) -> dict[str, float | None]:
    """Return the fields of `PlannerStats` on what choices have fed."""
    fed = [choices.exposure for choices in scopes]
    requests = sum([exposure.requests for exposure in fed])
    share = sum([exposure.top_share() * exposure.requests for exposure in fed])
    return {
        "fed_passages": sum([exposure.passages for exposure in fed]),
        "most_fed_share": share / requests if requests else None,
    }
