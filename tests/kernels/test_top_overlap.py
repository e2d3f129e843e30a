"""The best partners in every implementation, compared with their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix_kernels import top_overlap

By = Callable[[Any, Sequence[int], int, "int | None"], tuple[Any, Any]]
Make = Callable[[Sequence[Sequence[int]]], Any]

contexts_of_blocks = st.lists(st.lists(st.integers(0, 12), max_size=9, unique=True), max_size=14)


def defined(
    contexts: Sequence[Sequence[int]], tokens: Sequence[int], m: int
) -> tuple[list[list[int]], list[list[int]]]:
    partners, overlaps = [], []
    for i, own in enumerate(contexts):
        shared = [(sum(tokens[b] for b in set(own) & set(other)), j) for j, other in enumerate(contexts) if j != i]
        best = sorted((overlap, j) for overlap, j in ((-overlap, j) for overlap, j in shared if overlap > 0))[:m]
        missing = m - len(best)
        partners.append([j for _, j in best] + [-1] * missing)
        overlaps.append([-overlap for overlap, _ in best] + [0] * missing)
    return partners, overlaps


@settings(max_examples=settings().max_examples // 6, suppress_health_check=[HealthCheck.too_slow])
@given(
    contexts=contexts_of_blocks,
    tokens=st.lists(st.integers(0, 5), min_size=13, max_size=13),  # many ties, and blocks without tokens
    m=st.integers(1, 20),
    tile_bytes=st.sampled_from([1, 400, None]),
)
def test_all_implementations_equal_the_definition(
    overlaps_by: By, make_batch: Make, contexts: list[list[int]], tokens: list[int], m: int, tile_bytes: int | None
) -> None:
    partners, overlaps = overlaps_by(make_batch(contexts), tokens, m, tile_bytes)
    assert (partners.dtype, overlaps.dtype) == (np.int32, np.int64)
    assert partners.shape == overlaps.shape == (len(contexts), m)
    assert (partners.tolist(), overlaps.tolist()) == defined(contexts, tokens, m)


@pytest.mark.parametrize("m", [2, 17])
def test_all_implementations_equal_the_definition_at_named_shapes(
    overlaps_by: By, named_batches: dict[str, Any], m: int
) -> None:
    tokens = np.random.default_rng(3).integers(1, 400, 3_000).tolist()
    for name, batch in named_batches.items():
        partners, overlaps = overlaps_by(batch, tokens, m, None)
        assert (partners.tolist(), overlaps.tolist()) == defined(batch.contexts, tokens, m), name


@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("sum_type", [torch.int32, torch.int64])
def test_triton_selects_from_several_blocks_of_columns(sum_type: torch.dtype, m: int) -> None:
    """Use rows of ascending sums (each replaces a kept one), descending sums, ties, and zeros."""
    select: Any = import_module("warmprefix_kernels.top_overlap.triton").select
    device, n, first_row = "cuda" if torch.cuda.is_available() else "cpu", 3_001, 2
    rng = np.random.default_rng(1)
    rows = [np.arange(n), np.arange(n)[::-1], rng.integers(0, 3, n), np.zeros(n), rng.integers(0, 2**31, n)]
    sums = np.zeros((len(rows), 3_008), np.int64)
    sums[:, :n] = rows
    shape = (first_row + len(rows), m)
    partners = torch.full(shape, -7, dtype=torch.int32, device=device)
    overlaps = torch.full(shape, -7, dtype=torch.int64, device=device)
    given = torch.from_numpy(sums).to(device, sum_type)
    select[(len(rows),)](partners, overlaps, given, 3_008, first_row=first_row, n=n, m=m, bits=12, size=3, WIDTH=64)
    best = np.argsort(-sums, axis=1, kind="stable")[:, :m]
    shared = np.take_along_axis(sums, best, axis=1)
    np.testing.assert_array_equal(overlaps.cpu().numpy()[first_row:], shared)
    np.testing.assert_array_equal(partners.cpu().numpy()[first_row:], np.where(shared > 0, best, -1))
    assert bool((partners[:first_row] == -7).all())


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**40, 2**57])
def test_sums_beyond_32_bits_are_exact(overlaps_by: By, make_batch: Make, tokens: int) -> None:
    batch = make_batch([[0, 1, 2], [2, 0], [0, 1], [1, 3]])
    partners, overlaps = overlaps_by(batch, [tokens, tokens + 1, tokens + 2, 1], 2, None)
    assert partners.tolist() == [[1, 2], [0, 2], [0, 3], [0, 2]]
    assert overlaps.tolist() == [
        [2 * tokens + 2, 2 * tokens + 1],
        [2 * tokens + 2, tokens],
        [2 * tokens + 1, tokens + 1],
        [tokens + 1, tokens + 1],
    ]


def test_the_largest_allowed_sum(overlaps_by: By, make_batch: Make) -> None:
    batch = make_batch([[0, 1], [0, 1], [1]])
    most = 2**63 // 4 - 1
    partners, overlaps = overlaps_by(batch, [most - 5, 5], 2, None)
    assert partners.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert overlaps.tolist() == [[most, 5], [most, 5], [5, 5]]


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_a_sum_above_the_largest_is_refused(device: str) -> None:
    tokens = [2**63 // 4 - 5, 5]
    with pytest.raises(
        ValueError, match=f"tokens of a context must sum to less than {2**61} .* got {2**61} in context 1"
    ):
        top_overlap([0, 1, 3, 4], [0, 0, 1, 1], tokens, 1, device=device)


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_tensors_give_tensors(device: str, named_batches: dict[str, Any]) -> None:
    batch = named_batches["ragged"]
    tokens = np.arange(3_000)
    offsets, ids = torch.from_numpy(batch.offsets), torch.from_numpy(batch.ids)
    found = top_overlap(offsets, ids, torch.from_numpy(tokens), 4, device=device)
    expected = top_overlap(batch.offsets, batch.ids, tokens, 4, device=device)
    assert [tensor.dtype for tensor in found] == [torch.int32, torch.int64]
    for tensor, array in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
