from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.batch.planners import Placed, no_progress
from warmprefix.batch.window import WindowPlanner, _merged

TOKENS = [1, 2, 2, 3, 7, 0]

batches = st.lists(st.sets(st.integers(0, 5)).map(frozenset), max_size=10, unique=True)


def weight(blocks: frozenset[int]) -> int:
    return sum(TOKENS[block] for block in blocks)


@given(batches)
def test_pair_that_shares_most_is_merged_first(sets: list[frozenset[int]]) -> None:
    left, right = _merged(list(sets), TOKENS)
    clusters = dict(enumerate(sets))

    def most() -> int:
        return max((weight(a & b) for a, b in combinations(clusters.values(), 2)), default=0)

    for new, (a, b) in enumerate(zip(left, right, strict=True), len(sets)):
        greatest = most()
        clusters[new] = clusters.pop(a) & clusters.pop(b)
        assert 0 < weight(clusters[new]) == greatest
    assert most() == 0


def test_earliest_of_equal_pairs_is_merged_first() -> None:
    assert _merged([frozenset({0}), frozenset({1, 3}), frozenset({0, 3}), frozenset({1})], [1] * 4)[0][0] == 0


def test_example() -> None:
    contexts = [[0, 4], [5, 3], [4, 2, 3], [3, 4, 1]]
    assert WindowPlanner().arrange(contexts, TOKENS, no_progress) == [
        Placed(0, (4, 0)),
        Placed(2, (4, 3, 2)),
        Placed(3, (4, 3, 1)),
        Placed(1, (5, 3)),
    ]


@pytest.mark.parametrize("requests", [64, 200])
def test_one_block_shared_by_all(requests: int) -> None:
    plan = WindowPlanner().arrange([[1 + i, 0] for i in range(requests)], [5] * (requests + 1), no_progress)
    assert sorted(plan) == [Placed(i, (0, 1 + i)) for i in range(requests)]
