"""The checkpoint cache against vLLM's own scheduler, to the token, over random workloads.

The environment variable WARMPREFIX_WORKLOADS is the number of workloads per layout, 25 if it is not set.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.tools.kv_integrity import check_blocks

from vllm_server import FOLDER, RECIPE, EngineUnavailableError, model_folder, prepare
from warmprefix.cache_profiles import Checkpoints
from warmprefix_tools.caches.checkpoints import CheckpointCache, CheckpointLayout

pytestmark = pytest.mark.vllm

Workload = dict[str, Any]
ANSWER_TOKEN = 7
LAYOUTS: dict[str, Workload] = {
    "window": {"block": 128, "unit": None, "window": 512},
    "narrow window": {"block": 128, "unit": None, "window": 128},
    "recurrent with unit": {"block": 528, "unit": 16, "window": None},
    "recurrent": {"block": 1_056, "unit": None, "window": None},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_hits_equal_those_of_vllms_scheduler(name: str) -> None:
    count = int(os.environ.get("WARMPREFIX_WORKLOADS", "25"))
    workloads = [random_workload(random.Random(f"{name} {number}"), LAYOUTS[name]) for number in range(count)]
    for number, (workload, expected) in enumerate(zip(workloads, hits_of_vllm(workloads), strict=True)):
        assert hits_of_cache(workload) == expected, f"workload {number}: {workload}"


def random_workload(rng: random.Random, layout: Workload) -> Workload:
    """Return prompts that share beginnings of all lengths, for a cache that holds all, or a few of them."""
    block = layout["block"]
    pieces = [[seed, rng.choice((block // 3, block, 2 * block + 5, rng.randint(1, 5 * block)))] for seed in range(8)]
    requests: list[Workload] = []
    for number in range(rng.randint(6, 24)):
        if requests and rng.random() < 0.4:  # a follow-up, a fork or a repetition of an earlier prompt
            shared = list(rng.choice(requests)["pieces"])
            shared = shared[: rng.randint(1, len(shared))]
        else:
            shared = rng.sample(pieces, rng.randint(1, 4))
        if rng.random() < 0.7:
            shared = [*shared, [100 + number, rng.choice((1, 16, block, rng.randint(1, 2 * block)))]]
        answer_tokens = rng.choice((1, 1, 1, rng.randint(2, 40), block + 3 if block < 600 else 1))
        requests.append({"pieces": shared, "answer_tokens": answer_tokens})
    workload = {
        **layout,
        "groups": rng.randint(1, 3),
        "step_tokens": rng.choice((8192, 8192, 2048, 300)),
        "retention": rng.choice((0, 0, 0, None, 3 * block)),
        "requests": requests,
    }
    longest = max(sum(length for _, length in each["pieces"]) + each["answer_tokens"] for each in requests)
    least = layout_of(workload).most_blocks(longest) + 1
    return {**workload, "blocks": rng.choice((least, least + rng.randint(0, 60), 5_000))}


def layout_of(workload: Workload) -> CheckpointLayout:
    return CheckpointLayout(
        Checkpoints(workload["block"], workload["unit"]),
        window=workload["window"],
        sparse_groups=workload["groups"],
        step_tokens=workload["step_tokens"],
        retention=workload["retention"],
    )


def hits_of_cache(workload: Workload) -> list[int]:
    cache = CheckpointCache(workload["blocks"], layout_of(workload))
    hits: list[int] = []
    for request in workload["requests"]:
        sequence = cache.allocate(tokens_of(request["pieces"]), room_for=request["answer_tokens"])
        assert sequence is not None
        cache.store(sequence)
        for _ in range(request["answer_tokens"] - 1):  # the last token is never fed back
            cache.append(sequence, ANSWER_TOKEN)
        cache.free(sequence)
        check_blocks(cache)
        hits.append(sequence.cached_tokens)
    return hits


def tokens_of(pieces: list[list[int]]) -> list[int]:
    """Return the tokens that the driver gives to the same pieces."""
    return [(seed * 100_003 + place * 31) % 29_000 + 100 for seed, length in pieces for place in range(length)]


def hits_of_vllm(workloads: list[Workload]) -> list[list[int]]:
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} must be set to a folder with vLLM, or to install it in")
    try:
        python = prepare()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [python, Path(RECIPE, "scheduler_hits.py")],
        input="".join(f"{json.dumps(workload)}\n" for workload in workloads),
        env={**os.environ, "MODEL": str(model_folder("tiny")), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
