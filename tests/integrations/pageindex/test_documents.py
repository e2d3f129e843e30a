"""Trees in front of questions, pages once, and nodes as blocks, with the real PageIndex."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("pageindex")
pytest.importorskip("agents")

import agents
from agents.run_config import CallModelData, ModelInputData
from hypothesis import given
from hypothesis import strategies as st
from pageindex import PageIndexAPIError

from pageindex_questions import ANSWER, called, chat_model
from warmprefix import ContextPlanner
from warmprefix_pageindex import node_blocks, pages_once, tree_instructions

STRUCTURE = "get_document_structure"
CONTENT = "get_page_content"


def ask(library: Any, question: str, *calls: dict[str, Any], instructions: str = "") -> str:
    library.engine.script += [*calls, ANSWER]
    answer: str = library.client.chat(question, doc_id=library.document, instructions=instructions or None)
    return answer


def read(pages: str, number: int = 0) -> dict[str, Any]:
    return called(f"read-{number}", CONTENT, doc_name="library.pdf", pages=pages)


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# -- trees -------------------------------------------------------------------------------------------------------------


def test_the_tree_stands_in_front_word_for_word_as_the_tool_has_it(library: Any) -> None:
    trees = tree_instructions(library.client, library.document)
    ask(library, "How deep is it?", called("tree", STRUCTURE, doc_name="library.pdf"))
    assert trees.endswith(text_of(library.engine.bodies[-1]["messages"][-1]))
    before = len(library.engine.bodies)
    assert ask(library, "How deep is it?", read("2-3"), instructions=trees) == ANSWER["content"]
    first, _ = library.engine.bodies[before:]
    assert trees in text_of(first["messages"][0])
    assert len(library.engine.bodies) == before + 2


def test_another_question_computes_no_tree_again(library: Any) -> None:
    trees = tree_instructions(library.client, library.document)
    ask(library, "How deep is it?", instructions=trees)
    tokens = library.engine.prompt_tokens - library.engine.cached_tokens
    ask(library, "Who sails there?", instructions=trees)
    assert library.engine.prompt_tokens - library.engine.cached_tokens - tokens < 100 < tokens


def test_documents_have_one_order(library: Any) -> None:
    other = "pi-no-such-document"
    assert tree_instructions(library.client, [library.document, library.document]) == tree_instructions(
        library.client, library.document
    )
    assert tree_instructions(library.client, []) == ""
    with pytest.raises(PageIndexAPIError):
        tree_instructions(library.client, [library.document, other])


def test_a_tree_in_parts_stays_behind_its_tool(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageindex.agent_tools._CHAR_BUDGET", 400)
    assert tree_instructions(library.client, library.document) == ""


# -- pages -------------------------------------------------------------------------------------------------------------


def converse(library: Any, *ranges: str, filtered: bool = True) -> list[list[dict[str, Any]]]:
    """Ask a question per range in one conversation of the Agents SDK; return the messages of all prompts."""
    agents.set_tracing_disabled(True)
    config = {**library.client.openai_agent_config(), "model": chat_model(library.base_url)}
    config["instructions"] += "\n\n" + tree_instructions(library.client, library.document)
    run_config = agents.RunConfig(call_model_input_filter=pages_once if filtered else None)
    history: list[Any] = []

    async def turns() -> None:
        nonlocal history
        for number, pages in enumerate(ranges):
            tree = [called("tree", STRUCTURE, doc_name="library.pdf")] if number == 0 else []
            library.engine.script += [*tree, read(pages, number), ANSWER]
            asked = [*history, {"role": "user", "content": f"Question {number}"}]
            run = await agents.Runner.run(agents.Agent(**config), asked, run_config=run_config)
            history = run.to_input_list()

    asyncio.run(turns())
    return [body["messages"] for body in library.engine.bodies]


def test_pages_of_overlapping_ranges_are_sent_once(library: Any) -> None:
    prompts = converse(library, "2-3", "3-5", "1-6", "1-6")
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] == shorter
    tree, *results = [text_of(message) for message in prompts[-1] if message["role"] == "tool"]
    assert tree == "[Word for word the structure of this document in your instructions.]"
    pages = [json.loads(result)["content"] for result in results]
    whole = [[page["page"] for page in content if not page["text"].startswith("[Word")] for content in pages]
    assert whole == [[2, 3], [4, 5], [1, 6], []]
    first = json.dumps({"doc_name": "library.pdf", "pages": "2-3"})
    assert pages[1][0]["text"] == f"[Word for word this page in the result of the earlier call {CONTENT}({first}).]"


def test_what_comes_once_keeps_its_bytes(library: Any) -> None:
    filtered = converse(library, "2-3", "4")[-1][4:]
    library.engine.bodies.clear()
    assert converse(library, "2-3", "4", filtered=False)[-1][4:] == filtered


@pytest.mark.parametrize(
    "output",
    [
        "",
        "[]",
        '{"content": null}',
        '{"content": [1, null, {"page": 1}, {"page": 1, "text": 5}]}',
        '{"doc_name": "a", "content": [{"page": 1, "text": "short"}]}',
        '{"doc_name":"a","content":[{"page":1,"text":"' + "x" * 300 + '"}]}',  # not as PageIndex writes it
        "[" * 100_000,
        [{"type": "input_image", "image_url": "x"}],
        [],
        None,
    ],
)
def test_other_results_stay(output: Any) -> None:
    items: list[Any] = ["text", None]
    for number in range(3):
        call = {"type": "function_call", "call_id": f"c{number}", "name": CONTENT, "arguments": "{}"}
        items += [call, {"type": "function_call_output", "call_id": f"c{number}", "output": output}]
    given = ModelInputData(input=items, instructions=None)
    assert pages_once(CallModelData(given, agents.Agent(name="a"), None)) is given


def test_a_page_whose_first_occurrence_was_cut_away_is_sent_whole() -> None:
    page = {"page": 1, "text": "The sea is deep. " * 20}
    result = json.dumps({"success": True, "doc_name": "a", "content": [page]})
    items: list[Any] = []
    for number in range(2):
        items += [
            {"type": "function_call", "call_id": f"c{number}", "name": CONTENT, "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": result},
        ]
    data = CallModelData(ModelInputData(input=items, instructions="x"), agents.Agent(name="a"), None)
    assert pages_once(data).input[3]["output"].count("Word for word") == 1
    cut = ModelInputData(input=items[2:], instructions="x")
    assert pages_once(dataclasses.replace(data, model_data=cut)) is cut


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, unique=True), min_size=1, max_size=6), st.booleans())
def test_every_cut_of_a_conversation_is_the_beginning_of_all_of_it(ranges: list[list[int]], is_edited: bool) -> None:
    items: list[Any] = []
    for number, pages in enumerate(ranges):
        entries = [{"page": page, "text": f"Page {page} {is_edited and number == 2}. " * 30} for page in pages]
        result = json.dumps({"success": True, "doc_name": "a", "content": entries})
        call = {"type": "function_call", "call_id": f"c{number}", "name": CONTENT, "arguments": str(pages)}
        items += [call, {"type": "function_call_output", "call_id": f"c{number}", "output": result}]
    agent = agents.Agent(name="a")
    sent = pages_once(CallModelData(ModelInputData(input=items, instructions=None), agent, None)).input
    for cut in range(len(items)):
        given_input = ModelInputData(input=items[:cut], instructions=None)
        assert pages_once(CallModelData(given_input, agent, None)).input == sent[:cut]
    texts = [entry["text"] for item in sent[1::2] for entry in json.loads(item["output"])["content"]]
    whole = [text for text in texts if not text.startswith("[Word for word this page in")]
    assert len(whole) == len(set(whole))
    assert set(whole) == {entry["text"] for item in items[1::2] for entry in json.loads(item["output"])["content"]}


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_nodes_become_their_pages_each_once(library: Any) -> None:
    tree = library.client.get_document_structure(library.document)
    first, second = tree[-1], tree[0]
    picked = [first["node_id"], second["node_id"], first["node_id"]]
    blocks = node_blocks(library.client, library.document, picked)
    numbers = [*range(first["start_index"], first["end_index"] + 1)]
    numbers += [page for page in range(second["start_index"], second["end_index"] + 1) if page not in numbers]
    assert [block.id for block in blocks] == [f"library.pdf:{number}" for number in numbers]
    planner = ContextPlanner()
    with planner.planning(blocks, conversation="chat", placement="tail") as plan:
        assert not plan.references
    again = planner.plan(
        node_blocks(library.client, library.document, picked[:1]), conversation="chat", placement="tail"
    )
    assert len(again.references) == len(again.blocks)


def test_unknown_nodes_are_refused(library: Any) -> None:
    assert node_blocks(library.client, library.document, []) == []
    with pytest.raises(ValueError, match="'9999'"):
        node_blocks(library.client, library.document, ["9999"])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # `run_sync` shuts down generators of a loop that it uses again
def test_the_page_of_frameworks(library: Any, run_section: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", library.base_url)
    agents.set_default_openai_api("chat_completions")
    agents.set_tracing_disabled(True)
    library.engine.script += [read("2"), ANSWER] * 3
    names = {"pageindex_client": library.client, "document": library.document, "planner": ContextPlanner()}
    found = run_section("PageIndex", names)
    assert found["plan"].blocks
    assert "earlier call" in text_of(library.engine.bodies[-1]["messages"][-1])
