"""Use of a CUDA device, and the arrays that reach it.

torch and the kernels are replaced, so that these tests run without a device.
"""

from __future__ import annotations

import sys
from itertools import combinations
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warmprefix import MissingExtraError
from warmprefix_baselines.cluster import ContextIndexPlanner
from warmprefix_baselines.context_index import context_distance
from warmprefix_kernels import distances
from warmprefix_kernels.batch_device import use_cuda
from warmprefix_kernels.distances import best_overlaps_on_cuda, condensed_distances, ragged


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "torch", cuda=SimpleNamespace(is_available=lambda: False))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "torch", cuda=SimpleNamespace(is_available=lambda: True))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("cuda")
def test_device_is_used_on_request_or_if_it_pays() -> None:
    assert not use_cuda("cpu", 1_000_000, 100)
    assert not use_cuda("auto", 99, 100)
    assert use_cuda("auto", 100, 100)
    assert use_cuda("cuda", 0, 100)


@pytest.mark.usefixtures("no_cuda")
def test_cpu_is_used_without_a_cuda_device() -> None:
    assert not use_cuda("auto", 100, 100)
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        use_cuda("cuda", 100, 100)


@pytest.mark.usefixtures("no_torch")
def test_missing_torch_is_named_if_cuda_is_requested() -> None:
    assert not use_cuda("cpu", 100, 100)
    assert not use_cuda("auto", 100, 100)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[gpu\]") as caught:
        use_cuda("cuda", 100, 100)
    assert (caught.value.extra, caught.value.module) == ("gpu", "torch")
    with pytest.raises(MissingExtraError, match=r"pip install .*\[gpu\]"):
        ContextIndexPlanner(device="cuda").arrange([[0], [1]], [1, 1], lambda *_: None)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda, got 'tpu'"):
        use_cuda("tpu", 100, 100)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("cuda")
def test_distances_are_computed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [[4, 1, 2], [2, 4], [], [1, 9]]

    def on_device(offsets: Any, ids: Any, positions: Any, alpha: float, *, device: str) -> object:
        assert device == "cuda"
        rows = [range(offsets[i], offsets[i + 1]) for i in range(len(offsets) - 1)]
        given = [[int(ids[e]) for e in sorted(row, key=lambda e: int(positions[e]))] for row in rows]
        assert given == contexts
        return np.array([context_distance(a, b, alpha) for a, b in combinations(given, 2)], np.float32)

    stand_in(monkeypatch, "warmprefix_kernels", context_distance=on_device)
    steps: list[tuple[str, int, int]] = []
    found = condensed_distances(ragged(contexts), 0.002, "cuda", progress=lambda *step: steps.append(step))
    assert found.tolist() == condensed_distances(ragged(contexts), 0.002, "cpu").tolist()
    assert steps == [("distances", 4, 4)]

    monkeypatch.setattr(distances, "DISTANCES_PAY_FROM", 4)
    assert condensed_distances(ragged(contexts), 0.002, "auto").tolist() == found.tolist()
    planned = ContextIndexPlanner(device="cuda").arrange(contexts, [1] * 10, lambda *_: None)
    assert planned == ContextIndexPlanner(device="cpu").arrange(contexts, [1] * 10, lambda *_: None)


def test_overlaps_are_computed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, tokens = [[1, 2], [2], [1, 2]], [0, 5, 7]

    def on_device(offsets: Any, ids: Any, lengths: Any, m: int, *, device: str) -> object:
        assert [array.tolist() for array in (offsets, ids, lengths)] == [[0, 2, 3, 5], [1, 2, 2, 1, 2], tokens]
        assert [array.dtype.name for array in (offsets, ids, lengths)] == ["int64", "int32", "int64"]
        assert (m, device) == (1, "cuda")
        return np.array([[2], [0], [0]], np.int32), np.array([[12], [7], [12]], np.int64)

    stand_in(monkeypatch, "warmprefix_kernels", top_overlap=on_device)
    assert best_overlaps_on_cuda(contexts, tokens) == [12, 7, 12]
