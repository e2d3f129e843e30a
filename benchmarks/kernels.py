"""Speed of the kernels, and their share of the roofline of a GPU's memory.

    python benchmarks/kernels.py [--contexts 2000,10000,100000] [--device auto|cpu|cuda] [--threads 1]

Contexts of 15 blocks over 400 Zipf-distributed topics, seeded; `top_overlap` looks for 16 partners. On the CPU, more
than 10,000 contexts are left out unless `--contexts` asks for them, as is the numpy reference beyond 2,000. On a CUDA
device Triton's kernels are compared with torch's; the distances stay on the device, tile by tile, as 100,000 contexts
have 20 GB of them. Medians of some runs, the input's checks and the inverted index included; compilation and tuning go
into a run before the first that counts, whose time is given as well.

The roofline is the bytes that the kernels' READMEs count, at the rate of a copy in this device's memory. Only a run
with the default options is written: to `results/kernels.csv`, or `results/kernels_cuda.csv`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common import print_table, zipf_requests
from result_files import write_results
from warmprefix_kernels import choose_device, context_distance_tiles, top_overlap
from warmprefix_kernels._contexts import checked_contexts
from warmprefix_kernels._tiles import bytes_of_tile
from warmprefix_kernels.context_distance._packing import packing_for

PARTNERS = 16
RUNS = 3
MOST_ON_CPU = 10_000
MOST_FOR_NUMPY = 2_000
SECTOR = 32
"""Bytes that an atomic reads from memory and writes back in the worst case."""

HEADER = ["", "where", "contexts", "pairs of equal blocks", "first run, s", "median, s", "roofline, s", "share"]

Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", help="numbers of contexts (default: 2000,10000, and 100000 on CUDA)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=1, help="torch's, on the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(choose_device(arguments.device).name)
    cuda = device.type == "cuda"
    asked: str = arguments.contexts or ("2000,10000,100000" if cuda else "2000,10000")
    rate = copy_rate(device)
    rows: list[dict[str, Any]] = []
    for count in map(int, asked.split(",")):
        arrays = contexts_of(count)
        shared = pairs_of_equal_blocks(arrays[1])
        for what, where, run in cases(arrays, device, count):
            first, median = timed(run, cuda)
            bound = roofline_bytes(what, count, shared) / rate
            row = {"what": what, "where": where, "contexts": count, "pairs_of_equal_blocks": shared}
            row |= {"first_s": round(first, 4), "median_s": round(median, 4)}
            if cuda:
                row |= {"roofline_s": round(bound, 5), "share_of_roofline": round(bound / median, 3)}
            rows.append(row)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, threads: {torch.get_num_threads()}"
    print(f"{name}, copies {rate / 1e9:,.0f} GB/s, torch {torch.__version__}\n")
    print_table(HEADER[: 8 if cuda else 6], [list(row.values()) for row in rows])
    if arguments.contexts is None and arguments.threads == 1:
        packages = {package: version(package) for package in ("numpy", "torch", "triton")}
        machine = {"device": name, "copied_bytes_per_second": round(rate), "made": {"versions": packages}}
        write_results("kernels_cuda" if cuda else "kernels", [{**row, **machine} for row in rows])


def cases(arrays: Arrays, device: torch.device, count: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield each measured operation, its device and its call."""
    implementations = ["torch", "triton"] if device.type == "cuda" else ["torch"]
    for what, run in (("top_overlap", overlaps), ("context_distance", distances)):
        if device.type == "cpu" and count <= MOST_FOR_NUMPY:
            yield what, "numpy", by_numpy(what, arrays)
        for implementation in implementations:
            yield what, f"{implementation}, {device.type}", run(arrays, implementation, device)


def by_numpy(what: str, arrays: Arrays) -> Callable[[], object]:
    offsets, ids, positions, tokens = arrays
    if what == "top_overlap":
        return lambda: top_overlap(offsets, ids, tokens, PARTNERS, device="numpy")
    return lambda: list(context_distance_tiles(offsets, ids, positions, device="numpy"))


def overlaps(arrays: Arrays, implementation: str, device: torch.device) -> Callable[[], object]:
    offsets, ids, _, tokens = arrays
    kernel = import_module(f"warmprefix_kernels.top_overlap.{implementation}").top_overlap
    tile_bytes = bytes_of_tile(device.type, None)

    def run() -> None:
        for found in kernel(checked_contexts(offsets, ids), tokens, PARTNERS, device, tile_bytes):
            found.cpu()

    return run


def distances(arrays: Arrays, implementation: str, device: torch.device) -> Callable[[], object]:
    offsets, ids, positions, _ = arrays
    kernel = import_module(f"warmprefix_kernels.context_distance.{implementation}").context_distance_tiles
    tile_bytes = bytes_of_tile(device.type, None)

    def run() -> None:
        contexts = checked_contexts(offsets, ids, positions)
        for _ in kernel(contexts, packing_for(contexts), 0.001, device, tile_bytes):
            pass

    return run


def contexts_of(count: int) -> Arrays:
    requests = list(zipf_requests(count))
    lengths = [len(request) for request in requests]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    tokens = np.random.default_rng(1).integers(50, 400, 400 * 60)
    return np.cumsum([0, *lengths]), np.concatenate(requests).astype(np.int32), positions, tokens


def pairs_of_equal_blocks(ids: npt.NDArray[np.int32]) -> int:
    """Return the pairs of equal blocks, both ways, and each entry with itself."""
    return int((np.bincount(ids).astype(np.int64) ** 2).sum())


def roofline_bytes(what: str, count: int, shared: int) -> int:
    if what == "top_overlap":
        return (4 + 4) * count**2 + (4 + 2 * SECTOR) * shared
    return (4 + 4 + 4) * (count**2 // 2) + (4 + 4 + 2 * SECTOR) * (shared // 2)


def timed(run: Callable[[], object], cuda: bool) -> tuple[float, float]:
    """Return the seconds of a first run, and the median of the runs after it."""
    times: list[float] = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def copy_rate(device: torch.device) -> float:
    """Return the bytes that a large copy reads and writes per second."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    _, median = timed(lambda: target.copy_(source), device.type == "cuda")
    return 2 * source.numel() / median


if __name__ == "__main__":
    main()
