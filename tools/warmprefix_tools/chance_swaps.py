"""The control of a choice: as many swaps among the same candidates, but drawn by chance. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from warmprefix import Choice

__all__ = ["chance_swaps"]


def chance_swaps(
    scores: Sequence[float],
    choice: Choice,
    swaps: int,
    rng: random.Random,
    extra: int = 0,
    known: Collection[int] | None = None,
) -> list[int]:
    """Return the positions of the candidates to feed, ascending.

    The first `choice.k`, of which `swaps` leave for candidates beyond `k` that `choice` tolerates, and `extra` more of
    these; fewer where there are not as many. Only those behind the kept ones leave that `choice` may leave out, and of
    these only the `known` positions, of passages that the same control has fed before; all if it is None.

    Raises:
        ValueError: As of `Choice.losses`.
    """
    first = range(min(choice.k, len(scores)))
    may_leave, may_enter = choice.near_equals(choice.losses(scores), len(first))
    leaving = [position for position in may_leave if known is None or position in known]
    swaps = min(swaps, len(may_enter), len(leaving))
    left = set(rng.sample(leaving, swaps))
    entered = rng.sample(may_enter, min(swaps + extra, len(may_enter)))
    return [*[position for position in first if position not in left], *sorted(entered)]
