"""Batches of contexts, and each kernel in each implementation.

Triton kernels run on a CUDA device, or else interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

from warmprefix_kernels import context_distance, top_overlap
from warmprefix_kernels._contexts import checked_contexts
from warmprefix_kernels._tiles import bytes_of_tile
from warmprefix_kernels.context_distance._packing import packing_for

TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Batch(NamedTuple):
    """Contexts in relevance order, as flat arrays that are not sorted by id."""

    contexts: list[list[int]]
    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


def batch_of(contexts: Sequence[Sequence[int]]) -> Batch:
    lengths = [len(context) for context in contexts]
    return Batch(
        [list(context) for context in contexts],
        np.cumsum([0, *lengths]),
        np.array([block for context in contexts for block in context], np.int64),
        np.array([place for length in lengths for place in range(length)], np.int64),
    )


def distances_by_numpy(batch: Batch, alpha: float, tile_bytes: int | None) -> npt.NDArray[np.float32]:
    return context_distance(*batch[1:], alpha, device="numpy", tile_bytes=tile_bytes)


def distances_by_torch(batch: Batch, alpha: float, tile_bytes: int | None) -> npt.NDArray[np.float32]:
    return context_distance(*batch[1:], alpha, device="cpu", tile_bytes=tile_bytes)


def distances_by_triton(batch: Batch, alpha: float, tile_bytes: int | None) -> npt.NDArray[np.float32]:
    kernel: Any = import_module("warmprefix_kernels.context_distance.triton")
    contexts = checked_contexts(*batch[1:])
    budget = bytes_of_tile(TRITON_DEVICE.type, tile_bytes)
    tiles = kernel.context_distance_tiles(contexts, packing_for(contexts), alpha, TRITON_DEVICE, budget)
    return np.concatenate([np.zeros(0, np.float32), *(tile.cpu().numpy() for _, _, tile in tiles)])


Overlaps = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]


def overlaps_by_numpy(batch: Batch, tokens: Sequence[int], m: int, tile_bytes: int | None) -> Overlaps:
    return top_overlap(batch.offsets, batch.ids, tokens, m, device="numpy", tile_bytes=tile_bytes)


def overlaps_by_torch(batch: Batch, tokens: Sequence[int], m: int, tile_bytes: int | None) -> Overlaps:
    return top_overlap(batch.offsets, batch.ids, tokens, m, device="cpu", tile_bytes=tile_bytes)


def overlaps_by_triton(batch: Batch, tokens: Sequence[int], m: int, tile_bytes: int | None) -> Overlaps:
    kernel: Any = import_module("warmprefix_kernels.top_overlap.triton")
    contexts = checked_contexts(batch.offsets, batch.ids)
    budget = bytes_of_tile(TRITON_DEVICE.type, tile_bytes)
    partners, overlaps = kernel.top_overlap(contexts, np.array(tokens, np.int64), m, TRITON_DEVICE, budget)
    return partners.cpu().numpy(), overlaps.cpu().numpy()


@pytest.fixture(scope="session")
def make_batch() -> Callable[[Sequence[Sequence[int]]], Batch]:
    return batch_of


@pytest.fixture(scope="session", params=[distances_by_numpy, distances_by_torch, distances_by_triton])
def distances_by(request: pytest.FixtureRequest) -> Callable[[Batch, float, int | None], npt.NDArray[np.float32]]:
    """Compute the distances of a batch for an alpha, in tiles of a number of bytes."""
    chosen: Callable[[Batch, float, int | None], npt.NDArray[np.float32]] = request.param
    return chosen


@pytest.fixture(scope="session", params=[overlaps_by_numpy, overlaps_by_torch, overlaps_by_triton])
def overlaps_by(request: pytest.FixtureRequest) -> Callable[[Batch, Sequence[int], int, int | None], Overlaps]:
    """Find the best partners: of a batch, by tokens of blocks, `m` each, in tiles of bytes."""
    chosen: Callable[[Batch, Sequence[int], int, int | None], Overlaps] = request.param
    return chosen


@pytest.fixture(scope="session")
def named_batches() -> dict[str, Batch]:
    """Return batches of shapes at which kernels break; block ids are below 3,000."""
    rng = np.random.default_rng(7)

    def drawn(lengths: Sequence[int], of: int) -> list[list[int]]:
        return [rng.permutation(of)[:length].tolist() for length in lengths]

    contexts: dict[str, list[list[int]]] = {
        "no context": [],
        "one context": [[3, 1, 2]],
        "one empty context": [[]],
        "only empty contexts": [[], [], []],
        "one block each": [[5], [5], [6], [5]],
        "empty ones in between": [[], [4, 2], [], [2, 9], [], []],
        "nothing shared": [[i, i + 100] for i in range(20)],
        "all identical": [[4, 0, 7, 2]] * 19,
        "the same blocks in another order": drawn([12] * 17, 12),
        "heavy ties": [[i % 3, 10 + i % 2] for i in range(40)],
        "one long one among short ones": [*drawn([3] * 20, 60), *drawn([1_024], 1_024), *drawn([4] * 10, 60)],
        "long ones": drawn([1_024, 1_000, 1_024, 513], 1_400),
        "longer than 1,024": drawn([1_100, 1_300, 3], 1_500),
        "sixteen": drawn([5] * 16, 11),
        "seventeen": drawn([5] * 17, 11),
        "ragged": drawn(rng.integers(0, 15, 60).tolist(), 40),
    }
    return {name: batch_of(these) for name, these in contexts.items()}
