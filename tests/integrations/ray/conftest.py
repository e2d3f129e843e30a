"""A local Ray cluster with two workers, and rows that share blocks."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
import ray.data

Row = dict[str, Any]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray once, with two cores."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # Ray uses what it has deprecated itself
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # for Ray's workers
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield
    ray.shutdown()


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Make rows of five blocks, each from one of some topics of twelve blocks."""
    rng = random.Random(seed)
    topics = max(count // 50, 1)
    rows: list[Row] = []
    for i in range(count):
        topic = rng.randrange(topics)
        blocks = rng.sample(range(12 * topic, 12 * topic + 12), 5)
        texts = [f"Passage {block}. " + f"word{block} " * 20 for block in blocks]
        rows.append({"id": f"r{i}", "blocks": texts, "question": f"Question {i}?"})
    return rows


def dataset_of(rows: Sequence[Row]) -> ray.data.Dataset:
    """Return rows as a dataset of few blocks; Ray's default of 200 takes long."""
    return ray.data.from_items(list(rows), override_num_blocks=min(4, len(rows)))
