"""The agent routing benchmark: its engines, arms and figures."""

from __future__ import annotations

import asyncio
import email
import http
import os
import shutil
import subprocess
import sys
import xml
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agent_http
from agent_arms import ARMS, MAIN, OURS
from agent_engines import PREAMBLE, Kill, Run, roomy, simulate
from agent_http import measure_http
from agent_routing import SETTINGS, Cell, cells, measure, measure_chain, verdicts
from agent_workloads import AgentWorkload, load
from warmprefix_tools.demo.corpus import read_standard_library

ROOT = Path(__file__).parents[2]
SMALL = "generated_small"


@pytest.fixture(scope="module")
def workload() -> AgentWorkload:
    return load(SMALL)


@pytest.fixture(scope="module", autouse=True)
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Questions on a few packages instead of the whole standard library, which takes seconds to parse."""
    root = tmp_path_factory.mktemp("library")
    for package in (asyncio, email, http, xml):
        shutil.copytree(package.__path__[0], root / package.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_http, "read_standard_library", lambda: read_standard_library(root))
        yield
    agent_http.questions.cache_clear()


def run(workload: AgentWorkload, name: str, agents: int = 4, kill: Kill | None = None, **options: Any) -> Run:
    capacity = options.pop("capacity", roomy(workload, agents))
    sessions = options.pop("sessions", "sessions")
    return simulate(workload, ARMS[name](agents, 0, capacity), capacity, sessions, 0, kill=kill, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_arm_answers_all_documents(setting: str) -> None:
    source = f"{SMALL}+hot" if setting == "hot" else SMALL
    row = measure(Cell(source, setting, 4, None, 1))
    assert list(row["arms"]) == list(SETTINGS[setting].arms)
    for arm in row["arms"].values():
        assert arm["answered"] == row["documents"]
        assert arm["makespan_mean_ms"] > arm["read_mean_ms"] > 0
        assert arm["makespan_p90_ms"] >= arm["read_p90_ms"]
    base = row["arms"]["round robin"]
    assert [base[key] for key in ("documents_ratio", "prefill_ratio", "read_ratio", "total_ratio")] == [1.0] * 4


@pytest.mark.parametrize("name", ["hash", OURS])
def test_where_a_document_has_one_agent_it_is_computed_once(workload: AgentWorkload, name: str) -> None:
    outcome = run(workload, name)
    lengths = {block.fingerprint: block.tokens for request in workload.requests for block in request.blocks}
    computed = outcome.context_tokens - outcome.context_cached
    # Of a cached document, at most the KV block in which its end is has to be computed again.
    once = sum(lengths.values())
    assert once <= computed < once + 16 * (workload.documents - len(lengths))


def test_in_turn_an_agent_computes_what_others_have(workload: AgentWorkload) -> None:
    alone, several = run(workload, "round robin", 1), run(workload, "round robin", 8)
    assert several.context_cached < alone.context_cached
    assert alone.context_cached == run(workload, OURS, 1).context_cached  # with one agent there is nothing to choose


def test_an_idle_agent_takes_as_long_as_the_emulator(workload: AgentWorkload) -> None:
    one = AgentWorkload("one", workload.requests[:1])
    (block, *_), question = one.requests[0].blocks, one.requests[0].question_tokens
    single = AgentWorkload("one", (type(one.requests[0])(0, (block,), question, "c"),))
    outcome = run(single, "round robin")
    computed = PREAMBLE + block.tokens + question + 64
    assert outcome.prompt_tokens == computed
    assert outcome.reads == pytest.approx([0.020 + computed / 8_000])
    assert outcome.makespans == pytest.approx([outcome.reads[0] + 31 / 80])


def test_a_small_cache_forgets(workload: AgentWorkload) -> None:
    small = run(workload, OURS, capacity=4_000)
    assert small.context_cached < run(workload, OURS).context_cached / 2


def test_a_turn_waits_for_the_one_before(workload: AgentWorkload) -> None:
    chats = run(workload, OURS, sessions="turns")
    backlog = run(workload, OURS, sessions="backlog")
    assert chats.answered == backlog.answered == workload.documents
    assert chats.seconds > backlog.seconds  # a backlog has no pauses between turns


def test_the_bound_holds_under_a_hot_document_and_would_not_without() -> None:
    hot = load("generated_single+hot", 600)
    ours, alone = (run(hot, name, 15) for name in (OURS, "affinity without a bound"))
    assert ours.worst <= 1.26
    assert ours.beyond <= 1.01
    assert alone.worst > 3
    assert ours.context_cached > 0.9 * alone.context_cached


@pytest.mark.parametrize("name", MAIN)
def test_documents_of_a_dead_agent_are_answered(workload: AgentWorkload, name: str) -> None:
    outcome = run(workload, name, 6, Kill(2, len(workload.requests) // 2), sessions="backlog")
    assert outcome.answered == workload.documents
    assert outcome.lost > 0
    assert 2 not in outcome.moved_to


def test_only_a_dead_agents_share_moves(workload: AgentWorkload) -> None:
    kill = Kill(2, len(workload.requests) // 2)
    ours, modulo = (run(workload, name, 6, kill) for name in (OURS, "hash"))
    assert ours.kept_of > 50
    assert ours.kept >= 0.95 * ours.kept_of
    assert modulo.kept < 0.5 * modulo.kept_of
    assert len(ours.moved_to) > 2


def test_a_seed_gives_the_same_run_again(workload: AgentWorkload) -> None:
    for name in MAIN:
        assert run(workload, name) == run(workload, name)


def test_failed_claims_are_reported() -> None:
    row = measure(Cell(SMALL, "sessions", 4, None, 1))
    row["recurring_percent"] = 80.0
    row["arms"][OURS].update(documents_ratio=1.79, read_ratio=0.99, worst_over_bound=1.02)
    assert not any(holds for claim, _, holds in verdicts([row]) if not claim.startswith("whole prompts"))
    row["arms"][OURS].update(documents_ratio=1.81, read_ratio=1.01, worst_over_bound=1.0)
    assert all(holds for claim, _, holds in verdicts([row]) if not claim.startswith("whole prompts"))


def test_cells_cover_controls_and_hot_documents_where_they_matter() -> None:
    planned = list(cells([Path("psi_hotpotqa_k5.jsonl"), Path("ragpulse_rag.jsonl")], list(SETTINGS), None))
    assert {cell.setting for cell in planned if cell.source.startswith(("psi", "generated_control"))} == {"sessions"}
    assert {cell.setting for cell in planned if cell.source.startswith("ragpulse")} == set(SETTINGS)
    assert all((cell.setting == "hot") == cell.source.endswith("+hot") for cell in planned)


def test_command_line_runs_a_selection(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/agent_routing.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARMPREFIX_")}
    options = ["--only", "light,killed", "--limit", "20", "--jobs", "1", "--no-http"]
    finished = subprocess.run(
        [sys.executable, str(script), *options], cwd=tmp_path, capture_output=True, text=True, check=True, env=env
    )
    assert "generated_topics, light, 20 requests, 15 agents" in finished.stdout
    assert "holds  an agent killed: all answered (generated_topics): 300 of 300" in finished.stdout
    assert "written" not in finished.stdout


@pytest.mark.slow
def test_servers_report_what_the_simulation_finds() -> None:
    rows = measure_http(10, 5)
    assert [(row["arm"], row["killed"]) for row in rows] == [
        (name, killed) for name in ("round robin", OURS) for killed in (False, True)
    ]
    for row in rows:
        assert row["answered"] == row["documents"]
        assert (row["lost"] > 0) is row["killed"]
        if not row["killed"]:
            assert row["hit_percent"] == pytest.approx(row["simulated_hit_percent"], abs=2)
    assert rows[2]["prefilled_tokens"] < rows[0]["prefilled_tokens"]


@pytest.mark.slow
def test_chain_answers_all_documents() -> None:
    pytest.importorskip("warmprefix_chain_of_agents", reason="installed with its own tests")
    for row in measure_chain(10, 5):
        assert (row["answers"], row["skipped"]) == (row["requests"], 0)
        assert row["answered"] == row["documents"]
        assert (row["lost"] > 0) is row["killed"]
        assert row["hit_percent"] > 20
