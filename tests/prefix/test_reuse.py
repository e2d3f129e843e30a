"""Reuse distances against an exact model of the least recently used order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prefix_integrity import check_integrity

from warmprefix.prefix import PrefixTree
from warmprefix.residency.capacity import ReuseClock, ReuseTree, StampedTree

paths = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), max_size=40)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=40))
def test_the_clock_equals_a_list_of_requests(window: int, added: list[tuple[int, int]]) -> None:
    clock = ReuseClock(window)
    counts: dict[int, int] = {}
    for tokens, bound in added:
        if (expired := clock.now + 1 - window) in counts:
            clock.add(expired, -counts.pop(expired))
        clock.now += 1
        clock.add(clock.now, tokens)
        counts[clock.now] = tokens
        for request in counts:
            assert clock.used_after(request) == sum(count for other, count in counts.items() if other > request)
        first = clock.first_within(bound)
        assert sum(count for request, count in counts.items() if request >= first) <= bound
        assert first <= clock.now + 1
        earlier = [request for request in counts if request < first and counts[request]]
        assert not earlier or counts[earlier[-1]] + clock.used_after(earlier[-1]) > bound


@pytest.mark.parametrize("capacity", [1, 25, 60, 200])
@given(served=paths)
def test_a_block_is_held_if_its_distance_is_within_the_capacity(capacity: int, served: list[list[int]]) -> None:
    reuse, held = ReuseTree(), PrefixTree[int](capacity)
    for path in served:
        tokens = [10 + key for key in path]
        distances = reuse.visit(["scope", *path]).distances
        assert distances == sorted(distances)
        assert sum(distance <= capacity for distance in distances) == held.match_prefix(path).blocks
        reuse.insert(["scope", *path], [0, *tokens])
        held.insert(path, tokens)
        check_integrity(reuse)


@given(served=paths, max_nodes=st.integers(1, 8), window=st.integers(1, 8))
def test_memory_is_bounded_and_forgotten_paths_leave_no_tokens(
    served: list[list[int]], max_nodes: int, window: int
) -> None:
    reuse = ReuseTree(max_nodes, window)
    for path in served:
        reuse.insert(path, [5] * len(path))
        check_integrity(reuse)
        assert reuse.nodes <= max_nodes
        assert reuse.clock.used_after(reuse.clock.now) == 0
        assert reuse.clock.first_within(reuse.resident_tokens) <= reuse.clock.now - window + 1
        assert reuse.clock.first_within(reuse.resident_tokens - 1) > reuse.clock.now - window + 1


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True))))
def test_trees_with_one_clock_share_a_capacity(served: list[tuple[int, list[int]]]) -> None:
    capacity = 60
    reuse, whole = ReuseTree(), PrefixTree[object](capacity)
    mirrors = [StampedTree[int](reuse.clock) for _ in range(3)]
    for scope, path in served:
        tokens = [10 + key for key in path]
        reuse.insert([f"scope {scope}", *path], [0, *tokens])
        whole.insert([f"scope {scope}", *path], [0, *tokens])
        mirrors[scope].insert(path, tokens)
        for name, mirror in enumerate(mirrors):
            mirror.evict_unused(reuse.clock.first_within(capacity))
            check_integrity(mirror)
            # A mirror evicts the blocks of one request together, so it has no more than the shared cache.
            assert mirror.match_prefix(path).blocks <= max(whole.match_prefix([f"scope {name}", *path]).blocks - 1, 0)
