from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix.batch.planners import Placed, depth_first
from warmprefix.batch.scope_plan import Served, serve

LENGTHS = [3, 5, 1, 0, 8]
"""Tokens of the blocks; one has none."""

Path = tuple[int, ...]

orders = st.permutations(range(5)).flatmap(lambda order: st.integers(0, 5).map(lambda end: tuple(order[:end])))
plans = st.lists(orders, max_size=8)


class LeastRecentlyUsed:
    """Cached prefixes, the next to evict first, and the contexts that computed them."""

    def __init__(self, capacity_tokens: int | None) -> None:
        self.capacity_tokens = capacity_tokens
        self.computed_by: dict[Path, int | None] = {}

    def serve(self, order: Path, context: int | None) -> Served:
        found = next((end for end in range(len(order), 0, -1) if order[:end] in self.computed_by), 0)
        warmed_by = self.computed_by.get(order[:found])
        for end in range(len(order), 0, -1):
            by = self.computed_by.pop(order[:end], None)
            self.computed_by[order[:end]] = by if end <= found else context
        while self.capacity_tokens is not None and self.tokens > self.capacity_tokens:
            del self.computed_by[next(iter(self.computed_by))]
        return Served(found, sum(LENGTHS[block] for block in order[:found]), warmed_by)

    @property
    def tokens(self) -> int:
        return sum(LENGTHS[path[-1]] for path in self.computed_by)


def placed(plan: Sequence[Path]) -> list[Placed]:
    """Return a plan in which numbers of contexts differ from their places."""
    return [Placed(100 - i, order) for i, order in enumerate(plan)]


def paths(plan: Sequence[Path]) -> list[tuple[Path, list[int]]]:
    return [(path, [LENGTHS[block] for block in path]) for path in plan]


def test_example() -> None:
    plan = [Placed(7, (0, 1)), Placed(4, (0, 1, 2)), Placed(9, (0, 1, 2, 3)), Placed(5, (2, 0))]
    assert serve(plan, LENGTHS, None, ()) == [(0, 0, None), (2, 8, 7), (3, 9, 4), (0, 0, None)]


def test_small_cache_computes_blocks_again() -> None:
    plan = [Placed(0, (0, 1)), Placed(1, (4,)), Placed(2, (0, 1))]
    assert serve(plan, LENGTHS, 16, ())[2] == (2, 8, 0)
    assert serve(plan, LENGTHS, 11, ())[2] == (1, 3, 0)
    assert serve(plan, LENGTHS, 8, ())[2] == (0, 0, None)


def test_blocks_computed_again_are_warmed_by_the_last_context() -> None:
    plan = [Placed(0, (0, 1)), Placed(1, (4, 2)), Placed(2, (0, 1)), Placed(3, (0, 1))]
    assert [found.warmed_by for found in serve(plan, LENGTHS, 9, ())] == [None, None, None, 2]


@given(plans, st.none() | st.integers(1, 20), plans)
@example([], None, [])
@example([(), ()], 1, [])
def test_serve_equals_a_list_of_prefixes(plan: list[Path], capacity_tokens: int | None, before: list[Path]) -> None:
    model = LeastRecentlyUsed(capacity_tokens)
    for path in before:
        model.serve(path, None)
    expected = [model.serve(order, context) for context, order in placed(plan)]
    assert serve(placed(plan), LENGTHS, capacity_tokens, paths(before)) == expected


@given(plans, plans)
def test_unbounded_cache_keeps_resident_blocks(plan: list[Path], before: list[Path]) -> None:
    model = LeastRecentlyUsed(None)
    for path in before:
        model.serve(path, None)
    resident = [
        next((end for end in range(len(order), 0, -1) if order[:end] in model.computed_by), 0) for order in plan
    ]
    expected = [model.serve(order, context) for context, order in placed(plan)]
    assert serve(placed(plan), LENGTHS, resident=resident) == expected


@given(plans)
def test_depth_first_plan_needs_room_for_the_longest_context_only(plan: list[Path]) -> None:
    ordered = [plan[i] for i in depth_first(plan)]
    longest = max((sum(LENGTHS[block] for block in order) for order in plan), default=0)
    assert serve(placed(ordered), LENGTHS, max(longest, 1), ()) == serve(placed(ordered), LENGTHS, None, ())


def test_cost_per_block_does_not_grow_with_length() -> None:
    """Contexts request prefixes of others; comparing tuples would read 1e8 blocks."""
    ladder = [Placed(i, tuple(range(i))) for i in range(700)]
    ladder += [Placed(700 + i, (1_000, *range(i))) for i in range(700)]
    lengths = [1] * 1_001
    assert [found.blocks for found in serve(ladder, lengths, None, ())[1:700]] == list(range(699))
    assert serve(ladder, lengths, None, ())[-1] == (699, 699, 1_398)
