"""Tests that need a CUDA device: large sizes, tuning, and exhausted memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from warmprefix_kernels import context_distance, context_distance_tiles, top_overlap
from warmprefix_kernels._contexts import checked_contexts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture(scope="module")
def many() -> tuple[Any, Any, Any, Any]:
    """Return 20,000 contexts of 0 to 15 blocks, one of 1,024, and a block that most of them hold."""
    rng = np.random.default_rng(11)
    contexts = [rng.choice(3_000, int(length), replace=False) for length in rng.integers(0, 16, 20_000)]
    contexts = [np.union1d(context, [7]) if len(context) else context for context in contexts]
    contexts[1_234] = rng.permutation(3_000)[:1_024]
    offsets = np.cumsum([0, *map(len, contexts)])
    positions = np.concatenate([np.arange(len(context)) for context in contexts])
    return offsets, np.concatenate(contexts), positions, rng.integers(1, 400, 3_000)


@pytest.mark.parametrize("m", [1, 16, 100])
def test_overlaps_equal_those_of_the_cpu(many: tuple[Any, Any, Any, Any], m: int) -> None:
    offsets, ids, _, tokens = many
    on_cuda = top_overlap(offsets, ids, tokens, m, device="cuda")
    on_cpu = top_overlap(offsets, ids, tokens, m, device="cpu")
    by_torch = by_torch_on_cuda(checked_contexts(offsets, ids), tokens, m)
    for cuda, cpu, other in zip(on_cuda, on_cpu, by_torch, strict=True):
        np.testing.assert_array_equal(cuda, cpu)
        np.testing.assert_array_equal(other.cpu().numpy(), cpu)


def by_torch_on_cuda(contexts: Any, tokens: Any, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    from warmprefix_kernels.top_overlap.torch import top_overlap

    return top_overlap(contexts, tokens, m, torch.device("cuda"), 1 << 28)


def test_distances_equal_those_of_the_cpu(many: tuple[Any, Any, Any, Any]) -> None:
    offsets, ids, positions, _ = many
    on_cuda = context_distance(offsets, ids, positions, 0.01, device="cuda")
    np.testing.assert_array_equal(on_cuda, context_distance(offsets, ids, positions, 0.01, device="cpu"))


def test_tensors_stay_on_the_device(many: tuple[Any, Any, Any, Any]) -> None:
    offsets, ids, positions, tokens = (torch.from_numpy(array).cuda() for array in many)
    assert all(found.is_cuda for found in top_overlap(offsets, ids, tokens, 3))
    assert all(tile.is_cuda for _, _, tile in context_distance_tiles(offsets, ids, positions))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the device's memory to 64 MiB more than is in use."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("little_memory")
def test_exhausted_memory_makes_tiles_smaller(
    many: tuple[Any, Any, Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    offsets, ids, positions, tokens = many
    partners, overlaps = top_overlap(offsets, ids, tokens, 8, device="cuda")
    tiles = [tile for _, _, tile in context_distance_tiles(offsets, ids, positions, device="cuda")]
    assert any(message.startswith("no memory for a tile of ") for message in caplog.messages)
    np.testing.assert_array_equal(partners, top_overlap(offsets, ids, tokens, 8, device="cpu")[0])
    assert overlaps.dtype == np.int64
    assert sum(map(len, tiles)) == 20_000 * 19_999 // 2
