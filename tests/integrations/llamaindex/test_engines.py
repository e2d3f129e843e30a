"""Every engine that takes node postprocessors: the prompts of its model, and the nodes afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import MockEmbedding, QueryBundle, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import (
    BaseQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index_instrumentation.dispatcher import instrument_tags

from warmprefix import ContextPlanner
from warmprefix_llamaindex import ContextReusePostprocessor

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]
ReadNote = Callable[[str, Sequence[str]], list[str]]
Reordering = Callable[..., ContextReusePostprocessor]
MakeLLM = Callable[..., Any]

PASSAGES = ["The sky is blue.", "The sea is deep.", "The sun is far away."]
FOUND = [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1]]
"""What is found turn by turn, best first."""


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [scored.node_id for scored in nodes]


def check_prompts(prompts: Sequence[str], read_note: ReadNote) -> None:
    """Each of the turns' prompts holds the passages in the first turn's order and names the order of its own."""
    assert len(prompts) == len(FOUND)
    label = "[Doc_{}] " if "[Doc_" in prompts[0] else ""
    assert all(("[Doc_" in prompt) == bool(label) for prompt in prompts)
    for prompt, found in zip(prompts, FOUND, strict=True):
        places = [prompt.index(label.format(i) + text) for i, text in enumerate(PASSAGES)]
        assert places == sorted(places)
        named = [] if found[0] == 0 and not label else [f"Doc_{i}" for i in found[: None if label else 1]]
        assert read_note(prompt, PASSAGES) == ([] if found == [0, 1, 2] else named)
        assert "above in this conversation" not in prompt


def answer_prompts(prompts: Sequence[str]) -> list[str]:
    """Without those that condense a question."""
    return [prompt for prompt in prompts if "standalone question" not in prompt]


@pytest.fixture(params=["auto", "both"])
def postprocessor(request: Any, reordering: Reordering) -> ContextReusePostprocessor:
    return reordering(annotate=request.param)


@pytest.fixture
def ask_all(retriever: Any, make_nodes: MakeNodes) -> Callable[[Callable[[str], Any]], list[Any]]:
    """Ask a question a turn, each of which finds the same passages in another order."""

    def ask(query: Callable[[str], Any]) -> list[Any]:
        answers = []
        for turn, found in enumerate(FOUND):
            nodes = make_nodes(PASSAGES)
            retriever.nodes = [nodes[i] for i in found]
            answers.append(query(f"Question {turn}?"))
        return answers

    return ask


# -- query engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_retriever_query_engine(
    asynchronous: bool,
    streaming: bool,
    retriever: Any,
    ask_all: Any,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    postprocessor: ContextReusePostprocessor,
) -> None:
    llm = recording_llm()
    engine = RetrieverQueryEngine.from_args(
        retriever, llm=llm, node_postprocessors=[postprocessor], streaming=streaming
    )

    async def aquery(question: str) -> Any:
        response = await engine.aquery(question)
        if streaming:
            assert "".join([word async for word in response.async_response_gen()]).strip() == "It is so."  # type: ignore[union-attr]
        return response

    def query(question: str) -> Any:
        if asynchronous:
            return asyncio.run(aquery(question))
        response = engine.query(question)
        if streaming:
            assert "".join(response.response_gen).strip() == "It is so."  # type: ignore[arg-type, union-attr]
        return response

    responses = ask_all(query)
    check_prompts(llm.prompts, read_note)
    for response in responses:
        assert [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes] == PASSAGES


def test_engines_around_engines(
    retriever: Any, ask_all: Any, recording_llm: MakeLLM, read_note: ReadNote, postprocessor: ContextReusePostprocessor
) -> None:
    class First(BaseSelector):
        def _get_prompts(self) -> Any:
            return {}

        def _update_prompts(self, prompts_dict: Any) -> None:
            pass

        def _select(self, choices: Any, query: QueryBundle) -> SelectorResult:
            return SelectorResult(selections=[SingleSelection(index=0, reason="")])

        async def _aselect(self, choices: Any, query: QueryBundle) -> SelectorResult:
            return self._select(choices, query)

    llm = recording_llm()
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[postprocessor])
    routed = RouterQueryEngine(
        First(), [QueryEngineTool.from_defaults(TransformQueryEngine(inner, IdentityQueryTransform()))], llm=llm
    )
    responses = ask_all(routed.query)
    check_prompts(llm.prompts, read_note)
    assert all(len(response.source_nodes) == 3 for response in responses)


def test_sub_questions_are_annotated_and_their_answers_are_not(
    retriever: Any, ask_all: Any, recording_llm: MakeLLM, read_note: ReadNote, postprocessor: ContextReusePostprocessor
) -> None:
    class Same(BaseQuestionGenerator):
        def _get_prompts(self) -> Any:
            return {}

        def _update_prompts(self, prompts_dict: Any) -> None:
            pass

        def generate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
            return [SubQuestion(sub_question=query.query_str, tool_name="docs")]

        async def agenerate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
            return self.generate(tools, query)

    llm = recording_llm()
    Settings.llm = llm
    try:
        inner: BaseQueryEngine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[postprocessor])
        tool = QueryEngineTool.from_defaults(inner, name="docs", description="docs")
        engine = SubQuestionQueryEngine.from_defaults(
            [tool], llm=llm, question_gen=Same(), use_async=False, verbose=False
        )
        ask_all(engine.query)
    finally:
        Settings._llm = None
    check_prompts(llm.prompts[::2], read_note)
    assert all("Sub question: Question" in prompt and "[Doc_" not in prompt for prompt in llm.prompts[1::2])


# -- chat engines --------------------------------------------------------------------------------------------------


def a_memory() -> ChatMemoryBuffer:
    """Not the newest kind, which never closes its database."""
    return ChatMemoryBuffer.from_defaults(token_limit=100_000)


def make_chat(kind: str, retriever: Any, llm: Any, postprocessor: ContextReusePostprocessor) -> Any:
    if kind == "context":
        return ContextChatEngine.from_defaults(
            retriever, llm=llm, node_postprocessors=[postprocessor], system_prompt="Be brief.", memory=a_memory()
        )
    if kind == "condense_plus_context":
        return CondensePlusContextChatEngine.from_defaults(
            retriever, llm=llm, node_postprocessors=[postprocessor], system_prompt="Be brief.", memory=a_memory()
        )
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[postprocessor])
    return CondenseQuestionChatEngine.from_defaults(engine, llm=llm, memory=a_memory())


@pytest.mark.parametrize("kind", ["context", "condense_plus_context", "condense_question"])
def test_chat_engines(
    kind: str,
    retriever: Any,
    ask_all: Any,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    postprocessor: ContextReusePostprocessor,
) -> None:
    llm = recording_llm()
    chat = make_chat(kind, retriever, llm, postprocessor)
    responses = ask_all(chat.chat)
    check_prompts(answer_prompts(llm.prompts), read_note)
    for response in responses:
        assert [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes] == PASSAGES
    history = "".join(str(message.content) for message in chat.chat_history)
    assert len(chat.chat_history) == 10
    assert "Doc_" not in history
    assert "priority order" not in history


@pytest.mark.parametrize("kind", ["context", "condense_plus_context"])
def test_chat_engines_streaming(
    kind: str,
    retriever: Any,
    ask_all: Any,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    postprocessor: ContextReusePostprocessor,
) -> None:
    llm = recording_llm()
    chat = make_chat(kind, retriever, llm, postprocessor)

    def ask(question: str) -> Any:
        response = chat.stream_chat(question)
        assert "".join(response.response_gen).strip() == "It is so."
        return response

    for response in ask_all(ask):
        assert [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes] == PASSAGES
    check_prompts(answer_prompts(llm.prompts), read_note)


@pytest.mark.parametrize("kind", ["context", "condense_plus_context", "condense_question"])
def test_chat_engines_async(
    kind: str,
    retriever: Any,
    ask_all: Any,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    postprocessor: ContextReusePostprocessor,
) -> None:
    llm = recording_llm()
    chat = make_chat(kind, retriever, llm, postprocessor)
    ask_all(lambda question: asyncio.run(chat.achat(question)))
    check_prompts(answer_prompts(llm.prompts), read_note)


def test_a_chat_whose_history_leaves_no_room_stays_as_without_us(
    retriever: Any, make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    """The history is in the template, so the context is split sooner from turn to turn."""

    def conversation(postprocessors: list[Any]) -> list[str]:
        llm = recording_llm(context_window=2_100, answer=" ".join(f"word{n}" for n in range(150)))
        chat = ContextChatEngine.from_defaults(
            retriever, llm=llm, node_postprocessors=postprocessors, memory=a_memory()
        )
        for turn, found in enumerate(FOUND):
            nodes = make_nodes(
                [f"{text} " + " ".join(f"w{i}n{n}" for n in range(60)) for i, text in enumerate(PASSAGES)]
            )
            retriever.nodes = [nodes[i] for i in found]
            chat.chat(f"Question {turn}?")
        return list(llm.prompts)

    ours, without = conversation([ContextReusePostprocessor()]), conversation([])
    noted = ["Most relevant above: the passage with " in prompt for prompt in ours]
    assert noted[:2] == [False, True]
    assert not noted[-1]
    split = ours[len(ours) - noted[::-1].index(True) :]
    unchanged = without[-len(split) :]
    # A turn may have another order that needs no note, because the best passage stays the first.
    assert list(map(sorted, split)) == list(map(sorted, unchanged))
    assert split[-2:] == unchanged[-2:]


def test_a_model_error_loses_nothing(
    retriever: Any, ask_all: Any, recording_llm: MakeLLM, read_note: ReadNote, postprocessor: ContextReusePostprocessor
) -> None:
    llm = recording_llm()
    chat = make_chat("context", retriever, llm, postprocessor)

    def ask(question: str) -> Any:
        llm.failures = 1
        with pytest.raises(ConnectionError):
            chat.chat(question)
        return chat.chat(question)

    ask_all(ask)
    check_prompts(llm.prompts[1::2], read_note)
    assert llm.prompts[::2] == llm.prompts[1::2]


# -- many at once --------------------------------------------------------------------------------------------------


def test_threads_may_share_one_engine(
    recording_llm: MakeLLM, retriever: Any, make_nodes: MakeNodes, read_note: ReadNote
) -> None:
    llm = recording_llm()
    retriever.nodes = make_nodes(PASSAGES)
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[ContextReusePostprocessor()])
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(engine.query, [f"Question {i}?" for i in range(64)]))
    assert len(llm.prompts) == 64
    for prompt in llm.prompts:
        assert all(prompt.count(f"\n{text}\n") == 1 for text in PASSAGES)
        assert read_note(prompt, PASSAGES) == []
    for response in responses:
        assert [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes] == PASSAGES


async def test_tasks_keep_their_tenants_apart(
    recording_llm: MakeLLM, retriever: Any, make_nodes: MakeNodes, reordering: Reordering
) -> None:
    llm = recording_llm()
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[reordering()])
    nodes = make_nodes(PASSAGES)

    async def ask(tenant: str, found: list[int]) -> list[str]:
        retriever.nodes = [nodes[i] for i in found]
        with instrument_tags({"tenant": tenant}):
            return ids((await engine.aquery("Why?")).source_nodes)

    assert await ask("acme", [0, 1, 2]) == ["Doc_0", "Doc_1", "Doc_2"]
    other, acme = await asyncio.gather(ask("other", [2, 1, 0]), ask("acme", [2, 1, 0]))
    assert other == ["Doc_2", "Doc_1", "Doc_0"]
    assert acme == ["Doc_0", "Doc_1", "Doc_2"]


# -- real indices --------------------------------------------------------------------------------------------------


def test_an_index_answers_and_stays_as_it_was(recording_llm: MakeLLM, turns: list[Any], read_note: ReadNote) -> None:
    passages = {block.id: block.text for turn in turns[:4] for block in turn.passages}
    nodes = [TextNode(text=text, id_=id_, metadata={"source": id_}) for id_, text in passages.items()]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=3))
    before = index.docstore.to_dict()  # type: ignore[attr-defined]
    vectors = index.vector_store.to_dict()
    planner = ContextPlanner()
    llm = recording_llm(context_window=1_000_000)
    for options in ({}, {"response_mode": "tree_summarize"}, {"streaming": True}):
        engine = index.as_query_engine(
            llm=llm,
            similarity_top_k=6,
            node_postprocessors=[ContextReusePostprocessor(planner=planner, annotate="both")],
            **options,
        )
        for turn in turns[:4]:
            response = engine.query(turn.question)
            if options == {"streaming": True}:
                str(response)
            assert len(response.source_nodes) == 6
    chat = index.as_chat_engine(
        chat_mode=ChatMode.CONDENSE_PLUS_CONTEXT,
        llm=llm,
        node_postprocessors=[ContextReusePostprocessor(planner=planner, annotate="both")],
        memory=a_memory(),
    )
    chat.chat(turns[0].question)
    assert index.docstore.to_dict() == before  # type: ignore[attr-defined]
    assert index.vector_store.to_dict() == vectors
    assert len(llm.prompts) == 13
    for prompt in llm.prompts:
        read_note(prompt, [])
        assert prompt.count("] source: ") >= 2


def test_all_nodes_of_a_summary_index(recording_llm: MakeLLM, read_note: ReadNote) -> None:
    llm = recording_llm()
    index = SummaryIndex([TextNode(text=text, id_=f"Doc_{i}") for i, text in enumerate(PASSAGES)])
    engine = index.as_query_engine(
        llm=llm, response_mode="tree_summarize", node_postprocessors=[ContextReusePostprocessor()]
    )
    assert ids(engine.query("What?").source_nodes) == ["Doc_0", "Doc_1", "Doc_2"]
    assert read_note(llm.prompts[0], PASSAGES) == []
    assert "The sea is deep.\n\nThe sun is far away.\n" in llm.prompts[0]
