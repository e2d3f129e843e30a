"""Counts of the evidence that a run feeds, and the control that exchanges as much by lot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest

from warmprefix_tools.chance_swaps import chance_swaps
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.results import EvidenceCounts
from warmprefix_tools.replay.workload import ReplayRequest

__all__ = ["ChanceControl", "EvidenceTally"]

_SEED = 42
_COUNTED = [name for name in EvidenceCounts.__dataclass_fields__ if name not in ("fed", "distinct", "most_fed")]


class EvidenceTally:
    """Counts what is fed, request by request."""

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, request: ReplayRequest, order: ContextOrder) -> None:
        """Count one request."""
        counts, first, fed = self._counts, len(request.relevance), set(order.order)
        self._times.update([request.keys[i] for i in fed])
        exchanged = len(_positions(order, "exchanged"))
        counts["exchanged"] += exchanged
        counts["extra"] += order.entered - exchanged
        twins = _positions(order, "twin")
        counts["twins"] += sum([i < first for i in twins])
        counts["superseded"] += sum([i < first for i in _positions(order, "superseded")])
        gold = set(request.source.gold)
        if not gold:
            return
        now = {i for i in fed if request.ids[i] in gold}
        before = {i for i in request.relevance if request.ids[i] in gold}
        counts["gold"] += len(gold)
        counts["gold_fed"] += len(now)
        counts["gold_requests"] += 1
        counts["gold_lost_requests"] += not before <= now
        counts["gold_won_requests"] += not now <= before
        counts["gold_twins"] += len((before - now) & twins)

    def evidence(self, relevance_distinct: int) -> EvidenceCounts:
        """Return the counts; the most-fed 1 % are those of the passages that relevance feeds, at least one."""
        top = nlargest(max(round(relevance_distinct / 100), 1), self._times.values())
        return EvidenceCounts(
            fed=self._times.total(),
            distinct=len(self._times),
            most_fed=sum(top),
            **{name: self._counts[name] for name in _COUNTED},
        )


class ChanceControl:
    """Draws as many exchanges and extra passages for each request as a choice made, with the same tolerance.

    Twins and older versions are left out as the choice left them out.
    """

    def __init__(self) -> None:
        self._random = random.Random(_SEED)  # noqa: S311
        self._drawn: list[Sequence[int]] = []
        self._fed = set[int]()
        """The keys of the passages that were drawn: as for a choice, one that was never fed stays."""
        self._next = 0

    def observe(self, request: ReplayRequest, order: ContextOrder) -> None:
        """Receive a request of the choice, and draw for it."""
        self._drawn.append(self._draw(request, order))
        self._fed.update([request.keys[i] for i in self._drawn[-1]])

    def _draw(self, request: ReplayRequest, order: ContextOrder) -> Sequence[int]:
        choice = request.choice
        if choice is None:
            return request.relevance
        exchanged = len(_positions(order, "exchanged"))
        # Each place of a twin or an older version is that of the passage which stands for it.
        places = {i: i for i in range(len(request.blocks))}
        for left in order.left_out:
            if left.reason in ("twin", "superseded"):
                del places[left.position]
                if left.instead is not None:
                    places[left.instead] = min(places[left.instead], left.position)
        standing = sorted(places, key=places.__getitem__)
        k = sum([places[i] < choice.k for i in standing])
        if k < min(choice.k, len(request.blocks)):
            choice = replace(choice, k=max(k, 1), keep=min(choice.kept, max(k, 1)))
        scores = [score for i in standing if (score := request.blocks[places[i]].score) is not None]
        known = [place for place, i in enumerate(standing) if request.keys[i] in self._fed]
        drawn = chance_swaps(scores, choice, exchanged, self._random, order.entered - exchanged, known)
        return sorted([standing[i] for i in drawn])

    def places(self, request: ReplayRequest) -> Sequence[int]:
        """Return the positions drawn for the next request, in the order of `observe`."""
        self._next += 1
        return self._drawn[self._next - 1]


def _positions(order: ContextOrder, *reasons: str) -> set[int]:
    """Return the positions of the candidates that were left out for one of these reasons."""
    return {left.position for left in order.left_out if left.reason in reasons}
