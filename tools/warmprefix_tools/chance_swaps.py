"""The control of a choice: as many swaps among the same candidates, but drawn by chance. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from warmprefix import Choice

__all__ = ["chance_swaps"]


def chance_swaps(scores: Sequence[float], choice: Choice, swaps: int, rng: random.Random, extra: int = 0) -> list[int]:
    """Return the positions of the candidates to feed, ascending.

    The first `choice.k`, of which `swaps` behind the kept ones leave for candidates beyond `k` that `choice` tolerates,
    and `extra` more of these; fewer where there are not as many.

    Raises:
        ValueError: As of `Choice.losses`.
    """
    losses = choice.losses(scores)
    first = range(min(choice.k, len(losses)))
    beyond = [position for position in range(len(first), len(losses)) if losses[position] <= choice.within]
    swaps = min(swaps, len(beyond), len(first[choice.kept :]))
    left = set(rng.sample(first[choice.kept :], swaps))
    entered = rng.sample(beyond, min(swaps + extra, len(beyond)))
    return [*[position for position in first if position not in left], *sorted(entered)]
