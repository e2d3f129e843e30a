"""Who reads which block: affinity under a bound on the load. No state but the candidates' own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

__all__ = ["Candidate", "Choice", "Item", "share_out"]

_MASK = (1 << 64) - 1


class Candidate:
    """An agent that blocks can be given to, and what it was given lately."""

    __slots__ = ("given", "load", "name", "seed", "weight", "work")

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.load = 0.0
        """Tokens that it was given lately, divided by its weight, so that loads compare."""
        self.given = 0
        """Blocks of the present request."""
        self.work = 0.0
        """Tokens of the present request that it has to compute, divided by its weight."""
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"wp-agent").digest()
        self.seed = int.from_bytes(digest, "big") | 1
        """For rendezvous hashing: odd, so that an odd key times different seeds gives different numbers."""


class Item(NamedTuple):
    """A block to be given to a candidate."""

    key: bytes
    """Its fingerprint."""
    tokens: int
    holders: Sequence[Candidate]
    """The candidates that hold it."""


class Choice(NamedTuple):
    """Who got an item."""

    candidate: Candidate
    held: bool
    spilled: bool
    """Whether others hold it, and had no room."""


def share_out(
    items: Sequence[Item], candidates: Sequence[Candidate], eps: float, floor: float, together: bool
) -> list[Choice]:
    """Give every item to a candidate, and add its tokens to that one's load.

    What somebody holds comes first, what few hold before what many do. The least loaded of the holders that have room
    gets it; room has who stays within `max(floor, (1 + eps) * mean)`, the mean being that after all of the items. It
    costs next to nothing to compute, so one candidate may get several.

    Everything else has to be computed, and is spread: a candidate is free for it while that leaves it no more to
    compute in this request than an even share. Of the free ones the first by rendezvous hashing gets it, if it has
    room; else the less loaded of the next two that have (power of two choices); else the least loaded of all. A block
    that spills again thus meets the candidate that computed it the last time: what spills often is soon held by
    several, and what does not is held by one.

    So afterwards nobody's load is above that bound, but for one who was the least loaded when it got the item.
    O(items * candidates), and O(holders) for an item that a holder takes. Deterministic.

    Args:
        items: Distinct blocks, in relevance order.
        candidates: At least one, in an order that does not matter.
        eps: How far above the mean a load may be.
        floor: A load, in tokens, that is never too high.
        together: The items of one candidate stand in one prompt, where only the first is right behind the preamble, so
            that the others will hardly be cached though it holds them: no candidate gets more of them than an even
            share, while others have room.
    """
    for candidate in candidates:
        candidate.given = 0
        candidate.work = 0.0
    # The sums do not depend on the order.
    weights = math.fsum([candidate.weight for candidate in candidates])
    before = math.fsum([candidate.load * candidate.weight for candidate in candidates])
    limit = max(floor, (1 + eps) * (before + sum([item.tokens for item in items])) / weights)
    quota = -(-len(items) // len(candidates)) if together else len(items)
    new = [item.tokens for item in items if not item.holders]
    even = max(sum(new) / weights, max(new)) if new else 0.0
    uniform = weights == len(candidates) and all(candidate.weight == 1.0 for candidate in candidates)
    choices: dict[bytes, Choice] = {}
    for item in sorted(items, key=_urgency):
        tokens = item.tokens
        chosen: Candidate | None = None
        for holder in item.holders:
            if (
                holder.given < quota
                and holder.load + tokens / holder.weight <= limit
                and (chosen is None or (holder.load, holder.name) < (chosen.load, chosen.name))
            ):
                chosen = holder
        held = chosen is not None
        if chosen is None:
            chosen = _place(item, candidates, limit, even, quota if together else None, uniform)
            chosen.work += tokens / chosen.weight
        chosen.given += 1
        chosen.load += tokens / chosen.weight
        choices[item.key] = Choice(chosen, held, not held and len(item.holders) > 0)
    return [choices[item.key] for item in items]


def _urgency(item: Item) -> tuple[bool, int, int]:
    holders = len(item.holders)
    return not holders, holders, -item.tokens


def _place(
    item: Item, candidates: Sequence[Candidate], limit: float, even: float, quota: int | None, uniform: bool
) -> Candidate:
    """Who computes an item that nobody with room holds."""
    key, tokens, _ = item
    preferences = _preferences(key, candidates, uniform)
    first = candidates[preferences.index(max(preferences))]
    share = tokens / first.weight
    if first.load + share <= limit and (first.work + share <= even if quota is None else first.given < quota):
        return first  # as below, where most end
    if quota is None:
        even = max(even, min([candidate.work + tokens / candidate.weight for candidate in candidates]))
        free = [c for c in zip(preferences, candidates, strict=True) if c[1].work + tokens / c[1].weight <= even]
    else:
        free = [c for c in zip(preferences, candidates, strict=True) if c[1].given < quota]
    free.sort(key=_by_preference)
    roomy = [candidate for _, candidate in free if candidate.load + tokens / candidate.weight <= limit]
    if not roomy:
        return min(candidates, key=_load)
    return roomy[0] if roomy[0] is free[0][1] else min(roomy[:2], key=_load)


def _preferences(key: bytes, candidates: Sequence[Candidate], uniform: bool) -> Sequence[float]:
    """How much a block prefers each of them, whoever else is there: rendezvous hashing (Thaler and Ravishankar, 1998),
    by weight (Schindelhauer and Schomaker, 2005).
    """
    drawn = int.from_bytes(key[:8], "big") | 1
    numbers = [drawn * candidate.seed & _MASK for candidate in candidates]
    if uniform:
        return numbers  # in the same order as what follows
    return [
        -candidate.weight / math.log(((number >> 12) + 0.5) / 2.0**52)  # as many bits as are exact
        for number, candidate in zip(numbers, candidates, strict=True)
    ]


def _by_preference(preferred: tuple[float, Candidate]) -> tuple[float, str]:
    return -preferred[0], preferred[1].name


def _load(candidate: Candidate) -> tuple[float, str]:
    return candidate.load, candidate.name
