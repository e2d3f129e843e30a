"""`PrefixTree` by example, and compared with a plain list of prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.prefix_integrity import check_integrity

import warmprefix.prefix.tree
from warmprefix.prefix.eviction import TreeNode
from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree
from warmprefix_baselines.policies import greedy_path

LENGTHS = {"A": 3, "B": 5, "C": 1, "D": 0, "E": 8, "F": 2}
"""Tokens of the blocks of the random tests; one has none."""

Path = tuple[str, ...]


def lengths(keys: Sequence[str]) -> list[int]:
    return [LENGTHS.get(key, 10) for key in keys]


def tree_of(*served: str, stale: Sequence[str] = ()) -> PrefixTree[str]:
    tree = PrefixTree[str]()
    for keys in served:
        tree.insert(keys, lengths(keys))
    for keys in stale:
        tree.mark_stale(keys)
    check_integrity(tree)
    return tree


def picked(keys: str, indices: Sequence[int]) -> str:
    return "".join(keys[i] for i in indices)


# -- match_prefix and insert ---------------------------------------------------------------------------------------


def test_empty_tree_matches_nothing() -> None:
    tree = PrefixTree[str]()
    assert tree.match_prefix("ABC") == PrefixMatch(0, 0)
    assert tree.deepest_path("ABC") == greedy_path(tree, "ABC") == []
    assert (tree.nodes, tree.resident_tokens) == (0, 0)


def test_served_order_matches_its_prefix() -> None:
    tree = tree_of("ABC")
    assert tree.match_prefix("ABC") == PrefixMatch(3, 9)
    assert tree.match_prefix("ABX") == PrefixMatch(2, 8)
    assert tree.match_prefix("ABCX") == PrefixMatch(3, 9)
    assert tree.match_prefix("BAC") == PrefixMatch(0, 0)


def test_a_path_is_set_with_its_checkpoints() -> None:
    tree = tree_of("ABCDE", "ABX")
    assert tree.match_junction("ABCDE").blocks == 2
    tree.set_path("ABCD", 3, [1, 3])
    check_integrity(tree)
    assert [tree.match_junction("ABCDE"[:end]).blocks for end in range(6)] == [0, 1, 1, 3, 3, 3]
    assert tree.match_prefix("ABCDE").blocks == 3
    assert tree.match_junction("ABX").blocks == 1
    tree.set_path("ABCDE", 5, [])
    assert tree.match_junction("ABCDE").blocks == 0
    tree.set_path("AB", 2)
    assert tree.match_prefix("ABCDE").blocks == 5
    check_integrity(tree)


def test_insert_returns_the_resident_part_before() -> None:
    tree = tree_of("ABC")
    assert tree.insert("ABD", [3, 5, 0]) == PrefixMatch(2, 8)
    assert tree.insert("ABD", [3, 5, 0]) == PrefixMatch(3, 8)


def test_empty_order_changes_nothing() -> None:
    tree = tree_of("AB")
    assert tree.insert([], []) == PrefixMatch(0, 0)
    assert (tree.nodes, tree.resident_tokens) == (1, 8)


def test_request_without_shared_blocks_costs_one_node() -> None:
    assert tree_of("ABC", "DEF").nodes == 2


def test_edge_is_split_where_orders_differ() -> None:
    tree = tree_of("ABC", "ABD")
    assert tree.nodes == 3
    assert tree.match_prefix("ABC").blocks == tree.match_prefix("ABD").blocks == 3


def test_block_on_the_path_keeps_its_first_length() -> None:
    tree = PrefixTree[str]()
    tree.insert("AB", [10, 10])
    tree.insert("ABC", [99, 99, 1])
    assert tree.match_prefix("ABC") == PrefixMatch(3, 21)


@pytest.mark.parametrize(("keys", "tokens"), [("AA", [1, 1]), ("AB", [1]), ("A", [1, 1])])
def test_insert_rejects_repeated_blocks_and_missing_lengths(keys: str, tokens: list[int]) -> None:
    tree = tree_of("AB")
    with pytest.raises(ValueError, match=rf"keys must be distinct .* {len(keys)} keys .* and {len(tokens)} lengths$"):
        tree.insert(keys, tokens)
    assert tree.match_prefix("AB").blocks == 2
    check_integrity(tree)


@pytest.mark.parametrize("value", [0, -1])
def test_bounds_below_one_are_rejected(value: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_tokens must be 1 or more, or None, got {value}"):
        PrefixTree[str](capacity_tokens=value)
    with pytest.raises(ValueError, match=f"max_nodes must be 1 or more, got {value}"):
        PrefixTree[str](max_nodes=value)


def test_clear_removes_everything() -> None:
    tree = tree_of("ABC", "ABD", "E")
    tree.clear()
    check_integrity(tree)
    assert (tree.nodes, tree.resident_tokens) == (0, 0)
    assert tree.match_prefix("ABC") == PrefixMatch(0, 0)


# -- eviction ------------------------------------------------------------------------------------------------------


def test_tail_of_the_least_recently_served_path_is_evicted_first() -> None:
    tree = tree_of("ABC", "EF")
    assert tree.evict(1) == 1
    assert tree.match_prefix("ABC").blocks == 2
    assert tree.match_prefix("EF").blocks == 2


def test_path_served_again_is_kept() -> None:
    tree = tree_of("ABC", "EF", "ABC")
    tree.evict(2)
    assert tree.match_prefix("ABC").blocks == 3
    assert tree.match_prefix("EF").blocks == 1


def test_shared_prefix_is_evicted_after_its_branches() -> None:
    tree = tree_of("AB", "AE", "F")
    tree.evict(LENGTHS["B"] + LENGTHS["E"])
    assert tree.match_prefix("AB").blocks == tree.match_prefix("AE").blocks == 1


def test_evict_frees_whole_blocks_and_returns_their_tokens() -> None:
    tree = tree_of("EB")
    assert tree.evict(1) == 5
    assert tree.evict(0) == 0
    assert tree.evict(1_000) == 8
    assert tree.evict(1) == 0


def test_capacity_holds_after_every_insert() -> None:
    tree = PrefixTree[str](capacity_tokens=10)
    tree.insert("ABC", lengths("ABC"))
    tree.insert("EF", lengths("EF"))
    check_integrity(tree)
    assert tree.resident_tokens <= 10
    assert tree.match_prefix("EF").blocks == 2


def test_order_larger_than_the_capacity_keeps_its_beginning() -> None:
    tree = PrefixTree[str](capacity_tokens=8)
    tree.insert("ABE", lengths("ABE"))
    assert tree.match_prefix("ABE") == PrefixMatch(2, 8)


def test_nodes_are_bounded() -> None:
    tree = PrefixTree[int](max_nodes=3)
    for i in range(10):
        tree.insert([i, i + 100], [1, 1])
        check_integrity(tree)
    assert tree.nodes == 3
    assert tree.match_prefix([9, 109]).blocks == 2
    assert tree.match_prefix([0]).blocks == 0


# -- corrections by the engine -------------------------------------------------------------------------------------


def test_stale_path_matches_only_its_resident_blocks() -> None:
    tree = tree_of("ABC", "ABD", "AE")
    tree.mark_stale("ABC", resident_blocks=1)
    check_integrity(tree)
    assert tree.match_prefix("ABC").blocks == tree.match_prefix("ABD").blocks == 1
    assert tree.match_prefix("AE").blocks == 2


def test_stale_path_stays_and_can_be_marked_resident_again() -> None:
    tree = tree_of("ABC", stale=["ABC"])
    assert tree.resident_tokens == 0
    assert tree.mark_resident("AB") == 2
    check_integrity(tree)
    assert tree.match_prefix("ABC") == PrefixMatch(2, 8)


def test_mark_resident_returns_the_marked_blocks_and_adds_none() -> None:
    tree = tree_of("AB")
    assert tree.mark_resident("ABC") == 2
    assert tree.mark_resident("X") == 0
    assert (tree.nodes, tree.resident_tokens) == (1, 8)


def test_mark_resident_stops_where_the_path_leaves_an_edge() -> None:
    """The edge is A, B, C with X below: `ABX` follows two of its blocks."""
    tree = tree_of("ABCX", "ABC", stale=["ABC"])
    assert tree.mark_resident("ABX") == 2
    check_integrity(tree)
    assert tree.match_prefix("ABCX").blocks == 2


def test_mark_resident_does_not_make_a_path_more_recent() -> None:
    tree = tree_of("A", "B")
    tree.mark_resident("A")
    tree.evict(1)
    assert tree.match_prefix("A").blocks == 0
    assert tree.match_prefix("B").blocks == 1


def test_served_stale_path_is_resident_again_and_others_are_not() -> None:
    tree = tree_of("ABC", "ABD", stale=["A"])
    assert tree.insert("ABC", lengths("ABC")) == PrefixMatch(0, 0)
    check_integrity(tree)
    assert tree.match_prefix("ABC").blocks == 3
    assert tree.match_prefix("ABD").blocks == 2


def test_marking_an_absent_path_changes_nothing() -> None:
    tree = tree_of("AB")
    tree.mark_stale("XY")
    tree.mark_stale("AB", resident_blocks=2)
    assert tree.match_prefix("AB").blocks == 2


# -- paths ---------------------------------------------------------------------------------------------------------


def test_deepest_path_need_not_be_the_first_child() -> None:
    tree = tree_of("BX", "ABC")
    assert picked("BAC", tree.deepest_path("BAC")) == "ABC"
    assert picked("BAC", greedy_path(tree, "BAC")) == "B"


def test_deepest_path_may_end_within_an_edge() -> None:
    tree = tree_of("ABCX")
    assert picked("CBA", tree.deepest_path("CBA")) == "ABC"
    assert picked("BA", tree.deepest_path("BA")) == "AB"
    assert picked("BA", greedy_path(tree, "BA")) == "AB"


def test_depth_is_measured_in_tokens_not_blocks() -> None:
    tree = tree_of("ACF", "EX")
    assert picked("ACFE", tree.deepest_path("ACFE")) == "E"


def test_more_relevant_of_two_equal_paths_wins() -> None:
    tree = tree_of("BA", "AB")
    assert picked("AB", tree.deepest_path("AB")) == "AB"
    assert picked("BA", tree.deepest_path("BA")) == "BA"


def test_paths_continue_behind_placed_blocks() -> None:
    tree = tree_of("ABC", "CB")
    assert picked("CB", tree.deepest_path("CB", after="A")) == "BC"
    assert picked("CB", greedy_path(tree, "CB", after="A")) == "BC"
    assert picked("C", tree.deepest_path("C", after="AB")) == "C"
    assert tree.deepest_path("AB", after="C") == [1]


def test_no_path_follows_blocks_that_are_not_resident() -> None:
    tree = tree_of("ABC", stale=["ABC"])
    assert tree.deepest_path("BC", after="A") == []
    assert greedy_path(tree, "BC", after="A") == []
    assert tree_of("ABC").deepest_path("C", after="AX") == []
    assert tree_of("AB").deepest_path("C", after="ABX") == []


def test_stale_edges_are_not_followed() -> None:
    tree = tree_of("AB", "AC")
    tree.mark_stale("AB", resident_blocks=1)
    assert picked("BCA", tree.deepest_path("BCA")) == "AC"
    assert picked("BCA", greedy_path(tree, "BCA")) == "AC"


def test_budget_of_zero_gives_no_path() -> None:
    assert tree_of("A").deepest_path("A", budget=0) == []


# -- scale ---------------------------------------------------------------------------------------------------------


def test_disjoint_contexts_cost_one_node_each() -> None:
    tree = PrefixTree[int]()
    for i in range(1_100):
        keys = range(15 * i, 15 * i + 15)
        assert tree.insert(keys, [1] * 15).blocks == 0
    check_integrity(tree)
    assert (tree.nodes, tree.resident_tokens) == (1_100, 1_100 * 15)


def test_one_block_shared_by_thousands_of_requests() -> None:
    tree = PrefixTree[int]()
    for i in range(1, 5_001):
        tree.insert([0, i], [1, 1])
    check_integrity(tree)
    assert tree.nodes == 5_001
    assert tree.deepest_path([4_711, 0]) == [1, 0]
    assert greedy_path(tree, [4_711, 0]) == [1, 0]


def test_repeated_request_adds_nothing() -> None:
    tree = tree_of("ABC")
    for _ in range(10_000):
        assert tree.insert("ABC", [3, 5, 1]).blocks == 3
    check_integrity(tree)
    assert (tree.nodes, tree.resident_tokens) == (1, 9)


def test_path_of_thousands_of_blocks() -> None:
    tree = PrefixTree[int]()
    keys = list(range(5_000))
    tree.insert(keys, [1] * 5_000)
    assert tree.match_prefix(keys) == PrefixMatch(5_000, 5_000)
    assert tree.deepest_path(keys[::-1]) == keys[::-1]
    assert greedy_path(tree, keys) == keys
    tree.mark_stale(keys, resident_blocks=2_500)
    assert tree.mark_resident(keys[:4_000]) == 4_000
    assert tree.evict(3_000) == 3_000
    check_integrity(tree)


def test_thousands_of_nested_nodes() -> None:
    """Deeper than the interpreter's recursion limit."""
    tree = PrefixTree[int]()
    keys = list(range(1_500))
    for end in range(1_500, 0, -1):
        tree.insert(keys[:end], [1] * end)
    assert tree.nodes == 1_500
    assert tree.deepest_path(keys, budget=None) == keys
    assert greedy_path(tree, keys) == keys
    tree.mark_stale(keys)
    assert tree.mark_resident(keys) == 1_500
    assert tree.evict(1_000) == 1_000
    check_integrity(tree)


