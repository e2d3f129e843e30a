"""Orders that are facts: neighbours in one source, locked orders, and pinned documents."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from langchain_core.documents import Document

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.blocks import Pin
from warmprefix_chain_of_agents.documents import as_blocks, as_plain
from warmprefix_chain_of_agents.langgraph import GraphFanOut
from warmprefix_routing import AgentRouter

QUESTION = "Which fact is worth a mention?"


def steps(count: int, source: str = "manual") -> list[dict[str, Any]]:
    """Return documents that LangChain's splitter has cut from one text."""
    texts = [f"Step {i} of the {source}. " + f"Turn the screw {i}. " * 9 for i in range(count)]
    starts = [sum(map(len, texts[:i])) for i in range(count)]
    return [
        {"page_content": text, "id": f"{source}{i}", "metadata": {"source": source, "start_index": start}}
        for i, (text, start) in enumerate(zip(texts, starts, strict=True))
    ]


def test_neighbours_go_to_one_agent_and_keep_their_order(start_team: Any) -> None:
    team = start_team()
    rng = random.Random(1)
    manual, others = steps(8), [steps(1, f"note {i}")[0] for i in range(6)]
    for _ in range(6):
        first = rng.randrange(5)
        run = manual[first : first + 4]
        given = [*rng.sample(others, 3), *run]
        answer = team.chain.run(QUESTION, given)
        texts = [document["page_content"] for document in run]
        [reader] = {report.agent for report in answer.workers if any(block.text in texts for block in report.blocks)}
        prompt = team.engines[reader].bodies[-1]["messages"][-1]["content"]
        places = [prompt.index(text) for text in texts]
        assert places == sorted(places)
        between = prompt[places[0] : places[-1]]
        assert not any(other["page_content"] in between for other in others)


def test_a_locked_order_is_kept_in_each_prompt(start_team: Any) -> None:
    for locked in (False, True):
        team = start_team(workers=1, order_locked=locked, planner=ContextPlanner(policy="greedy"))
        given = [steps(1, f"note {i}")[0] for i in range(4)]
        team.chain.run(QUESTION, given[3:])
        team.chain.run(QUESTION, given)
        prompt = team.engines["w0"].bodies[-1]["messages"][-1]["content"]
        places = [prompt.index(document["page_content"]) for document in given]
        assert (places == sorted(places)) is locked


@pytest.mark.parametrize("by_key", [True, False])
def test_pins_come_from_metadata_or_a_function(start_team: Any, by_key: bool) -> None:
    given = [steps(1, f"note {i}")[0] for i in range(3)]
    given[0]["metadata"]["place"] = "end"

    def by_id(document: Any) -> Pin | None:
        return "end" if document["id"] == "note 00" else None

    team = start_team(workers=1, pinned="place" if by_key else by_id)
    team.chain.run(QUESTION, given)
    prompt = team.engines["w0"].bodies[-1]["messages"][-1]["content"]
    assert max(given, key=lambda each: prompt.index(each["page_content"])) is given[0]


def test_shares_of_a_graph_keep_runs_pins_and_locked_orders() -> None:
    documents = [Document(each["page_content"], metadata=each["metadata"]) for each in steps(3)]
    other = Document("Another text.", metadata={"place": "start"})
    router = AgentRouter(["ann"])
    planner = ContextPlanner(policy="greedy")
    with planner.planning([other.page_content], model="ann"):
        pass
    cases: list[tuple[dict[str, Any], int]] = [({}, 3), ({"order_locked": True}, 0), ({"pinned": "place"}, 3)]
    for options, first in cases:
        fan_out = GraphFanOut(router, "read", planner=planner, **options)
        [sent] = fan_out({"documents": [*documents, other]}, {})
        with fan_out.planning(sent.arg) as plan:  # type: ignore[union-attr]
            assert plan.order == ((0, 1, 2, 3) if first == 0 else (3, 0, 1, 2))


def test_blocks_in_a_frameworks_storage_keep_what_they_follow() -> None:
    first = ContextBlock("One.", id="1")
    given = [first, ContextBlock("Two.", id="2", tokens=3, follows="1"), ContextBlock("Three.", follows=first)]
    stored = json.loads(json.dumps([as_plain(block) for block in given]))
    restored = as_blocks(stored)
    assert [block.follows for block in restored] == [block.follows for block in given]
    assert [(block.text, block.id, block.tokens) for block in restored] == [
        (block.text, block.id, block.tokens) for block in given
    ]
    assert as_blocks([{name: value for name, value in stored[1].items() if name != "follows"}])[0].tokens == 3
