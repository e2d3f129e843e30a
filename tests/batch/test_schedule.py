from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_baselines.cluster import schedule

searched = st.lists(st.lists(st.integers(0, 3), max_size=5).map(tuple), max_size=12)


@pytest.mark.parametrize(
    ("paths", "execution"),
    [
        # ContextPilot's figure: C6, C3, C7 and C8 run as C6, C8, C3, C7.
        pytest.param([[0, 0, 2], [0, 1], [1], [0, 0, 3]], [0, 3, 1, 2], id="figure"),
        pytest.param([[0, 1], [0, 1, 2, 3], [0, 1, 2]], [1, 2, 0], id="longest path first"),
        pytest.param(
            [[1, 1, 0, 2], [1, 1, 1, 5], [1, 1, 0, 7], [1, 1, 1, 3]], [0, 2, 3, 1], id="by child number if as long"
        ),
    ],
)
def test_worked_examples(paths: list[list[int]], execution: list[int]) -> None:
    assert schedule(paths) == execution


def test_groups_run_by_number_whatever_their_length() -> None:
    assert schedule([[1, 0, 0], [2, 0], [0], [1, 1]]) == [2, 0, 3, 1]


def test_shorter_paths_do_not_separate_contexts_that_share_more() -> None:
    paths = [[0, 1, 0], [0, 0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 1]]
    assert schedule(paths) == [1, 3, 0, 2, 4]


def test_contexts_at_the_root_run_last() -> None:
    assert schedule([[], [3], [], [0, 1]]) == [3, 1, 0, 2]


def test_schedule_of_no_paths_is_empty() -> None:
    assert schedule([]) == []


def test_deep_paths_need_no_recursion() -> None:
    assert schedule([[0] * depth for depth in range(1, 1_500)]) == list(reversed(range(1_499)))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(searched)
def test_paths_with_common_beginnings_run_together(paths: list[tuple[int, ...]]) -> None:
    execution = schedule(paths)
    assert sorted(execution) == list(range(len(paths)))
    executed = [paths[i] for i in execution]
    for length in range(1, 6):  # paths with an equal beginning are consecutive
        beginnings = [path[:length] for path in executed if len(path) >= length]
        runs = sum(a != b for a, b in pairwise(beginnings)) + bool(beginnings)
        assert runs == len(set(beginnings))
    for at, path in enumerate(executed):
        nearest = max((common(path, other) for other in executed[:at]), default=0)
        assert nearest == (common(path, executed[at - 1]) if at else 0)


@given(searched)
def test_longest_path_of_a_group_runs_first_and_ties_keep_their_order(paths: list[tuple[int, ...]]) -> None:
    execution = schedule(paths)
    for number in range(4):
        group = [paths[i] for i in execution if paths[i][:1] == (number,)]
        assert not group or len(group[0]) == max(map(len, group))
    for path in set(paths):
        same = [i for i in execution if paths[i] == path]
        assert same == sorted(same)
