"""`CoAccessPolicy`: the number of similar requests that weigh as much as rank is learned from ghosts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.ordering.coaccess import CoAccessPolicy, Outcomes, RecurrenceByRank

thirds = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda counts: (min(counts), max(counts)))
outcomes = st.lists(thirds, min_size=3, max_size=3)


def news(requests: int) -> Iterator[list[str]]:
    """Yield stories that end after 12 requests each, in front of passages that have nothing to do with them."""
    rng = random.Random(1)
    live = dict.fromkeys(range(3), 12)
    for _ in range(requests):
        story = rng.choice(sorted(live))
        yield [f"story {story}", f"more of {story}", *[f"passage {i}" for i in rng.sample(range(40), 4)]]
        live[story] -= 1
        if not live[story]:
            del live[story]
            live[max(live, default=story) + 1] = 12


def topics(requests: int) -> Iterator[list[str]]:
    rng = random.Random(2)
    for topic in rng.choices(range(20), [1 / rank for rank in range(1, 21)], k=requests):
        yield [f"topic {topic} passage {i}" for i in rng.sample(range(10), 5)]


def served(requests: Iterator[list[str]], trust: float | None) -> tuple[float, CoAccessPolicy]:
    """Return the hit ratio in a cache of 20,000 tokens, and the policy."""
    policy = CoAccessPolicy(trust=trust)
    planner = ContextPlanner(policy=lambda: policy, capacity_tokens=20_000, annotate="none")
    hits = total = 0
    for texts in requests:
        with planner.planning([ContextBlock(text, tokens=200) for text in texts]) as plan:
            hits += plan.resident_tokens
            total += plan.total_tokens
    return hits / total, policy


def test_trust_rises_where_the_rank_knows_more_than_counts() -> None:
    learned, policy = served(news(400), None)
    assert policy.trust == 100
    assert learned > served(news(400), 11)[0] + 0.05


def test_default_trust_stays_where_nothing_is_clearly_better() -> None:
    learned, policy = served(topics(400), None)
    assert policy.trust == 11
    assert learned == served(topics(400), 11)[0]


def test_default_trust_stays_where_nothing_recurs() -> None:
    learned, policy = served(([f"passage {i} of {n}" for i in range(5)] for n in range(100)), None)
    assert (learned, policy.trust) == (0, 11)


def test_ghosts_take_no_memory_between_the_periods_that_they_are_served() -> None:
    _, policy = served(news(1_023), None)
    assert policy._ghosts is not None
    assert len(policy._ghosts._trees) == 3
    _, policy = served(news(1_025), None)
    assert policy._ghosts is not None
    assert policy._ghosts._trees == []
    assert policy.trust == 100


def test_trust_that_is_given_stays() -> None:
    _, policy = served(news(200), 3)
    assert policy.trust == 3


def test_learning_is_deterministic() -> None:
    assert served(news(200), None)[0] == served(news(200), None)[0]


def test_chances_fall_with_rank_before_learning() -> None:
    chances = RecurrenceByRank().chances(15)
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(0.633)
    assert chances[7] == pytest.approx(0.5)
    assert chances[14] == pytest.approx(0.367)


def test_learned_shares_are_interpolated_linearly() -> None:
    recurrence = RecurrenceByRank()
    for _ in range(60_000):
        recurrence.learn([(0, 1), (1, 1), (0, 0)])
    assert recurrence.chances(3) == pytest.approx([0.02, 0.98, 0.367], abs=0.001)
    assert recurrence.chances(6)[1:5] == pytest.approx([0.26, 0.74, 0.82725, 0.52025], abs=0.001)


def test_latest_similar_request_counts_more_and_is_not_kept() -> None:
    recurrence = RecurrenceByRank()
    before = recurrence.chances(3)
    assert recurrence.chances(3, [(0, 1), (0, 0), (1, 1)]) == pytest.approx(
        [0.633 * 60 / 68, 0.5, (0.367 * 60 + 8) / 68]
    )
    assert recurrence.chances(3) == before


def test_change_is_noticed_after_much_learning() -> None:
    recurrence = RecurrenceByRank()
    for again, requests in ((0, 100_000), (1, 20_000)):
        for _ in range(requests):
            recurrence.learn([(0, 0), (0, 0), (again, 1)])
    assert recurrence.chances(3)[2] > 0.8


@given(learned=outcomes, latest=outcomes, blocks=st.integers(0, 40))
def test_chances_are_probabilities(learned: Outcomes, latest: Outcomes, blocks: int) -> None:
    recurrence = RecurrenceByRank()
    recurrence.learn(learned)
    chances = recurrence.chances(blocks, latest)
    assert len(chances) == blocks
    assert all(0.02 <= chance <= 0.98 for chance in chances)
