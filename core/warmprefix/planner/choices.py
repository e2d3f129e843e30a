"""What the choices of one scope depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from warmprefix.choice import Candidates
from warmprefix.order_sharing import LearnedOrder
from warmprefix.ordering import OrderingPolicy, PrefixView, ServedBlock
from warmprefix.ordering.choosing import Exposure, choose_candidates
from warmprefix.plan import ContextPlan
from warmprefix.prefix import PrefixTree

__all__ = ["Flight", "ScopeChoices", "exposure_stats"]


class Flight(NamedTuple):
    """An open plan whose context opens its prompt."""

    number: int
    order: tuple[bytes, ...]
    mirrored: tuple[bytes, ...]
    """The order of the scope's mirror; empty without one."""


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

    def choose(self, candidates: Candidates, flights: Iterable[Flight]) -> list[int]:
        """Return the indices of the candidates to feed, ascending; the `flights` are the scope's open plans."""
        in_flight = [flight.mirrored if self.is_isolated else flight.order for flight in flights]
        return choose_candidates(candidates, PrefixView(self.tree, (), in_flight), *self.exposure.allowed(candidates))

    def learn(self, order: LearnedOrder, plan: ContextPlan | None) -> None:
        """Learn an order that a model saw; others' orders have no plan. May raise what a policy does."""
        keys, tokens, ranks = order
        entered = None if plan is None else [keys[ranks.index(position)] for position in plan.entered or ()]
        self.exposure.add(keys, entered)
        if not self.is_isolated:
            return
        places: Sequence[int] = range(len(keys))
        if plan is not None and plan.mirrored is not None:
            places = [ranks.index(position) for position in plan.mirrored]
        elif plan is None or plan.entered is None:  # ordered by what the engine holds
            places = sorted(places, key=ranks.__getitem__)
            blocks = [ServedBlock(keys[i], tokens[i], ranks[i], False) for i in places]
            places = [places[i] for i in self.policy.order(blocks, PrefixView(self.tree))]
        resident = self.tree.insert([keys[i] for i in places], [tokens[i] for i in places]).blocks
        self.policy.observe(
            [ServedBlock(keys[i], tokens[i], ranks[i], number < resident) for number, i in enumerate(places)]
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
