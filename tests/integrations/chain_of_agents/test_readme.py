"""The code blocks of README.md and docs/frameworks.md for several agents run as they stand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, TypedDict

import pytest
from openai import OpenAI

from warmprefix import ContextBlock

DOCUMENTS = [f"Document {number}. " * 30 for number in range(5)]
MODEL = "warmprefix-emulator"

RunSection = Callable[[str, dict[str, Any]], dict[str, Any]]


class State(TypedDict):
    """The state of the graph."""

    question: str
    documents: list[Any]
    notes: Annotated[list[str], operator.add]


@pytest.fixture
def clients(start_engine: Callable[[], Any]) -> Iterator[dict[str, OpenAI]]:
    """Clients of two agents, each with an engine of its own."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(OpenAI(base_url=start_engine().base_url, api_key="none"))
            for name in ("ann", "ben")
        }


def test_the_readmes_block_runs(readme_blocks: Callable[[str], list[str]], clients: dict[str, OpenAI]) -> None:
    names = {
        "clients": clients,
        "client": clients["ann"],
        "model": MODEL,
        "question": "What is it?",
        "documents": [ContextBlock(text, id=number) for number, text in enumerate(DOCUMENTS)],
    }
    [block] = readme_blocks("warmprefix_chain_of_agents")
    exec(compile(block, "README.md", "exec"), names)
    first: Any = names["answer"]
    exec(compile("answer = chain.run(question, documents[::-1])", "again", "exec"), names)
    again: Any = names["answer"]
    assert {report.agent for report in first.workers} == {"ann", "ben"}
    assert again.usage.cached_tokens > first.usage.cached_tokens + 500


def test_the_pages_chain_runs(
    run_section: RunSection, clients: dict[str, OpenAI], capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_section("Chain-of-Agents", {"clients": clients, "model_name": MODEL, "documents": DOCUMENTS})
    assert {report.agent for report in names["answer"].workers} == {"ann", "ben"}
    assert "tokens were cached" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning")
def test_the_pages_graph_runs(run_section: RunSection, clients: dict[str, OpenAI]) -> None:
    from langgraph.graph import END, StateGraph

    graph: Any = StateGraph(State)
    run_section("LangGraph and LlamaIndex workflows", {"graph": graph, "clients": clients, "model_name": MODEL})
    graph.add_edge("read", END)
    asked = {"question": "What is it?", "documents": DOCUMENTS, "notes": []}
    assert len(graph.compile().invoke(asked)["notes"]) == 2
