"""The contract of ordering policies, checked for each of them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prefix_integrity import check_integrity
from tests.served_blocks import as_served

from warmprefix.ordering import (
    CoAccessPolicy,
    OrderingPolicy,
    PrefixView,
    ServedBlock,
    SortedPolicy,
)
from warmprefix.prefix.tree import PrefixTree
from warmprefix_baselines import POLICIES, OraclePolicy

policies = pytest.mark.parametrize("policy", [pytest.param(make, id=name) for name, make in POLICIES.items()])

NewPolicy = Callable[[], OrderingPolicy]


class Block(NamedTuple):
    fingerprint: bytes
    tokens: int


def blocks(*names: object, tokens: int = 10) -> list[Block]:
    return [Block(repr(name).encode(), tokens) for name in names]


class Served:
    """The calls of a planner: order, serve from the engine, observe."""

    def __init__(self, policy: OrderingPolicy, **bounds: int) -> None:
        self.policy = policy
        self.tree = PrefixTree[bytes](**bounds)

    def order(self, request: Sequence[Block], after: Sequence[Block] = ()) -> list[int]:
        return list(self.policy.order(request, PrefixView(self.tree, [block.fingerprint for block in after])))

    def serve(self, request: Sequence[Block]) -> list[int]:
        order = self.order(request)
        assert sorted(order) == list(range(len(request)))
        served = [request[i] for i in order]
        held = self.tree.insert([block.fingerprint for block in served], [block.tokens for block in served]).blocks
        self.policy.observe([ServedBlock(*block, order[place], place < held) for place, block in enumerate(served)])
        return order


# -- permutations ----------------------------------------------------------------------------------------------------

some_blocks = st.permutations([Block(bytes([65 + i]), tokens) for i, tokens in enumerate([3, 0, 7, 1, 0, 400, 2, 9])])
requests = st.tuples(some_blocks, st.integers(0, 8)).map(lambda drawn: drawn[0][: drawn[1]])
histories = st.lists(st.tuples(requests, st.sampled_from(["serve", "serve", "serve", "stale", "evict"])), max_size=12)


def after(policy: OrderingPolicy, history: Sequence[tuple[Sequence[Block], str]], **bounds: int) -> Served:
    served = Served(policy, **bounds)
    for request, event in history:
        if event == "serve":
            served.serve(request)
        elif event == "stale":
            served.tree.mark_stale([block.fingerprint for block in request], resident_blocks=1)
        else:
            served.tree.evict(sum(block.tokens for block in request))
    return served


@policies
@given(history=histories, request=requests, placed=st.integers(0, 2))
def test_order_is_a_permutation_and_changes_no_state(
    policy: NewPolicy, history: list[tuple[list[Block], str]], request: list[Block], placed: int
) -> None:
    served = after(policy(), history)
    front, request = request[:placed], request[placed:]
    given_blocks, tree = list(request), snapshot(served.tree)
    order = served.order(request, front)
    assert sorted(order) == list(range(len(request)))
    assert served.order(request, front) == order, "a second look changed the order"
    assert request == given_blocks
    assert snapshot(served.tree) == tree


@pytest.mark.parametrize("policy", [CoAccessPolicy, OraclePolicy])
@given(history=histories, request=requests)
def test_order_finds_at_least_as_much_as_relevance_order(
    policy: NewPolicy, history: list[tuple[list[Block], str]], request: list[Block]
) -> None:
    served = after(policy(), history)
    view = PrefixView(served.tree)
    planned = [request[i] for i in served.order(request)]
    assert view.match_prefix(planned).tokens >= view.match_prefix(request).tokens


def snapshot(tree: PrefixTree[bytes]) -> list[tuple[int, list[bytes], list[int], bool]]:
    """Return all nodes, the next to be evicted first."""
    return [(id(n), list(n.keys), list(n.tokens), n.resident) for n in tree.order]


@policies
@given(history=histories, request=requests)
@settings(max_examples=settings().max_examples // 4)
def test_equal_observations_give_equal_orders(
    policy: NewPolicy, history: list[tuple[list[Block], str]], request: list[Block]
) -> None:
    assert after(policy(), history).order(request) == after(policy(), history).order(request)


@policies
@given(history=histories, request=requests)
@settings(max_examples=settings().max_examples // 4)
def test_observed_list_may_change_later(
    policy: NewPolicy, history: list[tuple[list[Block], str]], request: list[Block]
) -> None:
    kept, changed = policy(), policy()
    for served, _ in history:
        kept.observe(as_served(served))
        handed_over = as_served(served)
        changed.observe(handed_over)
        assert handed_over == as_served(served)
        handed_over.clear()
    view = PrefixView(PrefixTree[bytes]())
    assert list(kept.order(request, view)) == list(changed.order(request, view))


REPLAY = """
import random, warmprefix.ordering as o, warmprefix.prefix.tree as t
from warmprefix import ContextBlock
from warmprefix_baselines import POLICIES
for name, make in POLICIES.items():
    chance, policy, tree = random.Random(7), make(), t.PrefixTree(capacity_tokens=3000)
    for _ in range(120):
        request = [ContextBlock(str(i), tokens=i % 9) for i in chance.sample(range(30), chance.randrange(9))]
        served = [request[i] for i in policy.order(request, o.PrefixView(tree))]
        tree.insert([b.fingerprint for b in served], [b.tokens for b in served])
        policy.observe([o.ServedBlock(b.fingerprint, b.tokens, i, False) for i, b in enumerate(served)])
        print(name, [b.text for b in served])
