"""The order that stays: what the last turn had comes first, as it was."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering import BlockView, PrefixView

__all__ = ["SteadyOrder"]


class SteadyOrder:
    """An ordering policy for contexts that change little from turn to turn: `ContextPlanner(policy=SteadyOrder)`.

    Blocks of the last order that come again stand first, in the order that they had; new ones follow in relevance
    order. Only where the engine is predicted to hold more tokens in another order does that path come first, and then
    the rest of the last order's blocks, in the order that they had. A first request stays in relevance order.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, ...] = ()

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        places = {block.fingerprint: i for i, block in enumerate(blocks)}
        kept = [places[key] for key in self._last if key in places]
        path = prefix.deepest_path(blocks)
        if sum(blocks[i].tokens for i in path) <= prefix.match_prefix([blocks[i] for i in kept]).tokens:
            path = []
        return list(dict.fromkeys([*path, *kept, *range(len(blocks))]))

    def observe(self, served: Sequence[BlockView]) -> None:
        self._last = tuple(block.fingerprint for block in served)
