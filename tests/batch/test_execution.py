from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix.batch.planners import depth_first
from warmprefix.prefix.tree import PrefixTree

orders_of_few = st.lists(st.lists(st.integers(0, 3), max_size=4, unique=True), max_size=8)


def saved_without_a_cache_to_speak_of(orders: Sequence[Sequence[int]], execution: Sequence[int]) -> int:
    """Return the blocks served from a cache of only the last context."""
    saved = 0
    before: Sequence[int] = ()
    for i in execution:
        saved += shared_prefix(before, orders[i])
        before = orders[i]
    return saved


def saved_at_most(orders: Sequence[Sequence[int]]) -> int:
    """Return the blocks served from an unbounded cache, in any execution order."""
    tree = PrefixTree[int]()
    return sum(tree.insert(order, [1] * len(order)).blocks for order in orders)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_equal_prefixes_run_together_by_first_appearance() -> None:
    orders = [(7, 1), (3, 9), (7, 2), (3, 9, 4), (5,), (7, 1, 8)]
    assert depth_first(orders) == [0, 5, 2, 1, 3, 4]


def test_orders_that_end_at_a_node_run_first() -> None:
    assert depth_first([(1, 2), (), (1,), (1, 3), ()]) == [1, 4, 2, 0, 3]


@given(orders_of_few)
@example([])
@example([[]])
@example([[], []])
def test_last_path_alone_gives_all_possible_reuse(orders: list[list[int]]) -> None:
    execution = depth_first(orders)
    assert sorted(execution) == list(range(len(orders)))
    assert saved_without_a_cache_to_speak_of(orders, execution) == saved_at_most(orders)


@given(st.lists(st.lists(st.integers(0, 2), max_size=3, unique=True), max_size=5))
def test_no_other_execution_order_reuses_more(orders: list[list[int]]) -> None:
    best = max(saved_without_a_cache_to_speak_of(orders, other) for other in permutations(range(len(orders))))
    assert saved_without_a_cache_to_speak_of(orders, depth_first(orders)) == best


@given(orders_of_few)
def test_depth_first_is_idempotent(orders: list[list[int]]) -> None:
    executed = [orders[i] for i in depth_first(orders)]
    assert depth_first(executed) == list(range(len(orders)))


def test_long_equal_contexts_need_no_recursion() -> None:
    long = list(range(5_000))
    assert depth_first([long, [*long, 5_000], long]) == [0, 2, 1]
