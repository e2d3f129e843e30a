"""What the choices of one scope depend on."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.choice import Candidates
from warmprefix.order_sharing import LearnedOrder
from warmprefix.ordering import OrderingPolicy, PrefixView, ServedBlock
from warmprefix.ordering.choosing import Exposure, choose_candidates
from warmprefix.plan import ContextPlan
from warmprefix.prefix import PrefixTree

__all__ = ["ScopeChoices", "exposure_stats"]


class ScopeChoices:
    """A mirror of the cache by which one scope chooses and orders. Not thread-safe: callers hold the planner's lock.

    What tenants feed may not depend on other tenants, who share the engine's cache with them. So an isolated mirror has
    a tree and a policy of its own, which know the scope's committed choices alone: no report or feed of the engine,
    which show what others evict, and no order that was planned by these. Requests without a tenant use what their
    scope has learned.
    """

    __slots__ = ("exposure", "is_isolated", "policy", "tree")

    def __init__(self, tree: PrefixTree[bytes], policy: OrderingPolicy, is_isolated: bool) -> None:
        self.tree = tree
        self.policy = policy
        self.is_isolated = is_isolated
        self.exposure = Exposure()

    def choose(self, candidates: Candidates, in_flight: Sequence[Sequence[bytes]]) -> list[int]:
        """Return the indices of the candidates to feed, ascending."""
        return choose_candidates(candidates, PrefixView(self.tree, (), in_flight), *self.exposure.allowed(candidates))

    def learn(self, order: LearnedOrder, plan: ContextPlan | None) -> None:
        """Learn an order that a model saw; others' orders have no plan. May raise what a policy does."""
        entered = () if plan is None else plan.entered
        if entered is None and self.is_isolated:
            return
        self.exposure.add(order.keys, [order.keys[order.ranks.index(position)] for position in entered or ()])
        if self.is_isolated:
            resident = self.tree.insert(order.keys, order.tokens).blocks
            self.policy.observe(
                [
                    ServedBlock(key, length, rank, i < resident)
                    for i, (key, length, rank) in enumerate(zip(*order, strict=True))
                ]
            )


def exposure_stats(scopes: Sequence[ScopeChoices]) -> dict[str, float | None]:
    """Return the fields of `PlannerStats` on what choices have fed."""
    fed = [choices.exposure for choices in scopes]
    requests = sum([exposure.requests for exposure in fed])
    share = sum([exposure.top_share() * exposure.requests for exposure in fed])
    return {
        "fed_passages": sum([exposure.passages for exposure in fed]),
        "most_fed_share": share / requests if requests else None,
    }
