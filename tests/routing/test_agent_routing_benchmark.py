"""The agent routing benchmark: its engines, arms and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_arms import ARMS, OURS
from agent_engines import PREAMBLE, Run, roomy, simulate
from agent_routing import Cell, cells, measure
from agent_workloads import AgentWorkload, load

SMALL = "generated_small"


@pytest.fixture(scope="module")
def workload() -> AgentWorkload:
    return load(SMALL)


def run(workload: AgentWorkload, name: str, agents: int = 4, capacity: int | None = None) -> Run:
    tokens = roomy(workload, agents) if capacity is None else capacity
    return simulate(workload, ARMS[name](agents, 0, tokens), tokens, 0)


def test_the_ways_are_compared_with_round_robin() -> None:
    row: dict[str, Any] = measure(Cell(f"{SMALL}+hot", 4, None, 1))
    assert set(row["arms"]) == set(ARMS)
    assert [row["arms"]["round robin"][key] for key in ("documents_ratio", "read_ratio")] == [1.0, 1.0]
    assert row["arms"][OURS]["documents_ratio"] > 1


def test_an_idle_agent_takes_as_long_as_the_emulator(workload: AgentWorkload) -> None:
    (block, *_), question = workload.requests[0].blocks, workload.requests[0].question_tokens
    single = AgentWorkload("one", (type(workload.requests[0])(0, (block,), question, "c"),))
    outcome = run(single, "round robin")
    assert outcome.reads == pytest.approx([0.020 + (PREAMBLE + block.tokens + question + 64) / 8_000])


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


def test_a_small_cache_forgets(workload: AgentWorkload) -> None:
    small = run(workload, OURS, capacity=4_000)
    assert small.context_cached < run(workload, OURS).context_cached / 2


def test_the_bound_holds_under_a_hot_document_and_would_not_without() -> None:
    hot = load("generated_single+hot", 600)
    ours, alone = (run(hot, name, 15) for name in (OURS, "affinity without a bound"))
    assert ours.worst <= 1.26
    assert alone.worst > 3
    assert ours.context_cached > 0.9 * alone.context_cached


def test_a_seed_gives_the_same_run_again(workload: AgentWorkload) -> None:
    for name in ARMS:
        assert run(workload, name) == run(workload, name)


def test_only_some_workloads_have_a_hot_document() -> None:
    planned = list(cells([Path("psi_hotpotqa_k5.jsonl"), Path("ragpulse_rag.jsonl")], None))
    hot = {cell.source for cell in planned if cell.is_hot}
    assert hot == {"ragpulse_rag.jsonl+hot", "generated_topics+hot", "generated_single+hot"}
    assert {cell.source for cell in planned} - hot == {
        "psi_hotpotqa_k5.jsonl", "ragpulse_rag.jsonl", "generated_topics", "generated_control"
    }  # fmt: skip
