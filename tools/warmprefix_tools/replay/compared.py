"""Results side by side, a trace at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warmprefix.plan import Placement
from warmprefix_tools.replay.arrange import TODAY
from warmprefix_tools.replay.result import ReplayResult

__all__ = ["Comparison", "cache_name", "compare"]

_DEFAULT = "coaccess"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, through policies and caches in every combination that was asked for.

    Its headline is about the first cache size that its results came with.
    """

    trace: str
    k: int
    placement: Placement
    cells: dict[tuple[str, int | None], ReplayResult] = field(default_factory=dict)

    @property
    def capacities(self) -> list[int | None]:
        return list(dict.fromkeys(capacity for _, capacity in self.cells))

    def at(self, capacity: int | None) -> list[ReplayResult]:
        """With a cache of this size, what found most first."""
        found = [result for (_, size), result in self.cells.items() if size == capacity]
        return sorted(found, key=lambda result: -result.hit_ratio)

    @property
    def headline(self) -> list[ReplayResult]:
        return self.at(self.capacities[0])

    @property
    def after(self) -> ReplayResult:
        """The default policy; where it was not asked for, the one that found most, relevance order last of all."""
        preferred = [result for result in self.headline if result.policy == _DEFAULT]
        others = [result for result in self.headline if result.policy != TODAY]
        return [*preferred, *others, *self.headline][0]

    @property
    def before(self) -> ReplayResult | None:
        """Relevance order, if it was replayed, and something else too."""
        result = self.cells.get((TODAY, self.capacities[0]))
        return None if result is self.after else result

    def best(self, number: int) -> list[ReplayResult]:
        """`after`, `before`, and the `number` policies that found most of the others."""
        pair = [result for result in (self.after, self.before) if result is not None]
        return pair + [result for result in self.headline if result not in pair][:number]


def compare(results: Sequence[ReplayResult]) -> list[Comparison]:
    """The results by trace, in the order of their coming.

    Where two traces share a name, the second is compared apart; no result replaces another.
    """
    comparisons: list[Comparison] = []
    latest: dict[tuple[str, int, Placement], Comparison] = {}
    for result in results:
        key: tuple[str, int, Placement] = (result.trace, result.k, result.placement)
        cell = (result.policy, result.capacity_tokens)
        if key not in latest or cell in latest[key].cells:
            latest[key] = Comparison(*key)
            comparisons.append(latest[key])
        latest[key].cells[cell] = result
    return comparisons


def cache_name(capacity: int | None) -> str:
    """To be read behind "a cache"."""
    return "without bound" if capacity is None else f"of {capacity:,} tokens"
