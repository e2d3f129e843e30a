"""Time, memory and hits of planning datasets with Ray, from 100,000 requests to 10 million.

    python benchmarks/dataset_scale.py [--requests N ...] [--generators NAME ...]

Needs the extra `ray`; starts Ray in this process if no cluster is there. Requests of 10 blocks of 50 to 400 tokens,
seeded, from two generators. *topics*: four fifths of the blocks from one of 400 topics of 60 blocks, by a Zipf law over
topics, the rest from anywhere. *zipf*: by a Zipf law (exponent 1) over a fifth as many blocks as requests. They are
written to Parquet files first, without texts; that is not in the time.

*seconds*: all of `plan_dataset`: counting, the sample, dividing, and planning. *dividing*: until the first plan begins.
*worker*: the most anonymous memory of one of Ray's workers, twice per second. *driver*: the same of this process.
*hits*: tokens saved by all plans, each from an empty cache, of all tokens, in %. *sample hits*: the same of one plan
for 100,000 of the requests. *bound*: every block computed once, and nothing twice.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from common import print_table, zipf_requests
from result_files import write_rows
from warmprefix import BatchRequest, ContextBlock, ContextPlanner
from warmprefix.batch import PlannedRequest
from warmprefix.traces import NoRecorder
from warmprefix_ray import DatasetPlanning, connect, plan_dataset

K = 10
SIZES = (100_000, 1_000_000, 10_000_000)
SAMPLE = 100_000
ROWS_PER_FILE = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=SIZES)
    parser.add_argument("--generators", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    options = parser.parse_args()
    connect(local=True)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = []
    for generator in options.generators:
        for count in options.requests:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measured(generator, count, Path(folder)))
            print_table(list(rows[-1]), [list(rows[-1].values())])
            write_rows("dataset_scale", rows, ["generator", "requests"])


# -- requests ----------------------------------------------------------------------------------------------------------


def zipf(count: int, seed: int, total: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    blocks = range(max(total // 5, 2 * K))
    weights = list(accumulate(1 / (block + 1) for block in blocks))
    for _ in range(count):
        chosen: dict[int, None] = {}
        while len(chosen) < K:
            chosen.update(dict.fromkeys(rng.choices(blocks, cum_weights=weights, k=K - len(chosen))))
        yield list(chosen)


def topics(count: int, seed: int, total: int) -> Iterator[list[int]]:
    del total
    return zipf_requests(count, k=K, seed=seed)


GENERATORS: Mapping[str, Callable[[int, int, int], Iterator[list[int]]]] = {"topics": topics, "zipf": zipf}


def tokens_of(block: int) -> int:
    """Return the length of a block: 50 to 400 tokens, by its number."""
    return 50 + block * 2_654_435_761 % 2**32 % 351


def read(row: Mapping[str, Any]) -> BatchRequest:
    blocks = [ContextBlock(f"block {block}", block, tokens_of(block)) for block in row["blocks"]]
    return BatchRequest(row["id"], blocks)


def write_file(task: Mapping[str, Any]) -> dict[str, int]:
    generator, count, total, folder = task["generator"], task["count"], task["total"], Path(task["folder"])
    contexts = list(GENERATORS[generator](count, task["first"], total))
    ids = pa.array(range(task["first"], task["first"] + count))
    pq.write_table(
        pa.table({"id": ids, "blocks": pa.array(contexts, pa.list_(pa.int32()))}),
        folder / f"{task['first']:09}.parquet",
    )
    return {"count": count}


# -- one measurement ---------------------------------------------------------------------------------------------------


def measured(generator: str, count: int, folder: Path) -> dict[str, Any]:
    source, work = folder / "source", folder / "work"
    source.mkdir()
    tasks = [
        {
            "generator": generator,
            "first": first,
            "count": min(ROWS_PER_FILE, count - first),
            "total": count,
            "folder": str(source),
        }
        for first in range(0, count, ROWS_PER_FILE)
    ]
    ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(write_file).materialize()
    once, total = distinct_and_total(source)
    dataset = ray.data.read_parquet(str(source))
    with Memory() as memory:
        started = time.perf_counter()
        plan = plan_dataset(dataset, work, DatasetPlanning(read, make_planner, numbers_only, sample=SAMPLE))
        seconds = time.perf_counter() - started
    divided = (work / "partitions.json").stat().st_mtime - memory.started
    sample_hits = plan.hit_ratio if count <= SAMPLE else hits_of_sample(source)
    sizes = [numbers.requests for numbers in plan.partitions]
    shutil.rmtree(work)
    return {
        "generator": generator,
        "requests": count,
        "seconds": round(seconds, 1),
        "dividing_seconds": round(divided, 1),
        "microseconds_per_request": round(1e6 * seconds / count, 1),
        "partitions": len(sizes),
        "largest_partition": max(sizes),
        "worker_megabytes": round(memory.worker / 1e6),
        "driver_megabytes": round(memory.driver / 1e6),
        "hit_percent": round(100 * plan.hit_ratio, 2),
        "sample_hit_percent": round(100 * sample_hits, 2),
        "bound_percent": round(100 * (1 - once / total), 2),
    }


def make_planner() -> ContextPlanner:
    return ContextPlanner(policy="relevance", recorder=NoRecorder(), annotate="none")


def numbers_only(planned: PlannedRequest) -> Sequence[Mapping[str, Any]]:
    """Return a chat that costs next to nothing to make."""
    return [{"role": "user", "content": ""}]


def distinct_and_total(source: Path) -> tuple[int, int]:
    """Return the tokens of all distinct blocks, and of all contexts."""
    counts = np.zeros(0, np.int64)
    for file in source.glob("*.parquet"):
        blocks = pq.read_table(file, columns=["blocks"])["blocks"].combine_chunks().flatten().to_numpy()
        counts = np.pad(counts, (0, max(0, int(blocks.max()) + 1 - len(counts))))
        counts += np.bincount(blocks, minlength=len(counts))
    tokens = np.array([tokens_of(block) for block in range(len(counts))], np.int64)
    return int(tokens[counts > 0].sum()), int((counts * tokens).sum())


def hits_of_sample(source: Path) -> float:
    """Return the hit ratio of one plan for the first requests; each file is as random as another."""
    rows = pq.read_table(min(source.glob("*.parquet"))).slice(0, SAMPLE).to_pylist()
    return make_planner().plan_batch(map(read, rows)).hit_ratio


class Memory:
    """The most memory of a process while measuring: of the largest of Ray's workers, and of this process."""

    def __init__(self) -> None:
        self.worker = self.driver = 0
        self.started = time.time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.driver = max(self.driver, anonymous_bytes(Path("/proc/self")))
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    is_worker = (process / "cmdline").read_bytes().startswith(b"ray::")
                except OSError:  # it has ended
                    continue
                if is_worker:
                    self.worker = max(self.worker, anonymous_bytes(process))


def anonymous_bytes(process: Path) -> int:
    try:
        status = (process / "status").read_text()
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")), "0")
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    main()
