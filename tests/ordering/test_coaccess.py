"""`RecurrenceByRank`, compared with shares computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.ordering.coaccess import Outcome, RecurrenceByRank

outcomes = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=200)


def test_chances_fall_with_rank_before_learning() -> None:
    chances = RecurrenceByRank().chances(15)
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(0.633)
    assert chances[7] == pytest.approx(0.5)
    assert chances[14] == pytest.approx(0.367)


def test_learned_shares_are_interpolated_linearly() -> None:
    recurrence = RecurrenceByRank()
    recurrence.learn([(0, False), (1, True)] * 60_000)
    assert recurrence.chances(3) == pytest.approx([0.02, 0.98, 0.367], abs=0.001)
    assert recurrence.chances(6)[1:5] == pytest.approx([0.26, 0.74, 0.82725, 0.52025], abs=0.001)


def test_latest_similar_request_counts_more_and_is_not_kept() -> None:
    recurrence = RecurrenceByRank()
    before = recurrence.chances(3)
    assert recurrence.chances(3, [(0, False), (2, True)]) == pytest.approx(
        [0.633 * 60 / 68, 0.5, (0.367 * 60 + 8) / 68]
    )
    assert recurrence.chances(3) == before


def test_change_is_noticed_after_much_learning() -> None:
    recurrence = RecurrenceByRank()
    recurrence.learn([(2, False)] * 100_000)
    recurrence.learn([(2, True)] * 20_000)
    assert recurrence.chances(3)[2] > 0.8


@given(learned=outcomes, latest=outcomes, blocks=st.integers(0, 40))
def test_chances_are_probabilities(learned: list[Outcome], latest: list[Outcome], blocks: int) -> None:
    recurrence = RecurrenceByRank()
    recurrence.learn(learned)
    chances = recurrence.chances(blocks, latest)
    assert len(chances) == blocks
    assert all(0.02 <= chance <= 0.98 for chance in chances)