"""


def test_orders_do_not_depend_on_the_hash_seed() -> None:
    replays = [
        subprocess.run(
            [sys.executable, "-c", REPLAY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4321")
    ]
    assert replays[0] == replays[1]
    assert len(replays[0].splitlines()) == 120 * len(POLICIES)


# -- sizes -----------------------------------------------------------------------------------------------------------


@policies
def test_no_blocks_one_block_and_a_thousand(policy: NewPolicy) -> None:
    served = Served(policy())
    for count in (0, 1, 1_000, 0, 1, 1_000):
        served.serve(blocks(*range(count)))
    served.serve(blocks(*range(999, -1, -1)))
    check_integrity(served.tree)


@policies
def test_blocks_without_tokens(policy: NewPolicy) -> None:
    served = Served(policy())
    for names in ("ABC", "CBA", "ABD", "D", ""):
        served.serve(blocks(*names, tokens=0))


@pytest.mark.parametrize("policy", [make for make in POLICIES.values() if make is not SortedPolicy])
def test_relevance_order_stays_without_evidence_of_reuse(policy: NewPolicy) -> None:
    served = Served(policy())
    assert served.order(blocks(*"CAB")) == [0, 1, 2]
    served.serve(blocks(*"XYZ"))
    assert served.order(blocks(*"CAB")) == [0, 1, 2]


@policies
def test_disjoint_contexts(policy: NewPolicy) -> None:
    """ContextPilot's own index raises beyond 1,000 children of one node."""
    served = Served(policy())
    for i in range(1_100):
        served.serve(blocks(*[(i, j) for j in range(5)]))


@pytest.mark.sample(3)
@policies
def test_identical_requests(policy: NewPolicy) -> None:
    served = Served(policy())
    request = blocks(*"ABCDE")
    first = served.serve(request)
    for _ in range(9_999):
        served.serve(request)
    assert served.order(request) == first
    assert served.tree.nodes == 1


@pytest.mark.sample(3)
@policies
def test_one_block_shared_by_all_requests(policy: NewPolicy) -> None:
    served = Served(policy())
    for i in range(5_000):
        served.serve(blocks("shared", i))


@policies
def test_requests_that_extend_the_last_one(policy: NewPolicy) -> None:
    """Use a chain of nodes deeper than the interpreter's recursion limit."""
    served = Served(policy())
    request = blocks(*range(1_100))
    for end in range(1_100, 0, -10):
        served.policy.observe(as_served(request[:end]))
        served.tree.insert([block.fingerprint for block in request[:end]], [10] * end)
    served.serve(request)


