"""Sharing out blocks: affinity under a bound on the load. The only state is the candidates' own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

__all__ = ["BlockItem", "Candidate", "Placing", "rendezvous_score", "share_out"]

_MASK = (1 << 64) - 1
_by_work = attrgetter("work", "load", "name")
_by_load = attrgetter("load", "name")


class Candidate:
    """An agent that blocks can go to, with its load."""

    __slots__ = ("given", "load", "name", "queue", "seed", "weight", "work")

    def __init__(self, name: str, weight: float = 1.0, salt: bytes = b"") -> None:
        self.name = name
        self.weight = weight
        self.load = 0.0
        """Tokens that it was assigned lately, divided by its weight so that loads compare."""
        self.given = 0
        """Number of blocks of the present request."""
        self.queue = 0
        """Tokens that it has yet to compute for earlier requests."""
        self.work = 0.0
        """Tokens that it has yet to compute, the present request included, divided by its weight."""
        data = name.encode("utf-8", "surrogatepass")
        digest = blake2b(data, digest_size=8, salt=salt, person=b"wp-agent").digest()
        # For rendezvous hashing: odd, so that an odd key times different seeds gives different numbers.
        self.seed = int.from_bytes(digest, "big") | 1


class BlockItem(NamedTuple):
    """A block to be assigned, by its fingerprint, and the candidates that hold it."""

    key: bytes
    tokens: int
    holders: Sequence[Candidate]


class Placing(NamedTuple):
    """The candidate that got an item."""

    candidate: Candidate
    held: bool
    spilled: bool
    """True if others hold the item, but had no room."""
    work: int
    """Tokens that the candidate computes for it, including the cost of its prompt."""


def share_out(
    items: Sequence[BlockItem],
    candidates: Sequence[Candidate],
    eps: float,
    floor: float,
    prompt_tokens: int,
    together: bool,
) -> list[Placing]:
    """Assign every item to a candidate, and add its tokens to that candidate's load.

    **Affinity.** Held items come first, those with few holders before those with many. Of the holders with room, the
    one with the least work gets the item; the least loaded, if `together`. A holder has room while

    - its load stays within `max(floor, (1 + eps) * mean)`, the mean being that after all items; and
    - it has fewer items than an even share; or its further items, at `prompt_tokens` each, delay this one no longer
      than computing it elsewhere would take.

    **Rendezvous hashing.** All other items go to candidates that have fewer items than an even share, and among these
    to those with the least work; or to any, if `together`, because what is computed in one prompt should meet there
    again. Rendezvous hashing chooses among several, and the item goes there if there is room.

    **Power of two choices.** Without room, it goes to the less loaded of the next two with room; else to the least
    loaded of all. A block that spills again meets the candidate that computed it last time, so a block that spills
    often is soon held by several candidates, and one that does not by one.

    Afterwards no load is above that bound, except that of a candidate that was the least loaded when it got the item.
    O(items * candidates), and O(holders) for an item that a holder takes. Deterministic.

    `items` are distinct, in relevance order; the order of the candidates does not matter. `together` means that a
    candidate's items stand in one prompt. Only the first is right behind the preamble, so the others will hardly be
    cached although they are held: no candidate gets more than an even share while others have room.
    """
    for candidate in candidates:
        candidate.given = 0
        candidate.work = 0.0 if together else candidate.queue / candidate.weight
    # `fsum`, so that the order of the candidates does not matter.
    weights = math.fsum([candidate.weight for candidate in candidates])
    before = math.fsum([candidate.load * candidate.weight for candidate in candidates])
    limit = max(floor, (1 + eps) * (before + sum([item.tokens for item in items])) / weights)
    share = -(-len(items) // len(candidates))
    uniform = weights == len(candidates) and all(candidate.weight == 1.0 for candidate in candidates)
    choices: dict[bytes, Placing] = {}
    for item in sorted(items, key=lambda item: (not item.holders, len(item.holders), -item.tokens)):
        tokens = item.tokens
        chosen: Candidate | None = None
        for holder in item.holders:
            further = holder.given - share + 1
            if (
                (further <= 0 or (not together and further * prompt_tokens <= tokens))
                and holder.load + tokens / holder.weight <= limit
                and (chosen is None or _by_work(holder) < _by_work(chosen))
            ):
                chosen = holder
        held = chosen is not None
        if chosen is None:
            chosen = _place(item, candidates, limit, share, uniform)
        work = (0 if together and chosen.given else prompt_tokens) + (0 if held else tokens)
        chosen.given += 1
        if not together:
            chosen.work += work / chosen.weight
        chosen.load += tokens / chosen.weight
        choices[item.key] = Placing(chosen, held, not held and len(item.holders) > 0, work)
    return [choices[item.key] for item in items]


def _place(item: BlockItem, candidates: Sequence[Candidate], limit: float, share: int, uniform: bool) -> Candidate:
    """Return the candidate that computes an item, if no holder has room."""
    key, tokens, _ = item
    free = [candidate for candidate in candidates if candidate.given < share] or candidates
    least = min([candidate.work for candidate in free])
    free = [candidate for candidate in free if candidate.work == least]
    preferences = _preferences(key, free, uniform)
    first = free[preferences.index(max(preferences))]
    if first.load + tokens / first.weight <= limit:
        return first
    ranked = sorted(zip(preferences, free, strict=True), key=lambda ranked: (-ranked[0], ranked[1].name))
    roomy = [candidate for _, candidate in ranked if candidate.load + tokens / candidate.weight <= limit]
    return min(roomy[:2] or candidates, key=_by_load)


def rendezvous_score(weight: float, drawn: int) -> float:
    """Return the preference for a candidate that drew 64 bits, whatever others there are; the highest wins.

    Rendezvous hashing (Thaler and Ravishankar, 1998), by weight (Schindelhauer and Schomaker, 2005).
    """
    return -weight / math.log(((drawn >> 12) + 0.5) / 2.0**52)  # as many bits as are exact, so that it is below 1


def _preferences(key: bytes, candidates: Sequence[Candidate], uniform: bool) -> Sequence[float]:
    """Return how much a block prefers each candidate."""
    drawn = int.from_bytes(key[:8], "big") | 1
    numbers = [drawn * candidate.seed & _MASK for candidate in candidates]
    if uniform:
        return numbers  # ranked as below, for less
    return [rendezvous_score(each.weight, number) for number, each in zip(numbers, candidates, strict=True)]
