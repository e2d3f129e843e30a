"""A planner with nothing but reports, on real text and simulated engines."""

from __future__ import annotations

import pytest

from engine_model import ENGINES, LARGE, K, measure
from engine_workload import read
from result_files import read_rows

ASKED = read("stdlib", 150, K)
MODELS = {
    "full attention": "prefix tree",
    "sliding windows, block 128": "checkpoints",
    "2 replicas, in turn": "replicas",
    "4 replicas, random": "replicas",
    "llama.cpp, host memory": "leaves",
    "20,000 tokens, no metrics": "small cache",
}


@pytest.mark.parametrize("name", MODELS)
def test_reports_alone_save_as_much_as_the_right_settings(name: str) -> None:
    row = measure(name, ASKED)
    assert row["model"] == MODELS[name]
    assert row["auto_tokens"] <= 1.02 * row["told_tokens"] < row["relevance_tokens"]


def test_an_engine_that_caches_nothing_costs_little_until_it_is_found() -> None:
    row = measure("off", ASKED)
    assert (row["model"], row["capacity_tokens"]) == ("off", LARGE)
    assert row["relevance_tokens"] < row["auto_tokens"] < 1.01 * row["relevance_tokens"]


def test_the_result_file_has_each_engine_for_both_texts() -> None:
    measured = [(row["text"], row["engine"]) for row in read_rows("engine_model")]
    assert sorted(measured) == sorted((text, name) for text in ("stdlib", "xquad") for name in ENGINES)