# -- bounded memory ----------------------------------------------------------------------------------------------------


def with_limits(policy: Callable[..., OrderingPolicy], **limits: int) -> OrderingPolicy:
    """Return a policy with those of the limits that it takes."""
    taken = inspect.signature(policy).parameters
    return policy(**{name: limit for name, limit in limits.items() if name in taken})


@policies
def test_memory_stops_growing_at_the_configured_bounds(policy: NewPolicy) -> None:
    served = Served(with_limits(policy, window=8, max_nodes=10, max_blocks=40), max_nodes=10)
    held: list[int] = []
    for i in range(300):
        served.serve(blocks("shared", *[(i, j) for j in range(4)]))
        served.serve(blocks(*[(i, j) for j in (9, 8, 3, 1)]))
        held.append(entries(served.policy))
    assert max(held[100:]) <= max(held[:100]) <= 1_000


def entries(held: object) -> int:
    """Return the number of items in all reachable containers."""
    seen: set[int] = set()
    waiting, count = [held], 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        inside = list(contents(item))
        count += len(inside)
        waiting += inside
    return count


def contents(item: Any) -> Iterator[object]:
    if isinstance(item, dict):
        yield from item
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    if type(item).__module__.startswith("warmprefix"):
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from (getattr(item, name) for name in slots if hasattr(item, name))
        yield from getattr(item, "__dict__", {}).values()


# -- bounded work ------------------------------------------------------------------------------------------------------


BUDGETED: dict[NewPolicy, NewPolicy] = {OraclePolicy: lambda: OraclePolicy(max_blocks=4)}
"""Up to `max_blocks` the oracle is exhaustive by design."""


def work(task: Callable[[], object]) -> int:
    """Return the executed lines of Python, a cost that does not depend on the machine."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        task()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.sample(8)
@policies
@pytest.mark.parametrize("kind", ["disjoint", "shared", "overlapping"])
def test_cost_does_not_grow_with_the_number_of_requests(policy: NewPolicy, kind: str) -> None:
    def request(i: int) -> list[Block]:
        if kind == "disjoint":
            return blocks(*[(i, j) for j in range(5)])
        if kind == "shared":
            return blocks("shared", *[(i, j) for j in range(4)])
        return list(dict.fromkeys(blocks(*[(i * j) % 23 for j in (1, 5, 7)], *[(i, j) for j in range(2)])))

    # After all windows are full, only the number of requests still grows.
    served = Served(with_limits(policy, window=100))
    costs: list[int] = []
    for i in range(1_200):
        if i in range(150, 170) or i in range(1_180, 1_200):
            costs.append(work(partial(served.serve, request(i))))
        else:
            served.serve(request(i))
    assert sum(costs[20:]) <= 1.5 * sum(costs[:20])


@pytest.mark.sample(3)
@policies
def test_cost_is_bounded_if_no_subtree_can_be_skipped(policy: NewPolicy) -> None:
    """Each of 5,040 orders continues with a heavy block that is not requested."""
    served = Served(BUDGETED.get(policy, policy)())
    names = blocks(*range(7))
    for order in permutations(names):
        path = [*order, Block(b"heavy", 10_000)]
        served.tree.insert([block.fingerprint for block in path], [block.tokens for block in path])
        served.policy.observe(as_served(path))
    request = [*names, Block(b"new", 10_000), *blocks(*range(100, 107))]
    assert work(lambda: served.order(request)) <= 8_000
    ghosts = 3 if policy is CoAccessPolicy else 0  # each of which orders and serves the request too
    assert work(lambda: served.policy.observe(as_served(request))) <= 1_000 + 500 * ghosts


def test_cost_of_an_exhaustive_search_exceeds_the_bound() -> None:
    """So the measure above can detect an unbounded search."""
    served = Served(OraclePolicy())
    for order in permutations(range(7)):
        path = [*blocks(*order), Block(b"heavy", 10_000)]
        served.tree.insert([block.fingerprint for block in path], [block.tokens for block in path])
    assert work(lambda: served.order([*blocks(*range(7)), Block(b"new", 10_000)])) > 60_000
