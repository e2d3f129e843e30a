"""Behaviour that is specific to each ordering policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.served_blocks import as_served

from warmprefix import ContextBlock
from warmprefix.ordering import CoAccessPolicy, OrderingPolicy, PrefixView, RelevancePolicy, SortedPolicy
from warmprefix.prefix.tree import PrefixTree
from warmprefix_baselines import context_index
from warmprefix_baselines.context_index import ContextIndex, ContextIndexPolicy, context_distance
from warmprefix_baselines.policies import FrequencyPolicy, GreedyPolicy, OraclePolicy, RecencyPolicy, greedy_path_of


def blocks(names: Sequence[object]) -> list[ContextBlock]:
    return [ContextBlock(str(name), tokens=100) for name in names]


def keys(names: Sequence[object]) -> list[bytes]:
    return [block.fingerprint for block in blocks(names)]


def tree_of(*served: str) -> PrefixTree[bytes]:
    tree = PrefixTree[bytes]()
    for names in served:
        tree.insert(keys(names), [100] * len(names))
    return tree


def observed(policy: OrderingPolicy, *served: Sequence[object]) -> OrderingPolicy:
    for names in served:
        policy.observe(as_served(blocks(names)))
    return policy


def planned(policy: OrderingPolicy, request: str, *cached: str, after: str = "") -> str:
    order = policy.order(blocks(request), PrefixView(tree_of(*cached), keys(after)))
    return "".join(request[i] for i in order)


# -- relevance, sorted, recency ----------------------------------------------------------------------------------------


def test_relevance_never_reorders() -> None:
    assert planned(observed(RelevancePolicy(), "CBA", "CBA"), "ABC", "CBA") == "ABC"


def test_sorted_gives_each_set_of_blocks_one_order() -> None:
    orders = {planned(SortedPolicy(), "".join(request), "CAB") for request in permutations("ABCD")}
    assert len(orders) == 1
    order = orders.pop()
    assert keys(order) == sorted(keys("ABCD"))
    assert planned(SortedPolicy(), order[::2]) == order[::2], "a subset is in another order"


def test_recency_puts_the_latest_blocks_first_in_served_order() -> None:
    policy = observed(RecencyPolicy(), "AB", "DC")
    assert planned(policy, "XABCDY") == "DCABXY"
    assert planned(observed(policy, "BE"), "XABCDY") == "BDCAXY"


def test_bounds_below_one_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^max_blocks must be 1 or more, got 0$"):
        RecencyPolicy(max_blocks=0)
    with pytest.raises(ValueError, match=r"^promotion_threshold must be 1 or more, got 0$"):
        FrequencyPolicy(promotion_threshold=0)


def test_recency_drops_the_least_recently_served() -> None:
    policy = observed(RecencyPolicy(max_blocks=2), "A", "B", "A", "C")
    assert planned(policy, "XABC") == "CAXB"


# -- frequency ---------------------------------------------------------------------------------------------------------


def test_frequency_breaks_ties_by_relevance() -> None:
    assert planned(observed(FrequencyPolicy(promotion_threshold=9), "AB", "AB", "C"), "CXBA") == "BACX"


def test_frequency_counts_a_sliding_window() -> None:
    policy = observed(FrequencyPolicy(window=2, promotion_threshold=9), "A", "A", "B")
    assert planned(policy, "CBA") == "BAC"
    assert planned(observed(policy, "C"), "ABC") == "BCA"


def test_frequency_follows_a_promoted_prefix_before_more_frequent_blocks() -> None:
    """A, B was promoted; C was more frequent since, but never first."""
    policy = observed(FrequencyPolicy(promotion_threshold=2), "AB", "AB", *["XC"] * 5)
    assert planned(policy, "CBA") == "ABC"


def test_frequency_promotes_only_the_leading_run() -> None:
    policy = FrequencyPolicy(promotion_threshold=2)
    observed(policy, "B", "AB")  # B has reached the threshold, but A in front of it has not
    assert policy._promoted.nodes == 0


# -- greedy and oracle -------------------------------------------------------------------------------------------------


def test_greedy_takes_the_first_resident_child_and_appends_the_rest() -> None:
    assert planned(GreedyPolicy(), "XCBA", "ABC", "AC") == "ACXB"


def test_greedy_continues_behind_placed_blocks() -> None:
    assert planned(GreedyPolicy(), "CB", "ABC", "CB", after="A") == "BC"
    assert planned(GreedyPolicy(), "CB", "BC", after="X") == "CB"


@given(
    cached=st.lists(st.permutations("ABCDEF").map(lambda order: "".join(order[:4])), max_size=8),
    request=st.permutations("ABCDEF").flatmap(lambda order: st.integers(0, 6).map(lambda k: "".join(order[:k]))),
    lengths=st.lists(st.integers(1, 50), min_size=6, max_size=6),
)
def test_oracle_is_the_best_of_all_permutations(cached: list[str], request: str, lengths: list[int]) -> None:
    length = dict(zip("ABCDEF", lengths, strict=True))
    tree = PrefixTree[bytes]()
    for names in cached:
        tree.insert(keys(names), [length[name] for name in names])
    asked = [ContextBlock(name, tokens=length[name]) for name in request]
    view = PrefixView(tree)
    order = OraclePolicy().order(asked, view)
    best = max(view.match_prefix(permutation).tokens for permutation in permutations(asked))
    assert view.match_prefix([asked[i] for i in order]).tokens == best
    rest = list(order[view.match_prefix([asked[i] for i in order]).blocks :])
    assert rest == sorted(rest), "the tail is not in relevance order"


def test_oracle_is_exhaustive_up_to_its_bound_and_budgeted_beyond() -> None:
    """200 paths of one block come first in rank order; the deepest is last."""
    names = [*(f"x{i}" for i in range(200)), "A", "B"]
    tree = tree_of("AB")
    for name in names[:200]:
        tree.insert(keys([name, f"{name} on"]), [100, 1_000])
    view = PrefixView(tree)
    request = [*blocks(names), ContextBlock("heavy", tokens=10_000)]
    assert list(OraclePolicy(max_blocks=203).order(request, view))[:2] == [200, 201]
    assert list(OraclePolicy(max_blocks=202).order(request, view))[:2] == [0, 1]


# -- context-index -----------------------------------------------------------------------------------------------------


def test_context_index_puts_blocks_of_the_best_match_first() -> None:
    policy = observed(ContextIndexPolicy(), "ABCD", "EFGH")
    assert planned(policy, "XDBA") == "ABDX"
    assert planned(policy, "HXFA") == "FHXA"
    assert planned(policy, "XYZ") == "XYZ"


def test_context_index_rejects_weights_and_bounds_out_of_range() -> None:
    for alpha in (0.0, 0.011, float("nan")):
        with pytest.raises(ValueError, match=rf"alpha must be in \[0.001, 0.01\], got {alpha}"):
            ContextIndexPolicy(alpha=alpha)
    with pytest.raises(ValueError, match="max_nodes must be 1 or more, got 0"):
        ContextIndexPolicy(max_nodes=0)


def test_context_index_compares_a_bounded_number_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(a: Sequence[bytes], b: Sequence[bytes], alpha: float) -> float:
        nonlocal compared
        compared += 1
        return context_distance(a, b, alpha)

    monkeypatch.setattr(context_index, "context_distance", counted)
    policy = ContextIndexPolicy()
    for i in range(200):
        policy.observe(as_served(blocks([i, "A", "B"])))
    assert planned(policy, "XBA") == "ABX"
    assert compared <= 8
    assert max(map(len, policy._index._root.recent.values())) <= 16


@given(
    served=st.lists(st.permutations("ABCDE").flatmap(lambda o: st.integers(0, 5).map(lambda k: o[:k])), max_size=25),
    max_nodes=st.integers(1, 6) | st.just(1_000),
    context=st.permutations("ABCDE"),
)
def test_context_index_stays_a_tree_of_prefixes(served: list[list[str]], max_nodes: int, context: list[str]) -> None:
    index = ContextIndex[str](max_nodes=max_nodes)
    for order in served:
        path = index.insert(order)
        node = index._root
        nodes = check_context_index(index)
        assert nodes == index._nodes <= max_nodes
        if max_nodes == 1_000:
            for number in path:
                node = node.children[number]
            assert node.blocks == tuple(order)
        found = index.search(context)
        assert not found.path or set(found.blocks) & set(context)
        assert sorted(index.order(context)) == list(range(5))


def check_context_index(index: ContextIndex[str]) -> int:
    waiting, nodes = [index._root], 0
    while waiting:
        node = waiting.pop()
        recent = {number for numbers in node.recent.values() for number in numbers}
        assert recent <= set(node.children)
        for number, child in node.children.items():
            nodes += 1
            assert child.number == number
            assert child.parent is node
            assert child.blocks[: len(node.blocks)] == node.blocks
            assert len(child.blocks) > len(node.blocks)
            assert node.child_at(child.blocks[len(node.blocks)]) is child
            assert child.children or child in index._served
            waiting.append(child)
    assert all(served.parent is not None for served in index._served)
    return nodes


# -- coaccess ----------------------------------------------------------------------------------------------------------


def by_requests(window: int = 1_000) -> CoAccessPolicy:
    """One similar request outweighs any rank."""
    return CoAccessPolicy(window, trust=0.001)


def test_coaccess_keeps_a_cold_request_in_relevance_order() -> None:
    assert planned(CoAccessPolicy(), "CAB") == "CAB"
    assert planned(observed(by_requests(), "XY", "YZ"), "CAB", "XYZ") == "CAB"


def test_coaccess_begins_with_the_deepest_resident_path() -> None:
    policy = observed(by_requests(), *["B"] * 9)
    assert planned(policy, "BXAC", "B", "ACX") == "ACXB"
    assert planned(policy, "BCA", "XAC", "B", after="X") == "ACB"


def test_coaccess_groups_blocks_that_were_requested_together() -> None:
    policy = observed(by_requests(), "AB", "AB", "AB", "CD", "CD")
    assert planned(policy, "DACB") == "ABDC"
    assert planned(policy, "DXC") == "DCX"


def test_coaccess_counts_only_requests_that_hold_all_placed_blocks() -> None:
    """B is frequent, but was never requested with A, which is resident."""
    policy = observed(by_requests(), "AC", *["B"] * 5)
    assert planned(policy, "ABC", "A") == "ACB"


def test_coaccess_weighs_requests_by_shared_blocks() -> None:
    """Each of the two shares a third as many blocks as the one does."""
    policy = observed(by_requests(), "BCD", "AX", "AY")
    assert planned(policy, "ABCD") == "BCDA"
    assert planned(observed(policy, "AZ", "AW"), "ABCD") == "ABCD"


def test_coaccess_ignores_requests_that_share_less_than_a_third_of_the_most() -> None:
    assert planned(observed(by_requests(), "BCDE", *["A"] * 9), "ABCDE") == "BCDEA"
    assert planned(observed(by_requests(), "BCD", *["A"] * 9), "ABCD") == "ABCD"


def test_coaccess_puts_the_longer_of_equally_likely_blocks_first() -> None:
    policy = observed(CoAccessPolicy(), "ABC")
    request = [ContextBlock("A", tokens=100), ContextBlock("B", tokens=5_000), ContextBlock("X", tokens=100)]
    assert list(policy.order(request, PrefixView(PrefixTree[bytes]()))) == [1, 0, 2]


def test_coaccess_breaks_ties_by_rank() -> None:
    policy = observed(CoAccessPolicy(), "ABC", "ABC")
    for request in permutations("ABC"):
        assert planned(policy, "".join(request)) == "".join(request)


def test_coaccess_follows_rank_with_few_requests_and_requests_with_many() -> None:
    assert planned(observed(CoAccessPolicy(trust=50), "D", "C", "B", "A", "X"), "ABCD") == "ABCD"
    assert planned(observed(CoAccessPolicy(trust=50), *["D"] * 100), "ABCD") == "DABC"


def test_coaccess_learns_which_ranks_recur() -> None:
    """Only the last blocks recur, so the last comes first though no request holds it."""
    policy = CoAccessPolicy()
    for i in range(300):
        policy.observe(as_served(blocks([f"x{i}", f"y{i}", f"z{i}", "A", "B"])))
    assert planned(observed(policy, "UVSTQ"), "WVPRO") == "OWVPR"


def test_coaccess_forgets_requests_outside_the_window() -> None:
    policy = observed(by_requests(window=3), "B", "X", "Y")
    assert planned(policy, "AB") == "BA"
    assert planned(observed(policy, "Z"), "AB") == "AB"


def test_coaccess_orders_later_places_by_one_estimate() -> None:
    """Each of a hundred blocks is requested once more than the one ranked before it."""
    policy = by_requests()
    for start in range(66):  # each shares at least a third
        policy.observe(as_served(blocks(range(start, 100))))
    order = list(policy.order(blocks(range(100)), PrefixView(PrefixTree[bytes]())))
    assert order[:35] == [65, 66, 67, 68, *range(69, 100)], "all requests hold these"
    assert order[35:] == list(range(64, -1, -1))


@pytest.mark.parametrize("trust", [0, -1, float("nan")])
def test_coaccess_refuses_trust_of_zero_or_less(trust: float) -> None:
    with pytest.raises(ValueError, match=f"trust must be above 0, got {trust}"):
        CoAccessPolicy(trust=trust)


# -- PrefixView --------------------------------------------------------------------------------------------------------


def test_view_starts_behind_placed_blocks() -> None:
    view = PrefixView(tree_of("ABC"), keys("A"))
    assert view.match_prefix(blocks("BCX")) == (2, 200)
    assert view.match_prefix(blocks("C")) == (0, 0)
    assert view.deepest_path(blocks("XCB")) == [2, 1]
    assert greedy_path_of(view, blocks("XCB")) == [2, 1]


def test_nothing_matches_behind_blocks_that_are_not_resident() -> None:
    view = PrefixView(tree_of("ABC"), keys("AX"))
    assert view.match_prefix(blocks("BC")) == (0, 0)
    assert view.deepest_path(blocks("BC")) == greedy_path_of(view, blocks("BC")) == []
