from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warmprefix.batch import bounds
from warmprefix.batch.bounds import Bound, upper_bound

Contexts = list[list[int]]
Path = tuple[int, ...]

TOKENS = [3, 5, 1, 0, 8]

few = st.lists(st.lists(st.integers(0, 4), max_size=3, unique=True), max_size=4)
held_orders = st.lists(st.permutations(range(5)).map(lambda order: tuple(order[:3])), max_size=2)
batches = st.lists(st.lists(st.integers(0, 4), max_size=5, unique=True), max_size=9)


def most_saved(contexts: Contexts, held: set[Path]) -> int:
    """Return the most tokens that any plan saves with an unbounded cache.

    The cache holds the prefixes `held` before. Every other prefix is prefilled once, in any execution order.
    """
    everything = sum(TOKENS[block] for context in contexts for block in context)
    least = everything
    for orders in product(*(permutations(context) for context in contexts)):
        prefixes = {order[:end] for order in orders for end in range(1, len(order) + 1)}
        least = min(least, sum(TOKENS[prefix[-1]] for prefix in prefixes - held))
    return everything - least


def prefixes_of(orders: Sequence[Path]) -> set[Path]:
    return {order[:end] for order in orders for end in range(1, len(order) + 1)}


def best_held(context: Sequence[int], held: set[Path]) -> Path:
    paths = [path for path in held if set(path) <= set(context)]
    return max(paths, key=lambda path: sum(TOKENS[block] for block in path), default=())


@given(few)
def test_no_plan_saves_more_than_the_bound(contexts: Contexts) -> None:
    most = most_saved(contexts, set())
    full, quick = upper_bound(contexts, TOKENS), upper_bound(contexts, TOKENS, quick=True)
    assert most <= full.tokens <= quick.tokens
    assert quick.kind == "every block once"
    assert full.kind in ("spanning forest", "every block once")


@given(few, held_orders)
def test_no_plan_saves_more_than_the_bound_with_a_warm_cache(contexts: Contexts, orders: list[Path]) -> None:
    held = prefixes_of(orders)
    resident = [best_held(context, held) for context in contexts]
    most = most_saved(contexts, held)
    assert most <= upper_bound(contexts, TOKENS, resident).tokens
    assert most <= upper_bound(contexts, TOKENS, resident, quick=True).tokens


@settings(max_examples=settings().max_examples * 3 // 2)
@given(batches, held_orders)
@example([], [])
@example([[]], [(0,)])
@example([[0, 1], [1, 0], [0, 1, 2]], [])
def test_best_partners_give_a_looser_bound(contexts: Contexts, orders: list[Path]) -> None:
    resident = [best_held(context, prefixes_of(orders)) for context in contexts]
    forest = upper_bound(contexts, TOKENS, resident)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_FOREST_STEPS", -1)
        patch.setattr(bounds, "COMPILING_PAYS_FROM", -1)
        partners = upper_bound(contexts, TOKENS, resident)
    assert forest.tokens <= partners.tokens
    assert partners.kind in ("best partners", "every block once") or not contexts


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        pytest.param([[0, 1], [0, 2], [3, 4], [3, 5]], Bound(2, "spanning forest"), id="one of each pair is first"),
        pytest.param([[0, 1, 2], [0, 3, 4], [1, 3, 5], [2, 4, 5]], Bound(3, "spanning forest"), id="forest"),
        pytest.param([[0, 1], [0, 1], [1, 0]], Bound(4, "spanning forest"), id="the same again"),
        pytest.param([[0, 1], [0, 2], [1, 2], [0, 1, 2]], Bound(6, "spanning forest"), id="all in the last"),
    ],
)
def test_examples(contexts: Contexts, expected: Bound) -> None:
    assert upper_bound(contexts, [1] * 6) == expected


def test_cached_tokens_need_no_earlier_request() -> None:
    assert upper_bound([[0, 1], [0, 2]], [5, 3, 1], [(0,), (0, 2)]) == Bound(11, "spanning forest")


def test_bound_of_a_large_batch_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    popular = [1 / (1 + block) for block in range(400)]
    contexts = [list(dict.fromkeys(rng.choices(range(400), popular, k=12))) for _ in range(2_000)]
    tokens = [rng.randrange(50, 400) for _ in range(400)]
    exact = upper_bound(contexts, tokens)
    assert exact.kind == "spanning forest"
    monkeypatch.setattr(bounds, "_FOREST_STEPS", 0)
    monkeypatch.setattr(bounds, "COMPILING_PAYS_FROM", 100_000)
    monkeypatch.setattr(bounds, "_PARTNER_STEPS", 100_000)
    sampled = upper_bound(contexts, tokens)
    assert sampled.kind == "sampled"
    assert sampled == upper_bound(contexts, tokens), "another sample the second time"
    monkeypatch.setattr(bounds, "COMPILING_PAYS_FROM", -1)
    monkeypatch.setattr(bounds, "_PARTNER_STEPS", 10**12)
    partners = upper_bound(contexts, tokens)
    assert partners.kind == "best partners"
    assert exact.tokens <= partners.tokens
    assert abs(sampled.tokens - partners.tokens) < 0.1 * partners.tokens


def test_blocks_without_tokens_add_nothing() -> None:
    assert upper_bound([[0, 1], [1, 0], [0]], [0, 0]).tokens == 0


@pytest.mark.parametrize("quick", [False, True])
def test_bound_of_no_contexts_is_zero(quick: bool) -> None:
    assert upper_bound([], [], quick=quick).tokens == 0
    assert upper_bound([[]], [], quick=quick).tokens == 0
    assert upper_bound([[]], [], [()], quick=quick).tokens == 0