def test_search_keeps_to_its_budget_if_no_subtree_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 5,040 orders could lead to more tokens; only the budget ends the search."""
    tree = PrefixTree[int]()
    for order in permutations(range(7)):
        tree.insert([*order, 100], [1] * 7 + [1_000])
    keys = [*range(7), 200]
    walked = 0
    ranks_of_children = warmprefix.prefix.tree.ranks_of_children

    def counted(*args: object) -> list[int]:
        nonlocal walked
        walked += 1
        return ranks_of_children(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(warmprefix.prefix.tree, "ranks_of_children", counted)
    assert tree.deepest_path(keys, budget=None) == list(range(7))
    assert walked > 3_000
    for budget in (1, 10, SEARCH_BUDGET, 1_000):
        walked = 0
        path = tree.deepest_path(keys, budget=budget)
        assert walked <= budget
        assert tree.match_prefix([keys[i] for i in path]).blocks == len(path)


# -- random trees --------------------------------------------------------------------------------------------------

orders = st.permutations("ABCDEF").flatmap(lambda order: st.integers(0, 6).map(lambda end: tuple(order[:end])))
trees = st.builds(
    lambda served, stale: tree_of(*map("".join, served), stale=[*map("".join, stale)]),
    st.lists(orders, max_size=12),
    st.lists(orders.map(lambda order: order[:2]), max_size=2),
)


@given(tree=trees, keys=orders, placed=st.integers(0, 2))
def test_deepest_path_is_the_best_of_all_permutations(tree: PrefixTree[str], keys: Path, placed: int) -> None:
    after, keys = keys[:placed], keys[placed:]
    path = [keys[i] for i in tree.deepest_path(keys, after, budget=None)]
    front = tree.match_prefix(after)
    if front.blocks < len(after):
        assert path == []
    else:
        best = max(tree.match_prefix((*after, *order)).tokens for order in permutations(keys))
        assert tree.match_prefix((*after, *path)).tokens == best
        assert tree.match_prefix((*after, *path)).blocks == len(after) + len(path)
        assert sum(lengths(path)) == best - front.tokens


@given(tree=trees, keys=st.permutations("ABCEF"))
def test_ties_go_to_the_first_path_in_rank_order(tree: PrefixTree[str], keys: list[str]) -> None:
    resident = {order[: tree.match_prefix([keys[i] for i in order]).blocks] for order in permutations(range(5))}
    tokens = {order: sum(LENGTHS[keys[i]] for i in order) for order in resident}
    best = min(order for order, total in tokens.items() if total == max(tokens.values()))
    assert tuple(tree.deepest_path(keys, budget=None)) == best


@given(tree=trees, keys=orders, budget=st.integers(0, 8))
def test_path_within_a_budget_is_resident_and_may_be_shorter(tree: PrefixTree[str], keys: Path, budget: int) -> None:
    exact = [keys[i] for i in tree.deepest_path(keys, budget=None)]
    path = [keys[i] for i in tree.deepest_path(keys, budget=budget)]
    assert len(set(path)) == len(path)
    assert tree.match_prefix(path).blocks == len(path)
    assert sum(lengths(path)) <= sum(lengths(exact))


@given(tree=trees, keys=orders, placed=st.integers(0, 2))
def test_greedy_path_takes_the_first_resident_child(tree: PrefixTree[str], keys: Path, placed: int) -> None:
    after, keys = keys[:placed], keys[placed:]
    expected: list[str] = []
    if tree.match_prefix(after).blocks == len(after):
        while True:
            front = (*after, *expected)
            children = [key for key in keys if key not in front and follows(tree, front, key)]
            if not children:
                break
            expected.append(children[0])
    assert [keys[i] for i in greedy_path(tree, keys, after)] == expected


def follows(tree: PrefixTree[str], front: Sequence[str], key: str) -> bool:
    return tree.match_prefix((*front, key)).blocks == len(front) + 1


@given(tree=trees, keys=orders)
def test_reading_changes_nothing(tree: PrefixTree[str], keys: Path) -> None:
    before = ring(tree), edges(tree)
    tree.match_prefix(keys)
    tree.deepest_path(keys)
    tree.deepest_path(keys[2:], after=keys[:2], budget=None)
    greedy_path(tree, keys)
    assert (ring(tree), edges(tree)) == before


# -- comparison with a model ---------------------------------------------------------------------------------------


def ring(tree: PrefixTree[str]) -> list[tuple[Path, bool]]:
    """Return the paths, the next to evict first, each with its last block's residency."""
    listed: list[tuple[Path, bool]] = []
    for node in tree.order:
        path = path_to(node)
        listed += [(path[:end], node.resident) for end in range(len(path), len(path) - len(node.keys), -1)]
    return listed


