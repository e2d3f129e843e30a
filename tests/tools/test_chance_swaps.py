"""The control of a choice."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import Choice
from warmprefix_tools.chance_swaps import chance_swaps


@given(
    st.lists(st.integers(-3, 3), max_size=20).map(lambda scores: sorted(scores, reverse=True)),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(0, 3),
    st.floats(0, 1),
    st.randoms(use_true_random=False),
)
def test_swaps_stay_within_the_choice(
    scores: list[float], k: int, swaps: int, extra: int, within: float, rng: random.Random
) -> None:
    choice = Choice(k=k, within=within)
    fed = chance_swaps(scores, choice, swaps, rng, extra)
    assert fed == sorted(set(fed))
    assert fed[: choice.kept] == [*range(min(choice.kept, len(scores)))]
    losses = choice.losses(scores)
    entered = [position for position in fed if position >= k]
    assert all(losses[position] <= within for position in entered)
    left = {*range(min(k, len(scores)))} - {*fed}
    may_leave = {position for position in range(choice.kept, min(k, len(scores))) if -losses[position] <= within / 2}
    assert left <= may_leave
    assert len(left) == min(swaps, len(may_leave), sum(loss <= within for loss in losses[k:]))
    assert len(left) <= len(entered) <= len(left) + extra


def test_all_candidates_enter_about_as_often() -> None:
    choice, rng = Choice(k=4, within=1.0), random.Random(0)
    fed = [chance_swaps([8, 7, 6, 5, 4.9, 4.8, 4.7, 1], choice, 1, rng) for _ in range(600)]
    assert all(each[:3] == [0, 1, 2] for each in fed)
    entered = Counter(each[-1] for each in fed)
    assert set(entered) == {4, 5, 6}
    assert all(150 < times < 250 for times in entered.values())


def test_a_passage_that_was_never_fed_is_not_left_out() -> None:
    choice, scores = Choice(k=4, keep=0, within=9.0), [5, 5, 5, 5, 5, 5]
    for seed in range(20):
        fed = chance_swaps(scores, choice, 2, random.Random(seed), known=[1, 4])
        assert fed[:3] == [0, 2, 3]
        assert len(fed) == 4
    assert chance_swaps(scores, choice, 2, random.Random(0), known=[]) == [0, 1, 2, 3]


def test_scores_are_checked() -> None:
    with pytest.raises(ValueError, match="candidate 1"):
        chance_swaps([1.0, 2.0], Choice(k=1), 1, random.Random(0))
