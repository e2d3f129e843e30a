"""Every engine that is there keeps the contract recorded for its version in `benchmarks/results/engine_contract.csv`.

WARMPREFIX_ENDPOINTS names base URLs of more engines that run, separated by spaces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_contract import ContractEndpoint, contract_rows, opened
from result_files import read_rows
from vllm_server import VllmServer
from warmprefix_requests.engine_salts import ENGINES, Engine
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.quality.answer_store import AnswerStore
from warmprefix_tools.quality.cache_probe import PREFILL_PROBLEMS
from warmprefix_tools.quality.quality_options import QualityOptions
from warmprefix_tools.quality.results import results_of
from warmprefix_tools.quality.run_quality import run_quality

ENDPOINTS = os.environ.get("WARMPREFIX_ENDPOINTS", "").split()


@pytest.fixture(
    params=[
        "emulator",
        pytest.param("llama.cpp", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.vllm),
        *[pytest.param(url, marks=pytest.mark.vllm) for url in ENDPOINTS],
    ]
)
def endpoint(request: pytest.FixtureRequest) -> Iterator[ContractEndpoint]:
    if request.param == "vllm":
        server: VllmServer = request.getfixturevalue("server")
        yield ContractEndpoint(server.base_url, kv_events=(server.kv_events, server.kv_replay))
        return
    if request.param == "llama.cpp" and find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    with ExitStack() as stack:
        try:
            found = stack.enter_context(opened(request.param))
        except LocalModelError as error:
            pytest.skip(str(error))
        yield found


def test_the_engine_does_what_is_recorded_of_its_version(endpoint: ContractEndpoint) -> None:
    recorded = read_rows("engine_contract")
    mine = [row for row in recorded if row["engine"] == endpoint.kind.engine]
    versions = [row["version"] for row in mine]
    version = endpoint.kind.version if endpoint.kind.version in versions else max(versions, key=_numbers)
    expected = {row["fact"]: row["value"] for row in mine if row["version"] == version}
    assert {row["fact"]: row["value"] for row in contract_rows(endpoint)} == expected, version


def test_a_quality_run_names_prefill_where_salts_separate(endpoint: ContractEndpoint, tmp_path: Path) -> None:
    """With arms that warm each other's cache, the second one would seem to save nearly everything."""
    file = tmp_path / "answers"
    options = QualityOptions(
        endpoint=endpoint.base_url,
        model=endpoint.model,
        answers=file,
        arms="planned,shuffled",
        limit=8,
        max_tokens=1,
        at_once=1,
    )
    run_quality(options)
    with AnswerStore(file) as store:
        results = results_of(store, "contains")
    (salts,) = {
        row["value"]
        for row in read_rows("engine_contract")
        if (row["engine"], row["fact"]) == (endpoint.kind.engine, "salt: chat")
    }
    relevance, planned, shuffled = results.arms
    if salts == "ignored":
        assert results.prefill_problem == PREFILL_PROBLEMS["ignored"]
        assert {arm.saved for arm in results.arms} == {None}
        return
    assert results.prefill_problem is None
    assert relevance.cached_tokens is not None
    assert planned.saved is not None
    assert shuffled.saved is not None
    assert relevance.cached_tokens < relevance.prompt_tokens / 2
    assert -0.1 < shuffled.saved < 0.4


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def test_salts_are_recorded_as_the_gateway_takes_them() -> None:
    rows = read_rows("engine_contract")
    assert {row["engine"] for row in rows} == {*ENGINES}
    for row in rows:
        name, _, route = row["fact"].partition(": ")
        if name == "salt":
            numbers = (*_numbers(row["version"]), 0, 0)
            engine = Engine(row["engine"], (numbers[0], numbers[1]))
            assert engine.takes_salt(route) is (row["value"] == "separates"), row
