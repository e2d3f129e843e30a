from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.batch.plan import BatchRequest
from warmprefix.batch.scope_plan import NumberedRequests, resident_path
from warmprefix.batch.window import PolicyOrder, _gain, _merged, _single_clusters, plan_window
from warmprefix.blocks import ContextBlock
from warmprefix.ordering import BlockView
from warmprefix.prefix.tree import PrefixTree
from warmprefix_baselines.policies import then_the_rest

LETTERS = "abcdef"
LENGTHS = dict(zip(LETTERS, (10, 20, 20, 30, 70, 0), strict=True))
PINS = {"b": "start", "f": "end"}

windows = st.lists(st.lists(st.sampled_from(LETTERS), max_size=5, unique=True), max_size=8)


def block(letter: str, pin: bool = False) -> ContextBlock:
    return ContextBlock(letter, tokens=LENGTHS[letter], pinned=PINS.get(letter) if pin else None)  # type: ignore[arg-type]


def requests_of(window: Sequence[Sequence[str]], pin: bool = False, locked: Sequence[int] = ()) -> list[BatchRequest]:
    return [
        BatchRequest(i, [block(letter, pin) for letter in own], order_locked=i in locked)
        for i, own in enumerate(window)
    ]


def tree_of(paths: Sequence[Sequence[str]]) -> PrefixTree[bytes]:
    tree = PrefixTree[bytes]()
    for path in paths:
        tree.insert([block(letter).fingerprint for letter in path], [LENGTHS[letter] for letter in path])
    return tree


def relevance(blocks: Sequence[BlockView], after: Sequence[bytes], joined: Collection[int]) -> Sequence[int]:
    return range(len(blocks))


def backwards(blocks: Sequence[BlockView], after: Sequence[bytes], joined: Collection[int]) -> Sequence[int]:
    return range(len(blocks))[::-1]


def orders(
    window: Sequence[Sequence[str]], paths: Sequence[Sequence[str]] = (), order: PolicyOrder = relevance
) -> list[str]:
    """Return the contexts in execution order, in planned order."""
    plan = plan_window(requests_of(window), tree_of(paths), order)
    return ["".join(window[placed.context][i] for i in placed.order) for placed in plan.placed]


def test_requests_that_share_blocks_run_together() -> None:
    assert orders(["ae", "cd", "ebd", "dea"]) == ["ea", "edb", "eda", "cd"]


def test_policy_orders_shared_blocks_and_the_rest() -> None:
    assert orders(["abcde", "abfed"], order=backwards) == ["edbac", "edbaf"]


def test_policy_receives_the_blocks_placed_in_front() -> None:
    calls: list[tuple[str, str]] = []

    def order(blocks: Sequence[BlockView], after: Sequence[bytes], joined: Collection[int]) -> Sequence[int]:
        names = {block(letter).fingerprint: letter for letter in LETTERS}
        calls.append(("".join(names[view.fingerprint] for view in blocks), "".join(map(names.__getitem__, after))))
        return range(len(blocks))

    orders(["abcd", "abef"], order=order)
    assert calls == [("ab", ""), ("cd", "ab"), ("ef", "ab")]


@pytest.mark.parametrize(
    ("window", "path", "expected"),
    [
        pytest.param(["abe", "ea"], "b", ["ae", "aeb"], id="sharing saves more"),
        pytest.param(["abe", "ab"], "e", ["eab", "ab"], id="resident path saves more"),
        pytest.param(["abe", "eab"], "e", ["eab", "eab"], id="both behind one path"),
    ],
)
def test_requests_share_or_follow_their_resident_paths(window: list[str], path: str, expected: list[str]) -> None:
    tree = tree_of([path])

    def deepest_first(blocks: Sequence[BlockView], after: Sequence[bytes], joined: Collection[int]) -> Sequence[int]:
        return then_the_rest(tree.deepest_path([view.fingerprint for view in blocks], after), len(blocks))

    assert orders(window, [path], deepest_first) == expected


def test_longest_resident_path_runs_first() -> None:
    assert orders(["ab", "c", "ed"], [["e", "d"], ["c"]]) == ["ed", "c", "ab"]


@pytest.mark.parametrize("requests", [64, 200])
def test_one_block_shared_by_all(requests: int) -> None:
    shared = ContextBlock("shared", tokens=5)
    own = [BatchRequest(i, [ContextBlock(f"own {i}", tokens=5), shared]) for i in range(requests)]
    plan = plan_window(own, PrefixTree(), relevance)
    assert sorted(plan.placed) == [(i, (1, 0)) for i in range(requests)]
    assert sum(served.tokens for served in plan.served) == 5 * (requests - 1)


@given(windows, windows)
def test_no_two_clusters_gain_by_a_merge(window: list[list[str]], paths: list[list[str]]) -> None:
    tree = tree_of(paths)
    numbered = NumberedRequests(requests_of(window), None)
    found = [resident_path(numbered, i, tree) for i in range(len(window))]
    single = _single_clusters(numbered, range(len(window)), found)
    merged = _merged(single, numbered.tokens)
    assert all(_gain(x, y, numbered.tokens) <= 0 for x, y in combinations(merged, 2))
    for cluster in merged:
        keys = [numbered.keys[number] for number in cluster.path]
        assert tree.match_prefix(keys).tokens == cluster.held_tokens
        assert set(cluster.path) <= cluster.blocks


@given(windows, windows, st.booleans(), st.sets(st.integers(0, 7)))
def test_pins_and_locks_are_kept(window: list[list[str]], paths: list[list[str]], pin: bool, locked: set[int]) -> None:
    plan = plan_window(requests_of(window, pin, sorted(locked)), tree_of(paths), backwards)
    assert sorted(placed.context for placed in plan.placed) == list(range(len(window)))
    for i, order in plan.placed:
        assert sorted(order) == list(range(len(window[i])))
        planned = [window[i][place] for place in order]
        if i in locked:
            assert planned == window[i]
        elif pin:
            assert "b" not in planned[1:]
            assert "f" not in planned[:-1]


@given(windows, windows)
def test_plan_is_deterministic(window: list[list[str]], paths: list[list[str]]) -> None:
    assert orders(window, paths) == orders(window, paths)


@given(windows)
def test_window_of_strangers_is_ordered_by_the_policy_alone(window: list[list[str]]) -> None:
    """Requests without a common block keep the order that the policy gives each of them."""
    renamed = [
        BatchRequest(i, [ContextBlock(f"{i} {letter}", tokens=3) for letter in own]) for i, own in enumerate(window)
    ]
    plan = plan_window(renamed, PrefixTree(), backwards)
    assert sorted(plan.placed) == [(i, tuple(range(len(own)))[::-1]) for i, own in enumerate(window)]
