"""The best plan of a few small requests, found by exhaustive search.

It shares no code with the planners: a plan is an order of each request's blocks, and an unbounded prefix cache prefills
every prefix of these orders once, so the best plan is the one whose prefixes, each counted with its last block, have
the fewest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product

__all__ = ["fewest_prefilled", "fewest_prefilled_of_all", "small_batches"]

Contexts = Sequence[Sequence[int]]


def fewest_prefilled(contexts: Contexts, tokens: Sequence[int]) -> int:
    """Return the tokens that the best plan prefills in an unbounded, empty cache.

    Of the requests behind one prefix, the first continues with one of its blocks, together with some of the others
    that have it; both parts are solved in the same way. All choices are tried, each state once: exponential in
    requests and blocks.
    """
    blocks = [sum(1 << block for block in set(context)) for context in contexts]

    @cache
    def fewest(members: tuple[int, ...], prefix: int) -> int:
        left = tuple([x for x in members if blocks[x] & ~prefix])
        if not left:
            return 0
        first, others = left[0], left[1:]
        least = None
        for block in _bits(blocks[first] & ~prefix):
            able = [x for x in others if blocks[x] >> block & 1]
            for together in product((True, False), repeat=len(able)):
                joined = {x for x, joins in zip(able, together, strict=True) if joins}
                behind = (first, *[x for x in others if x in joined])
                rest = tuple([x for x in others if x not in joined])
                cost = tokens[block] + fewest(behind, prefix | 1 << block) + fewest(rest, prefix)
                least = cost if least is None else min(least, cost)
        assert least is not None
        return least

    return fewest(tuple(range(len(blocks))), 0)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def fewest_prefilled_of_all(contexts: Contexts, tokens: Sequence[int]) -> int:
    """Compute the same from every order of every request, to check `fewest_prefilled` on tiny batches."""
    plans = product(*[list(permutations(context)) for context in contexts])
    return min(_prefilled(orders, tokens) for orders in plans)


def _prefilled(orders: Contexts, tokens: Sequence[int]) -> int:
    prefixes = {tuple(order[:end]) for order in orders for end in range(1, len(order) + 1)}
    return sum(tokens[prefix[-1]] for prefix in prefixes)


def small_batches(
    count: int, requests: int = 7, blocks: int = 4, seed: int = 0
) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Yield random batches of small requests, with the length of every block.

    Their blocks are drawn from 3 to 8, so that much is shared, in ways that are at odds.
    """
    rng = random.Random(seed)
    for _ in range(count):
        vocabulary = rng.randint(3, 8)
        tokens = [rng.randint(1, 400) for _ in range(vocabulary)]
        yield (
            [
                rng.sample(range(vocabulary), rng.randint(1, min(blocks, vocabulary)))
                for _ in range(rng.randint(2, requests))
            ],
            tokens,
        )
