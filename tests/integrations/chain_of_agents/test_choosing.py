"""Choosing which of more documents the agents read, in a chain, a graph and a workflow."""

from __future__ import annotations

import operator
import warnings
from typing import Annotated, Any

import pytest
from langchain_core.documents import Document
from langgraph.graph import START, StateGraph

with warnings.catch_warnings():  # pytest ignores the below only once this file is read
    warnings.filterwarnings("ignore", "The 'validate_default' attribute")
    from llama_index.core.schema import NodeWithScore, TextNode
from typing_extensions import TypedDict
from workflows import Context, Workflow, step
from workflows.events import StartEvent, StopEvent

from warmprefix import Choice, ContextBlock
from warmprefix_chain_of_agents.documents import as_blocks
from warmprefix_chain_of_agents.langgraph import GraphFanOut
from warmprefix_chain_of_agents.workflows import DocumentsAssigned, DocumentsRead, WorkflowFanOut
from warmprefix_routing import Agent, AgentRouter

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'validate_default' attribute"),
    pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning"),
]

CHOICE = Choice(k=4, keep=1)
EARLIER = ("xpqr", "ypqr", "zpqr", "abcd")
"""Requests after which all documents have been read, and a to d stand in the agents' caches."""
NAMES = ("axyzbcd", "abcd", "xyz")
"""Of a request: the candidates, those that are read, and those that are left out."""


def text_of(name: str) -> str:
    return f"All about {name}. " + "It is described at length. " * 15


def scores_of(names: str) -> list[float]:
    return [1.0, *[0.5 - 0.001 * place for place in range(len(names) - 1)]]


def documents(names: str) -> list[Document]:
    return [
        Document(text_of(name), id=name, metadata={"relevance_score": score})
        for name, score in zip(names, scores_of(names), strict=True)
    ]


def nodes(names: str) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=text_of(name), id_=name), score=score)
        for name, score in zip(names, scores_of(names), strict=True)
    ]


def blocks(names: str) -> list[ContextBlock]:
    return [
        ContextBlock(text_of(name), id=name, score=score) for name, score in zip(names, scores_of(names), strict=True)
    ]


