"""Worked examples of the policies' papers, with the papers' names for blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.served_blocks import as_served

from warmprefix import ContextBlock
from warmprefix.ordering import CoAccessPolicy, OrderingPolicy, PrefixView, RelevancePolicy
from warmprefix.prefix.tree import PrefixTree
from warmprefix_baselines.context_index import ContextIndex, ContextIndexPolicy, context_distance
from warmprefix_baselines.policies import FrequencyPolicy, GreedyPolicy, OraclePolicy

Names = Sequence[str | int]


def blocks(names: Names) -> list[ContextBlock]:
    return [ContextBlock(str(name), tokens=100) for name in names]


def planned(policy: OrderingPolicy, request: Names, tree: PrefixTree[bytes] | None = None) -> list[str | int]:
    view = PrefixView(PrefixTree[bytes]() if tree is None else tree)
    return [request[i] for i in policy.order(blocks(request), view)]


def insert(tree: PrefixTree[bytes], served: Names) -> int:
    """Return the number of blocks that were resident before."""
    return tree.insert([block.fingerprint for block in blocks(served)], [100] * len(served)).blocks


# -- ContextPilot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        # ContextPilot's worked example.
        ([3, 5, 1, 7], [2, 6, 3, 5], 0.502),
        ([2, 6, 3, 5], [3, 5, 8, 9], 0.502),
        ([2, 6, 3, 5], [2, 6, 4, 0], 0.5),
        ([3, 5, 1, 7], [3, 5, 8, 9], 0.5),
        ([3, 5, 1, 7], [2, 6, 4, 0], 1.0),
        # Derived from Eq. 1.
        ([1, 2, 3], [3, 2, 1], 0.0013333333),
        ([1, 2, 3, 4], [3, 4, 5, 6], 0.502),
        ([2, 1, 3], [2, 6, 1], 0.3338333333),
        ([2, 1, 3], [4, 1, 0], 0.6666666667),
        ([1, 2], [], 1.0),
        ([1, 2], [3, 4], 1.0),
        ([1, 2, 3], [1, 2, 3], 0.0),
        ([], [], 1.0),
    ],
)
def test_context_distance_of_worked_examples(a: list[int], b: list[int], distance: float) -> None:
    assert context_distance(a, b) == pytest.approx(distance, abs=1e-6)
    assert context_distance(b, a) == pytest.approx(distance, abs=1e-6)


def test_context_distance_weighs_positions_by_alpha() -> None:
    assert context_distance([1, 2, 3], [3, 2, 1], alpha=0.01) == pytest.approx(0.04 / 3)


BUILT = {(2, 1, 3): [1, 2, 3], (2, 6, 1): [1, 2, 6], (4, 1, 0): [1, 4, 0]}
"""The contexts of ContextPilot's worked example of the index, and their planned orders."""


def built_index() -> ContextIndex[int]:
    index = ContextIndex[int]()
    for order in BUILT.values():
        index.insert(order)
    return index


