"""Primes of a batch: one in front of the first request behind each prefix that several requests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix.batch.plan import PlannedPrime, PlannedRequest
from warmprefix.cache_profiles import Checkpoints
from warmprefix.plan import Scope
from warmprefix.tokens import estimated_tokens

__all__ = ["planned_primes"]

_REQUEST_TOKENS = 32
"""Price of one more request for an engine, in tokens of prefill."""
_END_ERROR = 0.06
"""Share of a prefix that a prime ends behind its checkpoint, at most: runners cut it there as well as they can."""


@dataclass(slots=True)
class _SharedPrefix:
    """A prefix of planned orders."""

    children: dict[bytes, _SharedPrefix]
    first: int
    """Place of the first request that begins with it."""
    visits: int = 0
    ends: int = 0
    """Of the visits, those of requests that end here."""

    @property
    def branches(self) -> bool:
        """True if requests part here."""
        return self.visits > 1 and (len(self.children) + self.ends > 1)


def planned_primes(requests: Sequence[PlannedRequest], checkpoints: Checkpoints | None) -> tuple[PlannedPrime, ...]:
    """Return the primes that pay for these requests, in execution order.

    There is one for each prefix at which requests part, unless an earlier prime leaves the same checkpoint, or it
    costs more than it saves. O(blocks), and memory for one tree.
    """
    if checkpoints is None:
        return ()
    roots: dict[Scope, _SharedPrefix] = {}
    for place, planned in enumerate(requests):
        node = roots.setdefault(planned.wording.scope, _SharedPrefix({}, place))
        node.visits += 1
        for position in planned.order:
            key = planned.request.blocks[position].fingerprint
            node = node.children.setdefault(key, _SharedPrefix({}, place))
            node.visits += 1
        node.ends += 1
    primes: list[PlannedPrime] = []
    covered: dict[int, int] = {}
    preambles: dict[Scope, int] = {}
    for place, planned in enumerate(requests):
        scope = planned.wording.scope
        if scope not in preambles:
            preambles[scope] = estimated_tokens(planned.wording.preamble or "")
        node, tokens, reached = roots[scope], preambles[scope], 0
        for depth in range(len(planned.order) + 1):
            if depth:
                block = planned.request.blocks[planned.order[depth - 1]]
                node, tokens = node.children[block.fingerprint], tokens + block.tokens
            if node.branches and node.first == place and prime_gain(checkpoints, tokens, reached, node.visits) > 0:
                unit = checkpoints.unit or checkpoints.block
                covered[id(node)] = tokens - tokens % unit
                primes.append(PlannedPrime(planned, depth, tokens))
            reached = covered.get(id(node), reached)
    return tuple(primes)


def prime_gain(checkpoints: Checkpoints, shared: int, covered: int, visits: int) -> int:
    """Return the tokens of prefill that a prime saves net; 0 or less if it does not pay.

    Without it, the second request behind the prefix finds what is covered, and the third and later ones a junction.

    Args:
        checkpoints: Where the engine keeps them.
        shared: Tokens of the prefix.
        covered: Of these, tokens up to a checkpoint that is there already.
        visits: Number of requests that begin with the prefix, 1 or more.
    """
    unit = checkpoints.unit or checkpoints.block
    reached = shared - shared % unit
    if reached <= covered:
        return 0
    junction = max(shared - shared % checkpoints.block, covered)
    saved = (reached - covered) * min(visits - 1, 1) + (reached - junction) * max(visits - 2, 0)
    return saved - min(shared - reached, int(_END_ERROR * shared)) - 1 - _REQUEST_TOKENS
