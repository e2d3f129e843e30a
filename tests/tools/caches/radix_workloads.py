"""Random workloads for SGLang's prefix cache, and the hits that its version 0.5.23 has in them.

`WARMPREFIX_SGLANG=FOLDER python -m tests.tools.caches.radix_workloads` records them, with the Python of the environment
in that folder.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["RECORDED", "SGLANG", "Workload", "hits_of_sglang", "random_workload", "recorded_hits", "tokens_of"]

Workload = dict[str, Any]
SGLANG = "WARMPREFIX_SGLANG"
DRIVER = Path(__file__).parents[3] / "benchmarks" / "engine" / "radix_hits.py"
RECORDED = 60
"""Workloads whose hits are recorded, by their seeds from 0 on."""
_FILE = Path(__file__).parent / "radix_hits.json"


def random_workload(seed: int) -> Workload:
    """Return prompts that share beginnings of all lengths, with priorities of all kinds, for a cache of any size."""
    rng = random.Random(seed)
    pieces = [[number, rng.choice((1, 2, 5, 20, 50, rng.randint(1, 80)))] for number in range(8)]
    requests: list[Workload] = []
    for number in range(rng.randint(6, 60)):
        if requests and rng.random() < 0.4:  # a follow-up, a fork or a repetition of an earlier prompt
            shared = list(rng.choice(requests)["pieces"])
            shared = shared[: rng.randint(1, len(shared))]
        else:
            shared = rng.sample(pieces, rng.randint(1, 4))
        if rng.random() < 0.7:
            shared = [*shared, [100 + number, rng.choice((1, 16, rng.randint(1, 60)))]]
        if rng.random() < 0.2:
            piece, length = shared[-1]
            shared = [*shared[:-1], [piece, rng.randint(1, length)]]
        clock = number + rng.choice((0, 30, 90))
        requests.append(
            {
                "pieces": shared,
                "salt": rng.choice((None, None, "a")),
                "priority": rng.choice((None, 0, number, clock, rng.randint(-3, 5))),
                "answer_tokens": rng.choice((1, 1, 2, rng.randint(1, 20))),
            }
        )
    longest = max(sum(length for _, length in each["pieces"]) + each["answer_tokens"] for each in requests)
    capacity = rng.choice((longest, longest + rng.randint(0, 300), 100_000))
    return {"capacity": capacity, "policy": "priority", "requests": requests}


def tokens_of(pieces: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that the driver gives to the same pieces."""
    return [number * 100_003 + place + 100 for number, length in pieces for place in range(length)]


def recorded_hits() -> list[list[int]]:
    """Return the recorded hits, one list per workload."""
    hits: list[list[int]] = json.loads(_FILE.read_text())
    return hits


def hits_of_sglang(workloads: Sequence[Workload]) -> list[list[int]]:
    """Return the hits of SGLang's own cache."""
    done = subprocess.run(
        [Path(os.environ[SGLANG], "bin", "python"), DRIVER],
        input="".join(f"{json.dumps(workload)}\n" for workload in workloads),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3_000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


if __name__ == "__main__":
    lines = [json.dumps(hits) for hits in hits_of_sglang([random_workload(seed) for seed in range(RECORDED)])]
    _FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
