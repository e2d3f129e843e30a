"""Eq. 1 in every implementation, compared with its definition and the paper's examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix_kernels import context_distance, context_distance_tiles
from warmprefix_kernels._contexts import checked_contexts
from warmprefix_kernels.context_distance import naive

By = Callable[[Any, float, "int | None"], Any]
Make = Callable[[Sequence[Sequence[int]]], Any]

PAPER = [  # at alpha = 0.001
    ([3, 5, 1, 7], [2, 6, 3, 5], 0.502),
    ([2, 6, 3, 5], [3, 5, 8, 9], 0.502),
    ([2, 6, 3, 5], [2, 6, 4, 0], 0.5),
    ([3, 5, 1, 7], [3, 5, 8, 9], 0.5),
    ([3, 5, 1, 7], [2, 6, 4, 0], 1.0),
    ([1, 2, 3], [3, 2, 1], 0.0013333333),
    ([1, 2, 3, 4], [3, 4, 5, 6], 0.502),
    ([2, 1, 3], [2, 6, 1], 0.3338333333),
    ([2, 1, 3], [4, 1, 0], 0.6666666667),
    ([1, 2], [], 1.0),
    ([1, 2], [3, 4], 1.0),
    ([1, 2, 3], [1, 2, 3], 0.0),
]
SMALL_TILES = 40

contexts_of_blocks = st.lists(st.lists(st.integers(0, 12), max_size=9, unique=True), max_size=14)


def defined(contexts: Sequence[Sequence[int]], alpha: float) -> list[float]:
    return [eq_1(a, b, alpha) for a, b in combinations(contexts, 2)]


def eq_1(a: Sequence[int], b: Sequence[int], alpha: float) -> float:
    shared = set(a) & set(b)
    if not shared:
        return 1.0
    gaps = [abs(a.index(block) - b.index(block)) for block in shared]
    return 1 - len(shared) / max(len(a), len(b)) + alpha * sum(gaps) / len(shared)


@pytest.mark.parametrize(("a", "b", "distance"), PAPER)
def test_examples_of_the_paper(distances_by: By, make_batch: Make, a: list[int], b: list[int], distance: float) -> None:
    assert distances_by(make_batch([a, b]), 0.001, None) == pytest.approx([distance], abs=1e-6)
    assert distances_by(make_batch([b, a]), 0.001, None) == pytest.approx([distance], abs=1e-6)


@given(contexts=contexts_of_blocks, alpha=st.floats(0.001, 0.01))
def test_reference_equals_the_definition(make_batch: Make, contexts: list[list[int]], alpha: float) -> None:
    batch = make_batch(contexts)
    found = naive.context_distance(checked_contexts(batch.offsets, batch.ids, batch.positions), alpha)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, defined(contexts, alpha), rtol=1e-12)


@settings(max_examples=settings().max_examples // 10, suppress_health_check=[HealthCheck.too_slow])
@given(contexts=contexts_of_blocks, alpha=st.floats(0.001, 0.01), tile_bytes=st.sampled_from([1, SMALL_TILES, None]))
def test_all_implementations_equal_the_reference(
    distances_by: By, make_batch: Make, contexts: list[list[int]], alpha: float, tile_bytes: int | None
) -> None:
    found = distances_by(make_batch(contexts), alpha, tile_bytes)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array(defined(contexts, alpha), np.float32))  # rounded once, at the end


def test_all_implementations_equal_the_reference_at_named_shapes(
    distances_by: By, named_batches: dict[str, Any]
) -> None:
    for name, batch in named_batches.items():
        exact = naive.context_distance(checked_contexts(batch.offsets, batch.ids, batch.positions), 0.01)
        for tile_bytes in (None, 1_000):
            found = distances_by(batch, 0.01, tile_bytes)
            np.testing.assert_array_equal(found, exact.astype(np.float32), err_msg=f"{name}, {tile_bytes}")


def test_ids_may_be_sparse_and_up_to_the_largest(distances_by: By, make_batch: Make) -> None:
    batch = make_batch([[2**31 - 1, 0, 77], [77, 2**31 - 1], [2**31 - 2]])
    assert distances_by(batch, 0.01, None) == pytest.approx([1 - 2 / 3 + 0.015, 1, 1], abs=1e-6)


def test_positions_may_exceed_the_number_of_blocks(distances_by: By, make_batch: Make) -> None:
    batch = make_batch([[1, 2], [2, 1]])._replace(positions=np.array([0, 2**21 - 1, 5, 2**21 - 1]))
    gaps = abs(0 - (2**21 - 1)) + abs((2**21 - 1) - 5)
    assert distances_by(batch, 0.01, None) == pytest.approx([0.01 * gaps / 2], rel=1e-6)


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_tiles_concatenate_to_the_condensed_distances(device: str, named_batches: dict[str, Any]) -> None:
    batch = named_batches["ragged"]
    whole = context_distance(*batch[1:], device=device)
    tiles = list(context_distance_tiles(*batch[1:], device=device, tile_bytes=2_000))
    assert len(tiles) > 2
    assert [start for start, _, _ in tiles] == [0, *(stop for _, stop, _ in tiles[:-1])]
    assert tiles[-1][1] == len(batch.contexts)
    for start, stop, distances in tiles:
        assert len(distances) == sum(len(batch.contexts) - 1 - row for row in range(start, stop))
    np.testing.assert_array_equal(np.concatenate([distances for _, _, distances in tiles]), whole)


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_tensors_give_tensors(device: str, named_batches: dict[str, Any]) -> None:
    batch = named_batches["ragged"]
    offsets, ids, positions = map(torch.from_numpy, batch[1:])
    found = context_distance(offsets, ids, positions, device=device)
    (tile,) = (tile for _, _, tile in context_distance_tiles(offsets, ids, positions, device=device))
    assert found.dtype == tile.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), context_distance(*batch[1:], device=device))
    np.testing.assert_array_equal(found.numpy(), tile.numpy())
