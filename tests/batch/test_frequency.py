from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from warmprefix.batch.planners import Placed, depth_first, no_progress
from warmprefix_baselines.planners import FrequencyPlanner

batches = st.lists(st.lists(st.integers(0, 9), max_size=5, unique=True), max_size=12)


def arrange(contexts: list[list[int]]) -> list[Placed]:
    return FrequencyPlanner().arrange(contexts, [1] * 10, no_progress)


def test_blocks_of_most_contexts_come_first() -> None:
    """CRAFT's example: block 2 is in five contexts, 3 in four, 1 in one."""
    contexts = [[1, 2, 3], [3, 2], [2, 3, 5], [3, 2, 6], [2, 7]]
    assert arrange(contexts) == [
        Placed(1, (2, 3)),
        Placed(0, (2, 3, 1)),
        Placed(2, (2, 3, 5)),
        Placed(3, (2, 3, 6)),
        Placed(4, (2, 7)),
    ]


def test_ties_keep_the_order_of_first_appearance() -> None:
    assert arrange([[8, 3, 5], [3, 8]]) == [Placed(1, (8, 3)), Placed(0, (8, 3, 5))]


def test_contexts_without_shared_blocks_are_unchanged() -> None:
    contexts = [[3, 1], [0, 2], [9]]
    assert arrange(contexts) == [Placed(i, tuple(context)) for i, context in enumerate(contexts)]


@given(batches)
def test_all_contexts_follow_one_order_of_blocks(contexts: list[list[int]]) -> None:
    occurrences = list(chain.from_iterable(contexts))
    for placed in arrange(contexts):
        assert list(placed.order) == sorted(
            contexts[placed.context], key=lambda block: (-occurrences.count(block), occurrences.index(block))
        )


@given(batches)
def test_execution_order_is_depth_first(contexts: list[list[int]]) -> None:
    orders = [placed.order for placed in arrange(contexts)]
    assert depth_first(orders) == list(range(len(orders)))
