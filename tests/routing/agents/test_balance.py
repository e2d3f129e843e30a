"""`share_out`: nothing is lost, the bound holds, and few blocks move when a candidate joins or leaves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import fingerprint
from warmprefix_routing.balance import BlockItem, Candidate, Placing, share_out

UNBOUND = float("inf")
Situation = tuple[list[float], list[float], list[tuple[int, set[int]]], float, float, bool, int]
"""Loads, weights, items as tokens and holders, eps, floor, together, prompt_tokens."""
NAMES = [f"agent-{i}" for i in range(32)]


def candidates(loads: Sequence[float], weights: Sequence[float] | None = None) -> list[Candidate]:
    made = [Candidate(NAMES[i], 1.0 if weights is None else weights[i]) for i in range(len(loads))]
    for candidate, load in zip(made, loads, strict=True):
        candidate.load = load
    return made


def item(number: int, tokens: int = 100, holders: Sequence[Candidate] = ()) -> BlockItem:
    return BlockItem(fingerprint(f"block {number}"), tokens, holders)


def shared_out(
    items: Sequence[BlockItem],
    among: Sequence[Candidate],
    eps: float = 0.25,
    floor: float = 0.0,
    together: bool = False,
    prompt_tokens: int = 0,
) -> list[Placing]:
    return share_out(items, among, eps, floor, prompt_tokens, together)


def one_by_one(names: Sequence[str], weights: Sequence[float], numbers: Sequence[int]) -> dict[int, str]:
    """Return the candidate of each block, without holders or a bound."""
    among = [Candidate(name, weight) for name, weight in zip(names, weights, strict=True)]
    return {number: shared_out([item(number)], among, floor=UNBOUND)[0].candidate.name for number in numbers}


situations = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0, 1e6), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0]), min_size=n, max_size=n),
        st.lists(st.tuples(st.integers(1, 5_000), st.sets(st.integers(0, n - 1))), max_size=12),
        st.sampled_from([0.0, 0.1, 0.25, 2.0]),
        st.sampled_from([0.0, 1_000.0, 1e5]),
        st.booleans(),
        st.sampled_from([0, 256]),
    )
)


@given(situations)
def test_every_item_goes_to_one_candidate_within_the_bound(situation: Situation) -> None:
    loads, weights, wanted, eps, floor, together, prompt_tokens = situation
    among = candidates(loads, weights)
    items = [item(i, tokens, [among[h] for h in sorted(holders)]) for i, (tokens, holders) in enumerate(wanted)]
    choices = shared_out(items, among, eps, floor, together, prompt_tokens)
    assert len(choices) == len(items)
    given_to = Counter[str]()
    for (_, tokens, holders), (candidate, held, spilled, work) in zip(items, choices, strict=True):
        assert candidate in among
        assert work in (tokens * (not held), tokens * (not held) + prompt_tokens)
        assert candidate in holders or not held  # a holder may also get it as the least loaded of all
        assert spilled == (bool(holders) and not held)
        given_to[candidate.name] += tokens
    for candidate, load in zip(among, loads, strict=True):
        assert candidate.load == pytest.approx(load + given_to[candidate.name] / candidate.weight)
    mean = sum(candidate.load * candidate.weight for candidate in among) / sum(weights)
    limit = max(floor, (1 + eps) * mean) * (1 + 1e-9)
    for candidate in among:
        if candidate.load > limit and given_to[candidate.name]:
            # Then it was the least loaded of all when it got its last item: the others, who only grew, are no lower.
            own = [item for item, choice in zip(items, choices, strict=True) if choice[0] is candidate]
            last = max(own, key=lambda item: (not item.holders, len(item.holders), -item.tokens))
            before = candidate.load - last.tokens / candidate.weight
            assert all(other.load >= before * (1 - 1e-9) for other in among if other is not candidate)


@given(situations, st.randoms(use_true_random=False))
def test_the_candidates_order_does_not_matter(situation: Situation, rng: random.Random) -> None:
    loads, weights, wanted, eps, floor, together, prompt_tokens = situation
    outcomes = []
    for shuffled in (False, False, True):
        among = candidates(loads, weights)
        items = [item(i, tokens, [among[h] for h in sorted(holders)]) for i, (tokens, holders) in enumerate(wanted)]
        if shuffled:
            rng.shuffle(among)
            for _, _, holders in items:
                assert isinstance(holders, list)
                rng.shuffle(holders)
        choices = shared_out(items, among, eps, floor, together, prompt_tokens)
        outcomes.append([(candidate.name, *rest) for candidate, *rest in choices])
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("weights", [[1.0] * 8, [1.0, 2.0, 3.0, 0.5, 1.0, 4.0, 1.0, 1.0]], ids=["even", "weighted"])
@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16, bytes(15) + b"\1"])
def test_any_key_can_be_placed_the_same_in_any_order(key: bytes, weights: list[float]) -> None:
    among = candidates([0.0] * 8, weights)
    first = shared_out([BlockItem(key, 1, ())], among, floor=UNBOUND)[0].candidate.name
    assert shared_out([BlockItem(key, 1, ())], among[::-1], floor=UNBOUND)[0].candidate.name == first


def test_extreme_hashes_can_be_weighted() -> None:
    """-weight / log(u) must not divide by zero where u is nearly 1."""
    one, other = candidates([0.0, 0.0], [1.0, 2.0])
    inverse = pow(one.seed, -1, 1 << 64)
    drawn = -inverse % (1 << 64)  # times the seed, this is 2**64 - 1
    assert drawn & 1
    choice = shared_out([BlockItem(drawn.to_bytes(8, "big") + bytes(8), 1, ())], [one, other], floor=UNBOUND)[0]
    assert choice.candidate is one


@pytest.mark.parametrize(
    "weights", [[1.0] * 9, [1.0, 2.0, 3.0, 0.5, 1.0, 4.0, 1.0, 1.0, 2.0]], ids=["even", "weighted"]
)
def test_joining_or_leaving_candidate_moves_only_its_own_blocks(weights: list[float]) -> None:
    numbers = range(2_000)
    all_nine = one_by_one(NAMES[:9], weights, numbers)
    without_last = one_by_one(NAMES[:8], weights[:8], numbers)
    for number in numbers:
        if all_nine[number] != NAMES[8]:
            assert all_nine[number] == without_last[number]
    moved = sum(all_nine[number] != without_last[number] for number in numbers)
    share = weights[8] / sum(weights)
    assert 0.6 * share < moved / len(numbers) < 1.4 * share


@pytest.mark.parametrize("count", [2, 4, 15, 32])
def test_new_blocks_are_spread_evenly(count: int) -> None:
    numbers = range(400 * count)
    found = Counter(one_by_one(NAMES[:count], [1.0] * count, numbers).values())
    chi_square = sum((found[name] - 400) ** 2 / 400 for name in NAMES[:count])
    # Of such a sum, the mean is count - 1, and the standard deviation the root of twice that.
    assert chi_square < count - 1 + 5 * (2 * (count - 1)) ** 0.5


def test_weights_are_shares() -> None:
    weights = [1.0, 1.0, 2.0, 4.0]
    found = Counter(one_by_one(NAMES[:4], weights, range(8_000)).values())
    for name, weight in zip(NAMES, weights, strict=False):
        assert found[name] == pytest.approx(1_000 * weight, rel=0.12)


def test_a_request_is_spread_evenly_by_what_has_to_be_computed() -> None:
    for request in range(50):
        among = candidates([0.0] * 5)
        shared_out([item(100 * request + i) for i in range(15)], among, floor=UNBOUND)
        assert [candidate.given for candidate in among] == [3] * 5


def test_single_holder_may_get_all_blocks() -> None:
    """Held blocks cost almost nothing to compute."""
    among = candidates([0.0] * 5)
    choices = shared_out([item(i, holders=[among[3]]) for i in range(15)], among, floor=UNBOUND)
    assert {choice.candidate for choice in choices} == {among[3]}
    assert all(choice.held for choice in choices)


def test_further_prompts_must_not_take_longer_than_computing_elsewhere() -> None:
    for tokens, most in ((99, 3), (100, 4), (250, 5), (10_000, 15)):
        among = candidates([0.0] * 5)
        items = [item(i, tokens, [among[3]]) for i in range(15)]
        choices = shared_out(items, among, floor=UNBOUND, prompt_tokens=100)
        assert sum(choice.held for choice in choices) == most
        assert all(choice.candidate is not among[3] for choice in choices if not choice.held)


def test_new_blocks_go_to_candidates_with_the_least_work() -> None:
    for number in range(50):
        among = candidates([0.0] * 5)
        for candidate, queue in zip(among, (500, 100, 300, 100, 200), strict=True):
            candidate.queue = queue
        first, second, third = shared_out([item(3 * number + i) for i in range(3)], among, floor=UNBOUND)
        assert {first.candidate, second.candidate} == {among[1], among[3]}
        assert third.candidate in (among[4], among[1], among[3])


def test_holder_with_less_work_gets_the_block() -> None:
    among = candidates([100.0, 500.0])
    among[0].queue = 10
    (choice,) = shared_out([item(0, holders=among)], among, floor=UNBOUND)
    assert choice.candidate is among[1]


def test_together_no_candidate_exceeds_an_even_share() -> None:
    among = candidates([0.0] * 5)
    choices = shared_out([item(i, holders=[among[3]]) for i in range(15)], among, floor=UNBOUND, together=True)
    assert Counter(choice.candidate.name for choice in choices) == dict.fromkeys(NAMES[:5], 3)
    assert sum(choice.held for choice in choices) == 3
    assert sum(choice.spilled for choice in choices) == 12


def test_less_loaded_holder_gets_the_block() -> None:
    among = candidates([500.0, 300.0, 100.0])
    (choice,) = shared_out([item(0, holders=among[:2])], among, floor=UNBOUND)
    assert choice == (among[1], True, False, 0)


def test_block_spills_to_the_same_candidate_each_time() -> None:
    """A block that spills often is held by two candidates, not by one after the other."""
    for number in range(20):
        seen = set()
        for elsewhere in range(1, 4):
            among = candidates([1_000.0, 100.0, 100.0, 100.0, 100.0])
            (choice,) = shared_out([item(number, 10 * elsewhere, [among[0]])], among, eps=0.25)
            assert choice.spilled
            assert choice.candidate is not among[0]
            seen.add(choice.candidate.name)
        assert len(seen) == 1


def test_without_room_the_better_of_the_next_two_is_chosen() -> None:
    """Power of two choices: the less loaded of the next two that have room."""
    orders = 0
    for number in range(200):
        free = one_by_one(NAMES[:6], [1.0] * 6, [number])[number]
        order = [free]
        while len(order) < 3:
            rest = [name for name in NAMES[:6] if name not in order]
            order.append(one_by_one(rest, [1.0] * len(rest), [number])[number])
        first, second, third = order
        among = candidates([0.0] * 6)
        for candidate in among:
            candidate.load = {first: 5_000.0, second: 120.0, third: 110.0}.get(candidate.name, 0.0)
        (choice,) = shared_out([item(number)], among)
        assert choice.candidate.name == third, "though others have less"
        for candidate in among:
            candidate.load = {first: 5_000.0, second: 110.0, third: 120.0}.get(candidate.name, 0.0)
        (choice,) = shared_out([item(number)], among)
        assert choice.candidate.name == second
        orders += 1
    assert orders == 200


def test_longest_block_is_placed_first_and_results_keep_the_order() -> None:
    among = candidates([0.0, 0.0])
    items = [item(0, 10), item(1, 1_000), item(2, 10)]
    choices = shared_out(items, among, eps=0.0)
    longest = choices[1].candidate
    assert [choice.candidate is longest for choice in choices] == [False, True, False]
