"""The eviction of paths that touches keep, compared with a plain list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.prefix_integrity import check_integrity

from warmprefix.prefix.tree import PrefixTree

Path = tuple[int, ...]
Step = tuple[Path, int | None]
"""A served order; or a touched one, with the age that it gives."""

orders = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True).map(tuple)
steps = st.lists(st.tuples(orders, st.sampled_from([None, None, None, 0, 3, 7])), max_size=30)


def lengths(path: Sequence[int]) -> list[int]:
    return [1 + block % 3 for block in path]


class NaiveCache:
    """Each prefix with the last request that used it, and the request up to which the engine keeps it.

    Of two that it keeps as long, the one with the smaller age goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.now = 0
        self.used: dict[Path, int] = {}
        self.due: dict[Path, tuple[int, int]] = {}

    def serve(self, path: Path, age: int = 0) -> int:
        self.now += 1
        held = 0
        for end in range(1, len(path) + 1):
            prefix = path[:end]
            held += prefix in self.used
            self.used[prefix] = self.now
            before = self.due.get(prefix, (0, 0))
            if before[1] == 0 or before[0] < self.now + age:
                self.due[prefix] = self.now + age, age
        while sum(lengths([prefix[-1] for prefix in self.used])) > self.capacity:
            leaves = [prefix for prefix in self.used if all(other[:-1] != prefix for other in self.used)]
            free = [leaf for leaf in leaves if leaf != path[: len(leaf)]]
            goes = min(free or leaves, key=lambda leaf: (self.due[leaf], self.used[leaf]))
            del self.used[goes], self.due[goes]
        return held


@given(steps, st.integers(1, 25))
def test_the_tree_evicts_as_an_engine_with_priorities_does(served: list[Step], capacity: int) -> None:
    tree, naive = PrefixTree[int](capacity), NaiveCache(capacity)
    for path, age in served:
        if age is None:
            assert tree.insert(path, lengths(path)).blocks == naive.serve(path)
        else:
            tree.touch(path, lengths(path), age)
            naive.serve(path, age)
        check_integrity(tree)
        assert tree.resident_tokens <= capacity
        due = [node.used + node.age for node in tree.order]
        assert all(one <= other for one, other in pairwise(due))
        assert {prefix for prefix in naive.used if tree.match_prefix(prefix).blocks == len(prefix)} == {*naive.used}
        assert tree.blocks == len(naive.used)


@given(steps, st.integers(1, 25))
def test_a_copy_evicts_the_same_blocks(served: list[Step], capacity: int) -> None:
    tree = PrefixTree[int](capacity)
    for path, age in served:
        twin = tree.copy()
        for each in (tree, twin):
            if age is None:
                each.insert(path, lengths(path))
            else:
                each.touch(path, lengths(path), age)
            check_integrity(each)
        assert [*twin.resident_paths()] == [*tree.resident_paths()]
        assert [node.hits for node in twin.order] == [node.hits for node in tree.order if node.resident]


def test_hits_are_counted_up_to_a_bound_and_paid_by_touches() -> None:
    tree = PrefixTree[str](100)
    for _ in range(6):
        tree.insert("AB", [10, 10])
    (node,) = tree.order
    assert (node.hits, tree.match_hits("ABC")) == (3, (2, 3))
    tree.touch("A", [10])
    assert [node.hits for node in tree.order] == [3, 2]
    tree.insert("C", [10])
    assert [node.keys for node in tree.order] == [["B"], ["A"], ["C"]]


@given(steps, st.integers(1, 25), st.data())
def test_paths_that_are_touched_at_one_time_stay_in_front_of_their_common_beginning(
    served: list[Step], capacity: int, data: st.DataObject
) -> None:
    tree = PrefixTree[int](capacity)
    for path, age in served:
        tree.insert(path, lengths(path))
        nodes = [node for node in tree.order if node.used < tree.order.now]
        for node in data.draw(st.lists(st.sampled_from(nodes))) if nodes else ():
            tree.touch_node(node, age or 0)
            check_integrity(tree)
        assert not tree.nodes or tree.order.next_leaf().children == {}
