"""Bad input: each error names the argument, the value and the allowed values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warmprefix_kernels import context_distance, context_distance_tiles, top_overlap

GOOD: dict[str, Any] = {"offsets": [0, 2, 3], "ids": [1, 0, 1]}
TOKENS = [100, 100]
PLACES = [0, 1, 0]

BAD_CONTEXTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ids": [1, 2**31, 1]}, ValueError, "ids must be 0 to 2147483647, got 2147483648 at index 1"),
    ({"ids": np.array([1, 2**63, 1], np.uint64)}, ValueError, "ids must be 0 to .* got 9223372036854775808"),
    ({"ids": [1, -1, 1]}, ValueError, "ids must be 0 to 2147483647, got -1 at index 1"),
    ({"ids": [1, 1, 0]}, ValueError, "ids must be distinct within a context, got 1 twice in context 0"),
    ({"offsets": [0, 4], "ids": [1, 3, 0, 1]}, ValueError, "ids must be distinct .* got 1 twice in context 0"),
    ({"ids": [1.0, 0.0, 1.0]}, TypeError, "ids must be integers below 2\\*\\*63, got float64"),
    ({"ids": [[1, 0, 1]]}, ValueError, "ids must have one dimension, got shape \\(1, 3\\)"),
    ({"offsets": []}, ValueError, "offsets must begin with 0 and end with the number of ids, 3, got an empty array"),
    ({"offsets": [1, 2, 3]}, ValueError, "offsets must begin with 0 .* got 1 and 3"),
    ({"offsets": [0, 2]}, ValueError, "offsets must begin with 0 .* got 0 and 2"),
    ({"offsets": [0, 2, 4]}, ValueError, "offsets must be 0 to 3, got 4 at index 2"),
    ({"offsets": [0, 2, 1, 3]}, ValueError, "offsets must not fall, got 2 before 1 at index 1"),
    ({"offsets": [0, -1, 3]}, ValueError, "offsets must be 0 to 3, got -1 at index 1"),
]


@pytest.mark.parametrize("device", ["numpy", "cpu"])
@pytest.mark.parametrize(("change", "error", "message"), BAD_CONTEXTS)
def test_bad_contexts_are_refused(device: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {**GOOD, **change}
    with pytest.raises(error, match=message):
        top_overlap(**given, tokens=[100] * 4, m=1, device=device)
    with pytest.raises(error, match=message):
        context_distance(**given, positions=[0] * len(given["ids"]), device=device)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": [100]}, ValueError, "tokens must hold the length of every id up to 1, got 1 lengths"),
        ({"tokens": [100, -1]}, ValueError, "tokens must be 0 to .* got -1 at index 1"),
        ({"tokens": [1.5, 2]}, TypeError, "tokens must be integers"),
        ({"m": 0}, ValueError, "m must be 1 to 1024, got 0"),
        ({"m": 1_025}, ValueError, "m must be 1 to 1024, got 1025"),
        ({"m": 1.5}, TypeError, "m must be an integer, got float"),
        ({"tile_bytes": 0}, ValueError, "tile_bytes must be 1 or more, or None, got 0"),
        ({"device": "tpu9000"}, ValueError, "device must be auto, numpy, or a torch device .* got 'tpu9000'"),
    ],
)
def test_bad_arguments_of_top_overlap_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        top_overlap(**{**GOOD, "tokens": TOKENS, "m": 1, "device": "cpu", **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": [0, 1]}, ValueError, "positions must have one entry per id, got 2 positions for 3 ids"),
        ({"positions": [0, -1, 0]}, ValueError, "positions must be 0 to .* got -1 at index 1"),
        ({"positions": [0, 2**21, 0]}, ValueError, "positions must be 0 to 2097151, got 2097152"),
        ({"alpha": 0.0009}, ValueError, "alpha must be 0.001 to 0.01, got 0.0009"),
        ({"alpha": 0.011}, ValueError, "alpha must be 0.001 to 0.01, got 0.011"),
        ({"alpha": float("nan")}, ValueError, "alpha must be 0.001 to 0.01, got nan"),
        ({"tile_bytes": -5}, ValueError, "tile_bytes must be 1 or more, or None, got -5"),
    ],
)
def test_bad_arguments_of_context_distance_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    for function in (context_distance, context_distance_tiles):  # tiles are checked before the first one
        with pytest.raises(error, match=message):
            function(**{**GOOD, "positions": PLACES, "device": "cpu", **change})


def test_a_context_with_too_many_blocks_is_refused() -> None:
    count = 2**21 + 1
    with pytest.raises(ValueError, match=r"offsets must give each context at most 2097152 ids, got .* 2097153"):
        context_distance(np.array([0, count]), np.arange(count), np.zeros(count, np.int64), device="numpy")


def test_arguments_are_not_changed() -> None:
    offsets, ids, positions = np.array([0, 3, 5]), np.array([9, 1, 5, 5, 1]), np.array([0, 1, 2, 0, 1])
    context_distance(offsets, ids, positions, device="cpu")
    top_overlap(offsets, ids, np.ones(10, np.int64), 1, device="cpu")
    assert (offsets.tolist(), ids.tolist(), positions.tolist()) == ([0, 3, 5], [9, 1, 5, 5, 1], [0, 1, 2, 0, 1])
