from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from warmprefix.batch.planners import Placed, laid_out

batches = st.lists(st.lists(st.integers(0, 8), max_size=6, unique=True), min_size=1, max_size=9)


def test_example() -> None:
    """1 and 2 share {7, 8}; 0 shares {7} with both; 3 is alone."""
    contexts = [[1, 7], [2, 8, 7], [7, 3, 8], [4, 5]]
    left, right = [1, 4, -1, -1], [2, 0, -1, -1]
    assert laid_out(left, right, [[0], [1], [2], [3]], contexts) == [
        Placed(0, (7, 1)),
        Placed(1, (7, 8, 2)),
        Placed(2, (7, 8, 3)),
        Placed(3, (4, 5)),
    ]


def test_shared_blocks_follow_the_order_of_the_earliest_context() -> None:
    contexts = [[5, 6, 7], [7, 6, 9], [6, 9, 7, 5]]
    assert laid_out([1, 3], [2, 0], [[0], [1], [2]], contexts) == [
        Placed(0, (6, 7, 5)),
        Placed(1, (6, 7, 9)),
        Placed(2, (6, 7, 9, 5)),
    ]


def test_plan_without_merges_moves_nothing() -> None:
    contexts = [[3, 1], [], [2]]
    assert laid_out([-1] * 3, [-1] * 3, [[0], [1], [2]], contexts) == [
        Placed(i, tuple(context)) for i, context in enumerate(contexts)
    ]


def test_plan_of_no_contexts_is_empty() -> None:
    assert laid_out([], [], [], []) == []


def test_equal_sets_run_together_in_the_first_order() -> None:
    contexts = [[2, 1], [9], [1, 2]]
    assert laid_out([-1, -1], [-1, -1], [[0, 2], [1]], contexts) == [
        Placed(0, (2, 1)),
        Placed(2, (2, 1)),
        Placed(1, (9,)),
    ]


def grown(n: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return random trees over n nodes, with unused merges between."""
    left, right = [-1] * n, [-1] * n
    roots = list(range(n))
    for merge in sorted(rng.sample(range(n), rng.randrange(n))):
        left[merge] = roots.pop(rng.randrange(len(roots)))
        right[merge] = roots.pop(rng.randrange(len(roots)))
        roots.append(n + merge)
    return left, right


def contexts_below(v: int, left: Sequence[int], right: Sequence[int], n: int) -> list[int]:
    if v < n:
        return [v]
    return contexts_below(left[v - n], left, right, n) + contexts_below(right[v - n], left, right, n)


@given(batches, st.randoms(use_true_random=False))
def test_each_merge_is_a_prefix_of_consecutive_contexts(contexts: list[list[int]], rng: random.Random) -> None:
    by_set: dict[frozenset[int], list[int]] = {}
    for i, context in enumerate(contexts):
        by_set.setdefault(frozenset(context), []).append(i)
    members, n = list(by_set.values()), len(by_set)
    left, right = grown(n, rng)
    plan = laid_out(left, right, members, contexts)
    assert sorted(i for i, _ in plan) == list(range(len(contexts)))
    assert all(sorted(order) == sorted(contexts[i]) for i, order in plan)
    place = {i: at for at, (i, _) in enumerate(plan)}
    order_of = dict(plan)
    for v in [*range(n), *(n + merge for merge in range(n) if left[merge] >= 0)]:
        below = [i for x in contexts_below(v, left, right, n) for i in members[x]]
        places = sorted(place[i] for i in below)
        assert places == list(range(places[0], places[0] + len(places)))
        assert plan[places[0]].context == min(below)
        shared = frozenset.intersection(*(frozenset(contexts[i]) for i in below))
        prefixes = {order_of[i][: len(shared)] for i in below}
        assert len(prefixes) == 1
        assert set(prefixes.pop()) == shared
    for same in members:
        # Blocks that no merge shares stay in relevance order.
        x = members.index(same)
        if all(x not in (a, b) for a, b in zip(left, right, strict=True)):
            assert {order_of[i] for i in same} == {tuple(contexts[same[0]])}


def test_deep_trees_need_no_recursion() -> None:
    n = 3_000
    left = [n - 1, *range(n, 2 * n - 2), -1]
    right = [*range(n - 2, -1, -1), -1]
    contexts = [[n, i] for i in range(n)]
    assert laid_out(left, right, [[i] for i in range(n)], contexts) == [Placed(i, (n, i)) for i in range(n)]
