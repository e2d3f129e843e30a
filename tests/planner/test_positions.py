"""An order that the model reads well: where a position profile moves blocks, and where it moves none."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.batch import BatchRequest
from warmprefix.ordering import PositionProfile
from warmprefix.prefix.tree import PrefixTree

FIRST_BEST = (94, 58, 74)
LAST_BEST = (74, 58, 94)


def requests(seed: int, count: int = 60, k: int = 6) -> list[list[ContextBlock]]:
    """Return requests that share blocks in different orders."""
    rng = random.Random(seed)
    blocks = [ContextBlock(f"Passage number {i} about {i * i}.", tokens=rng.randrange(80, 300)) for i in range(14)]
    return [rng.sample(blocks, k) for _ in range(count)]


def served(
    planner: ContextPlanner, asked: Sequence[Sequence[ContextBlock]], model: str | None = "m"
) -> list[ContextPlan]:
    plans = []
    for blocks in asked:
        with planner.planning(blocks, model=model) as plan:
            plans.append(plan)
    return plans


def ranks(plan: ContextPlan) -> list[int]:
    return [planned.positions[0] for planned in plan.blocks]


def lost(plans: Sequence[ContextPlan], right: tuple[float, ...]) -> float:
    profile = PositionProfile(right, 1.0)
    return sum([profile.loss(ranks(plan)) for plan in plans]) / len(plans)


def hits(plans: Sequence[ContextPlan]) -> float:
    return sum([plan.resident_tokens for plan in plans]) / sum([plan.total_tokens for plan in plans])


@pytest.mark.parametrize(
    ("positions", "model"),
    [
        ({"m": (75, 75, 75)}, "m"),
        ({"m": (75,)}, "m"),
        ({"m": (75,), "*": FIRST_BEST}, "m"),
        ({"other": FIRST_BEST}, "m"),
        ({"m": FIRST_BEST}, None),
    ],
)
def test_a_flat_or_unknown_profile_changes_no_byte(positions: Mapping[str, Sequence[float]], model: str | None) -> None:
    asked = requests(1)
    plain = served(ContextPlanner(), asked, model)
    assert any(ranks(plan) != sorted(ranks(plan)) for plan in plain)
    aware = served(ContextPlanner(positions=positions), asked, model)
    assert [plan.render() for plan in aware] == [plan.render() for plan in plain]


@pytest.mark.parametrize("model", ["m", None])
def test_a_star_stands_for_all_other_models(model: str | None) -> None:
    asked = requests(1)
    named = served(ContextPlanner(positions={"m": LAST_BEST}), asked, "m")
    starred = served(ContextPlanner(positions={"*": LAST_BEST, "n": FIRST_BEST}), asked, model)
    assert list(map(ranks, starred)) == list(map(ranks, named))


def test_later_changes_of_the_numbers_do_not_count() -> None:
    asked = requests(1)
    right: Any = [*LAST_BEST]
    planner = ContextPlanner(positions={"m": right})
    right[:] = [None]
    assert list(map(ranks, served(planner, asked, "m"))) == list(
        map(ranks, served(ContextPlanner(positions={"m": [*LAST_BEST]}), asked, "m"))
    )


@pytest.mark.parametrize("right", [FIRST_BEST, LAST_BEST, (50, 100)])
@pytest.mark.parametrize("price", [0, 2, 1000])
def test_without_reuse_nothing_moves(right: Sequence[float], price: float) -> None:
    planner = ContextPlanner(positions={"*": right}, points_per_percent=price)
    unshared = [[ContextBlock(f"{i} {j}", tokens=100) for j in range(5)] for i in range(20)]
    assert {tuple(ranks(plan)) for plan in served(planner, unshared)} == {(0, 1, 2, 3, 4)}


@pytest.mark.parametrize(("right", "expected"), [(FIRST_BEST, [4, 0]), (LAST_BEST, [4, 1])])
def test_the_first_ranked_block_stands_where_the_model_reads_best(right: Sequence[float], expected: list[int]) -> None:
    planner = ContextPlanner(annotate="none", positions={"*": right})
    served(planner, [[ContextBlock("shared", tokens=1_000)]])
    blocks = [ContextBlock(name, tokens=100) for name in "abcd"]
    order = ranks(planner.plan([*blocks, ContextBlock("shared", tokens=1_000)], model="m"))
    assert order[:2] == expected
    assert (order[-1] == 0) == (right == LAST_BEST)


@pytest.mark.parametrize("right", [FIRST_BEST, LAST_BEST])
def test_a_price_trades_hits_for_answers(right: tuple[float, ...]) -> None:
    asked = requests(3, 200)
    plain = served(ContextPlanner(annotate="none"), asked)
    by_price = {
        price: served(ContextPlanner(annotate="none", positions={"m": right}, points_per_percent=price), asked)
        for price in (1_000, 2, 0.3, 0)
    }
    assert hits(by_price[1_000]) == pytest.approx(hits(plain), abs=0.03)
    assert lost(by_price[2], right) < lost(plain, right) - 1
    assert hits(by_price[2]) > hits(by_price[0])
    assert all(lost([plan], right) <= 1e-9 for plan in by_price[0]), "an order costs answers at any saving"


@pytest.mark.parametrize("right", [FIRST_BEST, LAST_BEST])
def test_a_batch_places_well_what_no_request_shares(right: tuple[float, ...]) -> None:
    asked = [BatchRequest(str(i), blocks) for i, blocks in enumerate(requests(4, 40))]
    planners = [ContextPlanner(), ContextPlanner(positions={"m": right}), ContextPlanner(positions={"m": (75, 75)})]
    plain, aware, flat = [planner.plan_batch(asked, model="m") for planner in planners]
    assert aware.saved_tokens == plain.saved_tokens
    plans = [[request.plan for request in batch.requests] for batch in (plain, aware, flat)]
    assert [plan.render() for plan in plans[2]] == [plan.render() for plan in plans[0]]
    assert lost(plans[1], right) < lost(plans[0], right) - 1
    assert [plan.order_annotation for plan in plans[1]] == [plan.order_annotation for plan in plans[0]]
    found = [simulated([[block.block.text for block in plan.blocks] for plan in each]) for each in plans]
    assert found[1] >= found[0]


def simulated(orders: Sequence[Sequence[str]]) -> int:
    """Return the blocks that an unbounded cache finds."""
    tree = PrefixTree[str]()
    return sum([tree.insert(order, [1] * len(order)).blocks for order in orders])


@given(st.data(), st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0, 1_000))
def test_every_block_is_there_and_pins_and_runs_are_kept(data: st.DataObject, right: list[float], price: float) -> None:
    planner = ContextPlanner(positions={"*": right}, points_per_percent=price)
    blocks = [ContextBlock(f"Passage {i}.", tokens=data.draw(st.integers(1, 500))) for i in range(8)]
    for _ in range(6):
        asked = data.draw(st.lists(st.sampled_from(blocks), min_size=1, unique=True))
        pinned = ContextBlock("pinned", tokens=50, pinned="start")
        with planner.planning([*asked, pinned]) as plan:
            assert plan.blocks[0].text == "pinned"
            assert {planned.block for planned in plan.blocks} == {*asked, pinned}
        with planner.planning(asked) as plan:
            assert sorted(ranks(plan)) == [*range(len(asked))]
            moved = plan.blocks[0].block != asked[0]
            assert moved == (plan.order_annotation is not None)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"positions": {"m": []}}, ValueError),
        ({"positions": {"m": [94, 101]}}, ValueError),
        ({"positions": {"m": [94, -1]}}, ValueError),
        ({"positions": {"m": [94, float("nan")]}}, ValueError),
        ({"positions": {"m": "94"}}, TypeError),
        ({"positions": {"m": [None]}}, TypeError),
        ({"positions": [94, 58]}, TypeError),
        ({"points_per_percent": -1}, ValueError),
        ({"points_per_percent": float("inf")}, ValueError),
        ({"points_per_percent": float("nan")}, ValueError),
        ({"points_per_percent": "2"}, TypeError),
    ],
)
def test_other_profiles_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"positions|points_per_percent"):
        ContextPlanner(**wrong)
