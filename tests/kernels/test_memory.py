"""Scarce memory makes tiles smaller and changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from warmprefix_kernels._tiles import tiles

SCARCE = """
import logging, resource, sys
import numpy as np
import torch
from warmprefix_kernels import context_distance_tiles, top_overlap

torch.set_num_threads(1)
device = sys.argv[1]
rng = np.random.default_rng(5)
count = 3_000
ids = np.concatenate([rng.permutation(400)[:12] for _ in range(count)])
offsets, positions = np.arange(count + 1) * 12, np.tile(np.arange(12), count)
tokens = rng.integers(1, 500, 400)

def results(tile_bytes):
    distances = [(tile.sum(dtype=np.float64), start, stop) for start, stop, tile in
                 context_distance_tiles(offsets, ids, positions, device=device, tile_bytes=tile_bytes)]
    partners, overlaps = top_overlap(offsets, ids, tokens, 8, device=device, tile_bytes=tile_bytes)
    return len(distances), sum(s for s, _, _ in distances), partners.tolist(), overlaps.tolist()

plenty = results(1 << 21)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
logging.basicConfig(format="%(message)s", stream=sys.stdout)
scarce = results(1 << 40)  # more than there is
assert scarce[2:] == plenty[2:], "another result"
assert abs(scarce[1] - plenty[1]) < 1e-3 * plenty[1], "another distance"
print("tiles", scarce[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the memory limit of a process")
@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_results_are_the_same_with_little_memory(device: str) -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", SCARCE, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    *warnings, last = done.stdout.splitlines()
    assert int(last.removeprefix("tiles ")) > 1
    assert warnings
    assert all(line.startswith("no memory for a tile of ") for line in warnings)


def exponential(start: int, stop: int) -> int:
    """Allocate 16 times the memory for each further row: a few rows always fit, and 16 never do."""
    return np.empty(1 << min(4 * (stop - start), 60), np.uint8).size


def test_tiles_cover_every_row_once_and_fit() -> None:
    needed = np.cumsum([0, 5, 1, 30, 2, 2, 2, 9])
    found = [(start, stop) for start, stop, _ in tiles(needed, 10, exponential)]
    assert found == [(0, 2), (2, 3), (3, 6), (6, 7)]
    assert list(tiles(np.zeros(1, np.int64), 10, exponential)) == []


def test_tiles_shrink_until_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    found = [(start, stop) for start, stop, _ in tiles(np.arange(65) * 8, 1 << 20, exponential)]
    assert all(stop - start < 16 for start, stop in found)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == 64
    assert caplog.messages[:2] == [
        "no memory for a tile of 64 rows; continuing with tiles of 256 bytes",
        "no memory for a tile of 32 rows; continuing with tiles of 128 bytes",
    ]


def test_a_row_that_does_not_fit_raises(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MemoryError):
        list(tiles(np.arange(9), 100, lambda start, stop: np.empty(1 << 60, np.uint8)))
    assert caplog.messages[-1].startswith("no memory for a tile of 2 rows")


def test_other_errors_are_raised_without_a_retry() -> None:
    calls: list[tuple[int, int]] = []

    def fail(start: int, stop: int) -> None:
        calls.append((start, stop))
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        list(tiles(np.arange(9), 100, fail))
    assert calls == [(0, 8)]
