"""What the planner saves on live engines, by their own counters, against relevance order on the same engine."""

from __future__ import annotations

import os

import pytest

from live_savings import measure, started
from vllm_server import FOLDER, EngineUnavailableError, prepare
from warmprefix.errors import MissingExtraError
from warmprefix_tools.local import LocalModelError

FLOORS = {
    "vllm": {"link": 26, "commit, report": 26},
    "vllm-sliding": {"named, 1 prime": 23, "batch": 37},
    "llama.cpp": {"link": 22, "commit, report": 22, "batch": 33},
}
"""Least percent of prefill saved, in the sizes of `live_savings.py`; its result file has about a point more."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("vllm-sliding", marks=pytest.mark.vllm),
        pytest.param("llama.cpp", marks=pytest.mark.slow),
    ],
)
def test_live_engines_compute_less(name: str) -> None:
    if name != "llama.cpp" and FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} must be set to a folder with vLLM, or to install it in")
    try:
        if name != "llama.cpp":
            prepare()
        opened = started(name)
        client = opened.__enter__()
    except (EngineUnavailableError, LocalModelError, MissingExtraError) as error:
        pytest.skip(str(error))
    try:
        rows = measure(name, client, [*FLOORS[name]], None, "")
    finally:
        opened.__exit__(None, None, None)
    saved = {row["arm"]: row["saved_percent"] for row in rows}
    assert all(row["usage_agrees"] for row in rows)
    assert {arm: saved[arm] for arm, floor in FLOORS[name].items() if saved[arm] < floor} == {}