def edges(tree: PrefixTree[str]) -> set[Path]:
    """The paths whose last block begins an edge."""
    return {path_to(node)[: 1 - len(node.keys) or None] for node in tree.order}


def path_to(node: TreeNode[str]) -> Path:
    runs = [node.keys]
    while node.parent is not None:
        node = node.parent
        runs.append(node.keys)
    return tuple(key for run in reversed(runs) for key in run)


class NaiveTree:
    """Prefixes of all served orders in one list, the next to evict first; no nodes."""

    def __init__(self, capacity_tokens: int | None, max_nodes: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.max_nodes = max_nodes
        self.paths: list[Path] = []
        self.resident: set[Path] = set()
        self.begins_edge: set[Path] = set()

    def match(self, keys: Path) -> int:
        return self._longest(keys, self.resident)

    def insert(self, keys: Path) -> None:
        length = self._longest(keys, self.paths)
        self._cut(keys[:length])
        if length < len(keys):
            self.begins_edge.add(keys[: length + 1])
        prefixes = [keys[:end] for end in range(len(keys), 0, -1)]
        self.paths = [path for path in self.paths if path not in prefixes] + prefixes
        self.resident.update(prefixes)
        self._fit()

    def mark_resident(self, keys: Path) -> int:
        length = self._longest(keys, self.paths)
        if keys[:length] not in self.resident:
            self._cut(keys[:length])
        self.resident.update(keys[:end] for end in range(1, length + 1))
        self._fit()
        return length

    def mark_stale(self, keys: Path, resident_blocks: int) -> None:
        if self._longest(keys, self.paths) > resident_blocks:
            beyond = keys[: resident_blocks + 1]
            self.begins_edge.add(beyond)
            self.resident = {path for path in self.resident if path[: len(beyond)] != beyond}
        self._fit()

    def evict(self, tokens: int) -> int:
        freed = 0
        while freed < tokens and self.tokens:
            freed += self._pop()
        return freed

    @property
    def tokens(self) -> int:
        return sum(LENGTHS[path[-1]] for path in self.resident)

    def _fit(self) -> None:
        while self.capacity_tokens is not None and self.tokens > self.capacity_tokens:
            self._pop()
        while len(self.begins_edge) > self.max_nodes:
            self._pop()

    def _pop(self) -> int:
        path = self.paths.pop(0)
        tokens = LENGTHS[path[-1]] if path in self.resident else 0
        self.resident.discard(path)
        self.begins_edge.discard(path)
        return tokens

    def _cut(self, path: Path) -> None:
        """Split the edge at the end of `path`."""
        if path:
            self.begins_edge.update(below for below in self.paths if below[:-1] == path)

    @staticmethod
    def _longest(keys: Path, paths: set[Path] | list[Path]) -> int:
        return max((end for end in range(1, len(keys) + 1) if keys[:end] in paths), default=0)


few_orders = st.permutations("ABCD").flatmap(lambda order: st.integers(0, 4).map(lambda end: tuple(order[:end])))
"""Orders of few blocks, so that they often meet."""


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize(capacity=st.none() | st.integers(1, 30), max_nodes=st.integers(1, 8) | st.just(10_000))
    def start(self, capacity: int | None, max_nodes: int) -> None:
        self.tree = PrefixTree[str](capacity, max_nodes)
        self.model = NaiveTree(capacity, max_nodes)

    @rule(keys=few_orders)
    def insert(self, keys: Path) -> None:
        before = self.model.match(keys)
        self.model.insert(keys)
        assert self.tree.insert(keys, lengths(keys)) == PrefixMatch(before, sum(lengths(keys[:before])))

    @rule(tokens=st.integers(0, 20))
    def evict(self, tokens: int) -> None:
        assert self.tree.evict(tokens) == self.model.evict(tokens)

    @rule(keys=few_orders, resident_blocks=st.integers(0, 3))
    def mark_stale(self, keys: Path, resident_blocks: int) -> None:
        self.tree.mark_stale(keys, resident_blocks)
        self.model.mark_stale(keys, resident_blocks)

    @rule(keys=few_orders)
    def mark_resident(self, keys: Path) -> None:
        assert self.tree.mark_resident(keys) == self.model.mark_resident(keys)

    @precondition(lambda self: len(self.model.paths) > 20)
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.model = NaiveTree(self.model.capacity_tokens, self.model.max_nodes)

    @rule(keys=few_orders)
    def match(self, keys: Path) -> None:
        blocks = self.model.match(keys)
        assert self.tree.match_prefix(keys) == PrefixMatch(blocks, sum(lengths(keys[:blocks])))

    @rule()
    def copy(self) -> None:
        copied, again = self.tree.copy(), PrefixTree[str](self.tree.capacity_tokens, 10_000)
        for keys, tokens in self.tree.resident_paths():
            again.insert(keys, tokens)
        for other in (copied, again):
            check_integrity(other)
            assert ring(other) == [(path, True) for path in self.model.paths if path in self.model.resident]

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "tree"):
            check_integrity(self.tree)

    @invariant()
    def tree_and_model_agree(self) -> None:
        if hasattr(self, "tree"):
            assert ring(self.tree) == [(path, path in self.model.resident) for path in self.model.paths]
            assert edges(self.tree) == self.model.begins_edge
            assert self.tree.nodes == len(self.model.begins_edge)
            assert self.tree.resident_tokens == self.model.tokens


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(max_examples=settings().max_examples // 2)
