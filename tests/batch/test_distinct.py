from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix_kernels.distinct_sets import Group, split

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]

batches = st.lists(st.lists(st.integers(0, 7), max_size=6, unique=True).map(sorted), max_size=12)


def test_most_valuable_block_is_set_apart_first() -> None:
    """Block 5 saves 9 in two contexts, block 0 saves 6 in three; 7 goes with 5."""
    contexts = [[0, 5, 7], [5, 7], [0], [0, 2], [1]]
    assert split(contexts, TOKENS, 0) == [
        Group(-1, (), [4]),
        Group(0, (0,), [2, 3]),
        Group(0, (5, 7), [0, 1]),
    ]


def test_batch_within_the_limit_stays_together() -> None:
    contexts = [[0, 1], [0, 2], [0]]
    assert split(contexts, TOKENS, 11) == [Group(-1, (), [0, 1, 2])]
    assert len(split(contexts, TOKENS, 10)) == 2


def test_no_contexts_make_one_empty_group() -> None:
    assert split([], TOKENS, 0) == [Group(-1, (), [])]


def members_of(groups: list[Group]) -> list[list[int]]:
    """Return the contexts set apart for each group, with those of groups below it."""
    members = [list(group.rest) for group in groups]
    for number in range(len(groups) - 1, 0, -1):
        members[groups[number].parent] += members[number]
    return members


@given(batches, st.integers(0, 60))
@example([[0, 1, 2]] * 5, 0)
def test_every_context_is_in_one_matching_group(contexts: list[list[int]], limit: int) -> None:
    groups = split(contexts, TOKENS, limit)
    assert sorted(x for group in groups for x in group.rest) == list(range(len(contexts)))
    assert [group.parent < number for number, group in enumerate(groups)] == [True] * len(groups)
    assert [group.parent == -1 for group in groups] == [True] + [False] * (len(groups) - 1)
    for number, (group, members) in enumerate(zip(groups, members_of(groups), strict=True)):
        if number:
            assert len(members) > 1
            assert set(group.blocks) == set.intersection(*(set(contexts[x]) for x in members))
            assert set(group.blocks) > set(groups[group.parent].blocks)


@given(batches, st.integers(0, 60))
def test_rest_exceeds_the_limit_only_if_it_shares_nothing(contexts: list[list[int]], limit: int) -> None:
    for group in split(contexts, TOKENS, limit):
        counts = Counter(block for x in group.rest for block in contexts[x] if block not in group.blocks)
        assert sum(count**2 for count in counts.values()) <= limit or max(counts.values()) == 1


@pytest.mark.parametrize("limit", [0, 1_000])
def test_blocks_that_all_share_are_found_together(limit: int) -> None:
    """One block at a time would read each of these contexts a thousand times."""
    contexts = [[*range(1_000), 1_000 + x] for x in range(200)]
    groups = split(contexts, [1] * 1_200, limit)
    assert [(group.parent, len(group.blocks), len(group.rest)) for group in groups] == [(-1, 0, 0), (0, 1_000, 200)]


def test_deep_nesting_needs_no_recursion() -> None:
    contexts = [[*range(length), 200 + length] for length in range(200)]
    groups = split(contexts, [1] * 400, 0)
    assert sorted(x for group in groups for x in group.rest) == list(range(200))
    assert max(len(group.blocks) for group in groups) == 198