def test_context_index_holds_shared_prefixes_as_inner_nodes() -> None:
    inner: set[tuple[int, ...]] = set()
    leaves: set[tuple[int, ...]] = set()
    waiting = [built_index()._root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        if node.parent is not None:
            (inner if node.children else leaves).add(node.blocks)
    assert inner == {(1, 2), (1,)}
    assert leaves == set(map(tuple, BUILT.values()))


@pytest.mark.parametrize(("context", "order"), BUILT.items())
def test_context_index_orders_the_contexts_that_it_holds(context: tuple[int, ...], order: list[int]) -> None:
    assert [context[i] for i in built_index().order(context)] == order


def test_context_index_online() -> None:
    """ContextPilot, Alg. 1 and 2, with the contexts C6, C7 and C8 of figure 7."""
    index = built_index()
    found = index.search([2, 1, 4])
    assert (found.blocks, found.path) == ((1, 2), (0, 0))
    for context, order, search_path in (
        ([2, 1, 4], [1, 2, 4], (0, 0, 2)),
        ([5, 7, 8], [5, 7, 8], (1,)),
        ([1, 2, 9], [1, 2, 9], (0, 0, 3)),
    ):
        assert [context[i] for i in index.order(context)] == order
        assert index.insert(order) == search_path


def test_context_index_policy_gives_the_same_order() -> None:
    policy = ContextIndexPolicy()
    for order in BUILT.values():
        policy.observe(as_served(blocks(order)))
    for context, order in (([2, 1, 4], [1, 2, 4]), ([5, 7, 8], [5, 7, 8]), ([1, 2, 9], [1, 2, 9])):
        assert planned(policy, context) == order
        policy.observe(as_served(blocks(order)))


# -- CRAFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [2, 100])
def test_craft_orders_by_frequency(threshold: int) -> None:
    """The counts of the blocks 2, 3 and 1 are 5, 4 and 1."""
    policy = FrequencyPolicy(promotion_threshold=threshold)
    for request in ([2, 3], [2, 3], [2, 3], [2, 3], [2, 1]):
        policy.observe(as_served(blocks(request)))
    assert planned(policy, [1, 2, 3]) == [2, 3, 1]


def test_craft_promotes_blocks_that_reach_the_threshold() -> None:
    """CRAFT's access table and prefix tree over three requests, threshold 2."""
    policy = FrequencyPolicy(promotion_threshold=2)
    policy.observe(as_served(blocks([1, 2])))
    for request, reused, promoted, counts in (
        ([1, 2, 5], 0, [1, 2], {1: 2, 2: 2, 5: 1}),
        ([1, 2, 6], 2, [1, 2], {1: 3, 2: 3, 5: 1, 6: 1}),
        ([1, 2, 6], 2, [1, 2, 6], {1: 4, 2: 4, 5: 1, 6: 2}),
    ):
        order = planned(policy, request)
        assert order == request
        assert promoted_prefix(policy, order) == reused
        policy.observe(as_served(blocks(order)))
        assert promoted_prefix(policy, promoted) == len(promoted)
        assert policy._promoted.resident_tokens == 100 * len(promoted), "more was promoted"
        assert {name: policy._window.count(blocks([name])[0].fingerprint) for name in counts} == counts


def test_craft_reuses_part_of_a_promoted_prefix() -> None:
    """Prefix slicing."""
    policy = FrequencyPolicy(promotion_threshold=2)
    for _ in range(2):
        policy.observe(as_served(blocks([1, 2, 3])))
    assert promoted_prefix(policy, [1, 10, 11]) == 1
    assert planned(policy, [10, 11, 1]) == planned(policy, [1, 10, 11]) == [1, 10, 11]


def promoted_prefix(policy: FrequencyPolicy, names: Names) -> int:
    return policy._promoted.match_prefix([block.fingerprint for block in blocks(names)]).blocks


# -- CacheWeaver -------------------------------------------------------------------------------------------------------


def test_cacheweaver_walks_cached_children_and_appends_the_rest() -> None:
    """Alg. 1. F was cached and has been evicted."""
    tree = PrefixTree[bytes]()
    insert(tree, "F")
    insert(tree, "ABCD")
    assert tree.evict(100) == 100
    assert planned(GreedyPolicy(), "ABCFD", tree) == list("ABCDF")


def test_cacheweaver_skips_evicted_blocks() -> None:
    tree = PrefixTree[bytes]()
    insert(tree, "F")
    insert(tree, "ABCD")
    tree.mark_stale([blocks("F")[0].fingerprint])
    assert planned(GreedyPolicy(), "FABCD", tree) == list("ABCDF")


@pytest.mark.parametrize(
    ("policy", "order"), [(GreedyPolicy(), "BAC"), (OraclePolicy(), "ABC"), (CoAccessPolicy(), "ABC")]
)
def test_greedy_walk_can_miss_the_deepest_path(policy: OrderingPolicy, order: str) -> None:
    tree = PrefixTree[bytes]()
    insert(tree, "BX")
    insert(tree, "ABC")
    assert planned(policy, "BAC", tree) == list(order)


# -- the myopic trap ---------------------------------------------------------------------------------------------------


def reused_blocks(policy: OrderingPolicy, requests: int = 6) -> list[int]:
    """Return the reuse of each request `[x, x', x'', A, B]` with new x."""
    tree = PrefixTree[bytes]()
    reused: list[int] = []
    for i in range(requests):
        order = planned(policy, [f"x{3 * i + 1}", f"x{3 * i + 2}", f"x{3 * i + 3}", "A", "B"], tree)
        reused.append(insert(tree, order))
        policy.observe(as_served(blocks(order)))
    return reused


@pytest.mark.parametrize("policy", [RelevancePolicy(), GreedyPolicy(), OraclePolicy()])
def test_policy_with_a_tail_in_relevance_order_never_hits(policy: OrderingPolicy) -> None:
    assert reused_blocks(policy) == [0] * 6


@pytest.mark.parametrize("policy", [CoAccessPolicy(), FrequencyPolicy(), ContextIndexPolicy()])
def test_policy_that_looks_ahead_hits_from_the_third_request(policy: OrderingPolicy) -> None:
    assert reused_blocks(policy) == [0, 0, 2, 2, 2, 2]
