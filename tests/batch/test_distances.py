from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_baselines.context_index import context_distance
from warmprefix_kernels import distances
from warmprefix_kernels.distances import condensed_distances, ragged

alphas = st.floats(0.001, 0.01)
batches = st.lists(st.lists(st.integers(0, 12), max_size=8, unique=True), max_size=9)


def one_by_one(contexts: list[list[int]], alpha: float) -> list[float]:
    return [float(np.float32(context_distance(a, b, alpha))) for a, b in combinations(contexts, 2)]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        # ContextPilot's worked example.
        ([3, 5, 1, 7], [2, 6, 3, 5], 0.502),
        ([2, 6, 3, 5], [3, 5, 8, 9], 0.502),
        ([2, 6, 3, 5], [2, 6, 4, 0], 0.5),
        ([3, 5, 1, 7], [3, 5, 8, 9], 0.5),
        ([3, 5, 1, 7], [2, 6, 4, 0], 1.0),
        # Derived from Eq. 1.
        ([1, 2, 3], [3, 2, 1], 0.0013333333),
        ([1, 2, 3, 4], [3, 4, 5, 6], 0.502),
        ([2, 1, 3], [2, 6, 1], 0.3338333333),
        ([2, 1, 3], [4, 1, 0], 0.6666666667),
        ([1, 2], [], 1.0),
        ([1, 2], [3, 4], 1.0),
        ([1, 2, 3], [1, 2, 3], 0.0),
        ([], [], 1.0),
    ],
)
def test_worked_examples(a: list[int], b: list[int], distance: float) -> None:
    assert condensed_distances(ragged([a, b]), device="cpu") == pytest.approx([distance], abs=1e-6)
    assert condensed_distances(ragged([b, a]), device="cpu") == pytest.approx([distance], abs=1e-6)


@given(batches, alphas)
def test_condensed_distances_equal_those_of_single_pairs(contexts: list[list[int]], alpha: float) -> None:
    found = condensed_distances(ragged(contexts), alpha, "cpu")
    assert found.dtype == np.float32
    assert found.tolist() == one_by_one(contexts, alpha)


@pytest.mark.parametrize("cells", [1, 7, 64, 1 << 20])
def test_result_does_not_depend_on_the_size_of_parts(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_CELLS_AT_ONCE", cells)
    rng = random.Random(3)
    contexts = [rng.sample(range(40), rng.randrange(12)) for _ in range(30)]
    steps: list[int] = []
    found = condensed_distances(ragged(contexts), device="cpu", progress=lambda stage, done, total: steps.append(done))
    assert found.tolist() == one_by_one(contexts, 0.001)
    assert steps[-1] == 30
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("count", [0, 1])
def test_no_pairs_give_an_empty_array(count: int) -> None:
    assert condensed_distances(ragged([[1, 2]] * count), device="cpu").shape == (0,)


def test_long_contexts_with_large_block_numbers() -> None:
    rng = random.Random(5)
    numbers = [2**31 - 1 - i for i in range(1_500)]
    contexts = [rng.sample(numbers, 1_024) for _ in range(4)]
    assert condensed_distances(ragged(contexts), device="cpu").tolist() == one_by_one(contexts, 0.001)


@given(batches)
def test_ragged_arrays_can_be_read_back(contexts: list[list[int]]) -> None:
    offsets, ids, positions = ragged(contexts)
    assert [array.dtype.name for array in (offsets, ids, positions)] == ["int64", "int32", "int32"]
    for i, context in enumerate(contexts):
        row = slice(int(offsets[i]), int(offsets[i + 1]))
        assert ids[row].tolist() == sorted(context)
        assert [context[position] for position in positions[row]] == sorted(context)
