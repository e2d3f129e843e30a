"""Partitions of requests: what meets where."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from warmprefix import BatchRequest
from warmprefix_ray.partitions import Outline, Partitions, outline_of


def outlines(count: int, seed: int = 0) -> list[Outline]:
    """Make requests in 40 topics of ten blocks: with the first three of them, and two of the rest."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        topic = rng.randrange(40)
        keys = [10 * topic, 10 * topic + 1, 10 * topic + 2, *rng.sample(range(10 * topic + 3, 10 * topic + 10), 2)]
        made.append(Outline(seed << 32 | i, tuple(keys), (100,) * 5))
    return made


def test_outlines_of_tenants_share_no_key() -> None:
    requests = [BatchRequest(1, ["a", "b", "a"], tenant=tenant) for tenant in (None, "x", "y")]
    keys = [outline_of(request).keys for request in requests]
    assert [len(own) for own in keys] == [2, 2, 2]  # a repeated block counts once
    assert len({key for own in keys for key in own}) == 6
    assert len({outline_of(request).id for request in requests}) == 3


def test_requests_of_the_sample_are_cut_into_equal_parts_that_share_little() -> None:
    sample = outlines(2_000)
    numbers = Partitions(sample, 8).assign(sample)
    sizes = Counter(numbers)
    assert set(sizes) == set(range(8))
    assert max(sizes.values()) < 1.3 * 250
    partitions_of_topics = Counter(
        {(outline.keys[0] // 10, number) for outline, number in zip(sample, numbers, strict=True)}
    )
    assert len(partitions_of_topics) <= 40 + 7  # a cut splits one topic at most


def test_other_requests_go_where_their_blocks_are() -> None:
    sample = outlines(2_000)
    partitions = Partitions(sample, 8)
    others = outlines(2_000, seed=1)
    numbers = partitions.assign(others)
    assert max(Counter(numbers).values()) < 1.5 * 250
    of_topic: dict[int, Counter[int]] = {}
    for outline, number in zip(others, numbers, strict=True):
        of_topic.setdefault(outline.keys[0] // 10, Counter())[number] += 1
    together = sum(max(counts.values()) for counts in of_topic.values())
    assert together > 0.9 * len(others)


def test_assignment_does_not_depend_on_the_other_requests() -> None:
    partitions = Partitions(outlines(500), 4)
    others = outlines(300, seed=1)
    one_by_one = [partitions.assign([outline])[0] for outline in others]
    assert partitions.assign(others) == one_by_one


def test_equal_contexts_meet_if_the_sample_has_none_of_their_blocks() -> None:
    partitions = Partitions(outlines(100), 8)
    unseen = [Outline(10**6 + i, (10**9 + i % 20, 10**9 + 100), (5, 5)) for i in range(60)]
    numbers = partitions.assign(unseen)
    assert numbers[:20] == numbers[20:40] == numbers[40:]
    assert len(set(numbers)) > 2


@pytest.mark.parametrize("sample", [[], [Outline(1, (), ())]])
def test_without_blocks_every_request_still_has_a_partition(sample: list[Outline]) -> None:
    assert set(Partitions(sample, 3).assign([Outline(7, (), ()), Outline(8, (5,), (0,))])) <= {0, 1, 2}


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="partitions must be 1 or more, got 0"):
        Partitions([], 0)
