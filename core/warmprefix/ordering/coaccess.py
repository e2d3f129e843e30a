"""The default: what is resident now, then what later requests are likely to share."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.access import AccessWindow
from warmprefix.ordering.base import BlockView, PrefixView

__all__ = ["CoAccessPolicy"]

_MAX_TAIL = 64


class CoAccessPolicy:
    """Deepest resident path, then by co-access.

    *Head*: the resident path of most tokens among the request's blocks. *Tail*: again and again the block that most
    requests of the window hold together with everything placed so far, so that requests on one topic grow one common
    path. The last rank costs a block almost `rank_prior` such requests, the first none:
    with the default, rank decides ties and no more.

    A request whose blocks neither lie on a resident path nor came up in the window keeps its relevance order.
    O(k^2) bitset operations for k blocks, and for at most 64 places: the rest, if any, stays in relevance order.
    """

    def __init__(self, window: int = 1_000, rank_prior: float = 1.0) -> None:
        if rank_prior < 0:
            raise ValueError(f"rank_prior must be 0 or more, got {rank_prior}")
        self.rank_prior = rank_prior
        self._window = AccessWindow[bytes](window)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        planned = prefix.deepest_path(blocks)
        requests = self._window.requests([block.fingerprint for block in blocks])
        common = -1  # every request of the window, until a block is placed
        for i in planned:
            common &= requests[i]
        placed = set(planned)
        # A block's requests, what its rank costs it, and its rank.
        cost = self.rank_prior / max(len(blocks), 1)
        rest = [(requests[i], cost * i, i) for i in range(len(blocks)) if i not in placed]
        places = min(len(rest), _MAX_TAIL)
        while places and common:
            scores = [(common & held).bit_count() - penalty for held, penalty, _ in rest]
            held, _, best = rest.pop(scores.index(max(scores)))
            planned.append(best)
            common &= held
            places -= 1
        return planned + [i for _, _, i in rest]

    def observe(self, served: Sequence[BlockView]) -> None:
        self._window.observe([block.fingerprint for block in served])