def router(*agents: str) -> AgentRouter:
    """Return a router of agents whose caches hold six documents together."""
    return AgentRouter([Agent(name, 6 * blocks("a")[0].tokens // len(agents)) for name in agents])


@pytest.mark.parametrize("mode", ["chain", "map"])
@pytest.mark.parametrize("given", [documents, nodes, blocks])
async def test_a_chain_reads_the_chosen_documents(start_async_team: Any, shown: Any, mode: str, given: Any) -> None:
    team = start_async_team(workers=2, mode=mode, router=router("w0", "w1"), choose=CHOICE)
    for names in EARLIER:
        await team.chain.arun("Which?", given(names))
    before = {name: len(bodies) for name, bodies in team.bodies().items()}
    candidates, read, left_out = NAMES
    answer = await team.chain.arun("Which?", given(candidates))
    assert sorted(str(block.id) for report in answer.workers for block in report.blocks) == sorted(read)
    assert [left.block.id for left in answer.left_out] == list(left_out)
    bodies = [body for name in team.workers for body in team.bodies()[name][before[name] :]]
    assert sorted(id for body in bodies for id in shown(body, blocks(candidates))) == sorted(read)
    assert answer.skipped == ()
    progress = [event async for event in team.chain.astream("Which?", given(candidates))]
    assert {step.total for step in progress if hasattr(step, "total")} == {4}


def test_a_conversation_reads_the_first(start_team: Any) -> None:
    team = start_team(workers=2, router=router("w0", "w1"), choose=CHOICE)
    for names in EARLIER:
        team.chain.run("Which?", blocks(names))
    answer = team.chain.run("Which?", blocks("axyzbcd"), conversation="chat")
    assert sorted(str(block.id) for report in answer.workers for block in report.blocks) == list("axyz")


def test_a_version_is_that_of_the_document_as_given(start_team: Any) -> None:
    versions = {"b": ("handbook", 1), "e": ("handbook", 2)}
    newest = Choice(k=4, version=lambda document: versions.get(document.metadata["name"]))
    team = start_team(workers=2, choose=newest)
    given = documents("abcdef")
    for document in given:
        document.metadata["name"] = document.id
    answer = team.chain.run("Which?", given)
    assert sorted(str(block.id) for report in answer.workers for block in report.blocks) == list("acde")


def test_without_scores_the_first_are_read_and_one_warning_says_so(
    start_team: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmprefix_chain_of_agents.documents._unscored", iter(range(10)))
    team = start_team(workers=2, choose=CHOICE)
    for given in ([text_of(name) for name in "abcdef"], ["", *map(text_of, "abcdef")]):
        answer = team.chain.run("Which?", given)
        assert sum(len(report.blocks) for report in answer.workers) == 4
    [warning] = [record for record in caplog.records if record.name == "warmprefix"]
    assert warning.getMessage().startswith("the first 4 documents are read: candidate 0 must have a finite score")


class State(TypedDict, total=False):
    documents: list[Any]
    found: Annotated[list[str], operator.add]


@pytest.mark.parametrize("given", [documents, blocks])
def test_a_graph_hands_out_the_chosen_documents(given: Any) -> None:
    fan_out = GraphFanOut(router("ann", "ben"), "read", choose=CHOICE)

    def read(task: Any) -> dict[str, Any]:
        with fan_out.planning(task) as plan:
            return {"found": [str(planned.block.id) for planned in plan.blocks]}

    graph: Any = StateGraph(State)
    graph.add_node("read", read)
    graph.add_conditional_edges(START, fan_out, fan_out.destinations)
    built = graph.compile()
    for names in EARLIER:
        assert sorted(built.invoke({"documents": given(names)})["found"]) == sorted(names)
    candidates, chosen, _ = NAMES
    assert sorted(built.invoke({"documents": given(candidates)})["found"]) == sorted(chosen)


async def test_a_workflow_hands_out_the_chosen_documents() -> None:
    fan_out = WorkflowFanOut(router("ann", "ben"), choose=CHOICE)

    class Reading(Workflow):
        @step
        async def share(self, ctx: Context, event: StartEvent) -> DocumentsAssigned | None:
            fan_out.send(ctx, nodes(event.names))
            return None

        @step
        async def read(self, event: DocumentsAssigned) -> Found:
            async with fan_out.aplanning(event) as plan:
                return Found.after(event, ids=[str(planned.block.id) for planned in plan.blocks])

        @step
        async def gather(self, ctx: Context, event: Found) -> StopEvent | None:
            found = fan_out.collect(ctx, event)
            return None if found is None else StopEvent(sorted(id for each in found for id in each.ids))

    for names in EARLIER:
        assert await Reading().run(names=names) == sorted(names)
    candidates, chosen, _ = NAMES
    assert await Reading().run(names=candidates) == sorted(chosen)


class Found(DocumentsRead):
    ids: list[str]


def test_documents_that_are_moved_are_not_chosen_again() -> None:
    agents = router("ann", "ben", "cem")
    fan_out = GraphFanOut(agents, "read", choose=CHOICE)
    sends: list[Any] = fan_out({"documents": documents("abcdef")}, {})
    handed = [document.id for send in sends for document in send.arg["documents"]]
    assert sorted(handed) == list("abcd")
    first = sends[0].arg
    agents.fail(first["agent"])
    moved = [document.id for send in fan_out.reassign(first) for document in send.arg["documents"]]
    assert moved == [document.id for document in first["documents"]]


def test_scores_of_every_kind_of_document() -> None:
    score = {"relevance_score": 0.5}
    given = [
        Document("a", metadata=score),
        nodes("b")[0],
        {"page_content": "c", "metadata": score},
        blocks("d")[0],
        "e",
    ]
    given += [Document("f", metadata={"relevance_score": "good"}), Document("g", metadata={"relevance_score": 10**400})]
    assert [block.score for block in as_blocks(given)] == [0.5, 1.0, 0.5, 1.0, None, None, None]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"choose": 8}, TypeError, "choose must be a Choice or None, got int"),
        ({"choose": CHOICE, "order_locked": True}, ValueError, "order_locked must be False with choose"),
    ],
)
def test_wrong_options_are_refused_at_once(
    start_team: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        start_team(workers=2, **options)
    with pytest.raises(error, match=match):
        GraphFanOut(AgentRouter(["ann"]), "read", **options)
    with pytest.raises(error, match=match):
        WorkflowFanOut(AgentRouter(["ann"]), **options)
