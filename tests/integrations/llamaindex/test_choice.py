"""`choose=`: more nodes than places, from real retrievers; which are fed, and what is behind them then."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.postprocessor import LongContextReorder, PrevNextNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import RetrieverTool

from warmprefix import Choice, ContextPlanner
from warmprefix_llamaindex import ContextReusePostprocessor

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]
MakeLLM = Callable[..., Any]
OpenModel = Callable[[Any], AbstractAsyncContextManager[Any]]

CANDIDATES = 20
CHOICE = Choice(k=8, most=1)
DIMENSIONS = 512


class HashedWords(BaseEmbedding):
    """Embedding by hashed word counts: texts that share more words are nearer."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * DIMENSIONS
        for word in re.findall(r"\w{3,}", text.lower()):
            vector[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture
def index(turns: list[Any]) -> VectorStoreIndex:
    """All passages, in a `SimpleVectorStore`."""
    passages = {passage.text: passage for turn in turns for passage in turn.passages}.values()
    nodes = [
        TextNode(
            text=passage.text,
            id_=passage.id,
            metadata={"file": f"{place}.txt"},
            excluded_llm_metadata_keys=["file"],
        )
        for place, passage in enumerate(passages)
    ]
    return VectorStoreIndex(nodes, embed_model=HashedWords())


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [scored.node_id for scored in nodes]


def chosen(found: Sequence[NodeWithScore], fed: Sequence[NodeWithScore], choice: Choice = CHOICE) -> int:
    """Check the nodes fed out of those found; return how many entered by choice."""
    own = {scored.node_id: scored for scored in found}
    assert len({*ids(fed)}) == len(fed) == choice.k
    assert {*ids(found[: choice.kept])} <= {*ids(fed)}
    scores = [scored.get_score() for scored in found]
    least = scores[choice.k - 1] - choice.within * (scores[0] - scores[choice.k - 1])
    for scored in fed:
        assert scored.score == own[scored.node_id].score
        assert scored.get_score() >= least - 1e-9
        given = own[scored.node_id].node
        assert scored.node.get_content(MetadataMode.LLM) == given.get_content(MetadataMode.LLM)
        assert scored.metadata.items() >= given.metadata.items()
        assert scored.metadata["warmprefix_rank"] == ids(found).index(scored.node_id)
    return len({*ids(fed)} - {*ids(found[: choice.k])})


# -- the step itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_nodes_of_a_vector_store_are_chosen_with_score_and_metadata(
    is_async: bool, index: VectorStoreIndex, turns: list[Any]
) -> None:
    retriever = index.as_retriever(similarity_top_k=CANDIDATES)
    postprocessor = ContextReusePostprocessor(choose=CHOICE)
    entered = 0
    for number, turn in enumerate(turns):
        found = retriever.retrieve(turn.question)
        before = copy.deepcopy(found)
        if is_async:
            fed = asyncio.run(postprocessor.apostprocess_nodes(found, query_str=turn.question))
        else:
            fed = postprocessor.postprocess_nodes(found, query_str=turn.question)
        assert [scored.model_dump() for scored in found] == [scored.model_dump() for scored in before]
        entered += chosen(found, fed)
        if number == 0:
            assert ids(fed) == ids(found[:8])
    assert entered


async def test_tasks_share_one_postprocessor(index: VectorStoreIndex, turns: list[Any]) -> None:
    retriever = index.as_retriever(similarity_top_k=CANDIDATES)
    postprocessor = ContextReusePostprocessor(choose=CHOICE)

    async def ask(question: str) -> int:
        found = await retriever.aretrieve(question)
        return chosen(found, await postprocessor.apostprocess_nodes(found))

    for start in range(0, len(turns), 6):
        await asyncio.gather(*[ask(turn.question) for turn in turns[start : start + 6]])


def test_fused_retrievers_and_the_plain_first_nodes(
    index: VectorStoreIndex, turns: list[Any], recording_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    fused = QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=12), index.as_retriever(similarity_top_k=CANDIDATES)],
        llm=recording_llm(),
        mode="reciprocal_rerank",  # type: ignore[arg-type]
        similarity_top_k=CANDIDATES,
        num_queries=1,
        use_async=False,
    )
    postprocessor = ContextReusePostprocessor(choose=CHOICE)
    for turn in turns[:12]:
        found = fused.retrieve(turn.question)
        assert len(found) == CANDIDATES
        chosen(found, postprocessor.postprocess_nodes(found))
    assert not caplog.records


@pytest.mark.parametrize("broken", ["none", "nan", "one missing", "reordered", "neighbours", "summary"])
def test_without_usable_scores_the_first_nodes_are_fed(
    broken: str,
    index: VectorStoreIndex,
    turns: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    retriever: Any = index.as_retriever(similarity_top_k=CANDIDATES)
    steps: list[Any] = []
    documents = SimpleDocumentStore()
    if broken == "reordered":
        steps = [LongContextReorder()]
    elif broken == "neighbours":
        for before, after in pairwise(index.docstore.docs.values()):
            before.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id=after.node_id)
            documents.add_documents([before, after])
        steps = [PrevNextNodePostprocessor(docstore=documents, num_nodes=1, mode="next")]
    elif broken == "summary":
        retriever = SummaryIndex(list(index.docstore.docs.values())).as_retriever()
    postprocessor = ContextReusePostprocessor(choose=CHOICE)
    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        for turn in turns[:3]:
            found = retriever.retrieve(turn.question)
            for scored in found if broken == "neighbours" else ():
                scored.node = documents.get_node(scored.node_id)
            for step in steps:
                found = step.postprocess_nodes(found, query_str=turn.question)
            scores: dict[str, dict[int, float | None]] = {
                "none": dict.fromkeys(range(CANDIDATES)),
                "nan": {9: math.nan},
                "one missing": {19: None},
            }
            for place, score in scores.get(broken, {}).items():
                found[place].score = score
            fed = postprocessor.postprocess_nodes(found)
            assert sorted(ids(fed)) == sorted(ids(found[:8]))
            assert {scored.node_id: str(scored.score) for scored in fed} == {
                scored.node_id: str(scored.score) for scored in found[:8]
            }
    records = [record for record in caplog.records if record.name == "warmprefix"]
    assert [record.levelno for record in records] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    position = {"none": "0", "nan": "9", "one missing": "19"}.get(broken, r"\d+")
    assert re.search(rf"^no choice, the first nodes are fed: candidate.* {position} ", records[0].message)
    assert postprocessor.planner.stats().plans == 3


def test_few_equal_and_negative_scores_and_distances(make_nodes: MakeNodes) -> None:
    nodes = make_nodes([f"passage {i} " * 40 for i in range(6)])
    for scores, choose in (
        ([5.0] * 6, Choice(k=4)),
        ([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], Choice(k=4)),
        ([0.1, 0.2, 0.2, 0.3, 0.3, 0.9], Choice(k=4, scores="distance")),
        ([0.0, -0.0, 0.0, -1e300, -1e308, -1.7e308], Choice(k=4, extra=1)),
    ):
        for node, score in zip(nodes, scores, strict=True):
            node.score = score
        postprocessor = ContextReusePostprocessor(choose=choose)
        assert ids(postprocessor.postprocess_nodes(nodes)) == ids(nodes[:4])
        assert {*ids(postprocessor.postprocess_nodes(nodes[:2]))} == {*ids(nodes[:2])}
        assert postprocessor.postprocess_nodes([]) == []


def test_nodes_without_text_keep_their_places_and_equal_ones_count_once(make_nodes: MakeNodes) -> None:
    a, b, c, d = make_nodes([f"passage {i} " * 40 for i in range(4)])
    again = a.model_copy(update={"node": a.node.model_copy(update={"id_": "again"}), "score": b.score})
    image = NodeWithScore(node=ImageNode(image_url="http://127.0.0.1/sky.png", id_="image"))
    late = NodeWithScore(node=ImageNode(image_url="http://127.0.0.1/sea.png", id_="late"))
    postprocessor = ContextReusePostprocessor(choose=Choice(k=3))
    fed = postprocessor.postprocess_nodes([a, image, b, again, c, d, late])
    assert ids(fed) == ["Doc_0", "image", "Doc_1", "Doc_2"]
    assert [type(scored.node) for scored in fed] == [TextNode, ImageNode, TextNode, TextNode]


def test_a_failure_feeds_the_first_nodes_as_they_came(make_nodes: MakeNodes, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            raise RuntimeError("no text today")

    nodes = [*make_nodes(["one", "two", "three"]), NodeWithScore(node=Odd(text="odd"), score=0.1)]
    fed = ContextReusePostprocessor(choose=Choice(k=2)).postprocess_nodes(nodes)
    assert [is_ is was for is_, was in zip(fed, nodes, strict=False)] == [True, True]
    assert "no text today" in caplog.text


scores = st.none() | st.floats() | st.integers(-3, 3).map(float)


@given(
    st.lists(st.lists(st.tuples(st.text("ab ", max_size=3), scores), max_size=9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_whatever_is_given_the_first_are_fed_and_nothing_else_than_given(
    requests: list[list[tuple[str, float | None]]], k: int, extra: int, is_sorted: bool
) -> None:
    outcomes = []
    for _ in range(2):
        postprocessor = ContextReusePostprocessor(
            choose=Choice(k=k, extra=extra, most=1), planner=ContextPlanner(annotate="none")
        )
        outcome = []
        for request in requests:
            texts = dict(request)
            found = [(text * 9, score) for text, score in texts.items()]
            if is_sorted:
                found = [(text, score or 0.0) for text, score in found]
                found.sort(key=lambda each: each[1] or 0.0, reverse=True)
            nodes = [
                NodeWithScore(node=TextNode(text=text, id_=f"{i}{text}"), score=score)
                for i, (text, score) in enumerate(found)
            ]
            fed = postprocessor.postprocess_nodes(nodes)
            outcome.append(ids(fed))
            shown = [scored.node_id for scored in nodes if scored.node.get_content().strip()]
            with_text = [each for each in ids(fed) if each in shown]
            assert len({*ids(fed)}) == len(fed)
            assert {*ids(fed)} <= {*ids(nodes)}
            assert min(k, len(shown)) <= len(with_text) <= k + extra
            assert {*shown[: min(3, k)]} <= {*with_text}
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]


def test_versions_and_twins_are_read_from_nodes(make_nodes: MakeNodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes([f"passage {i} " * 20 for i in range(6)])
    for scored, file, day in zip(nodes, ["a", "b", "a", "c", "d", "e"], [1, 1, 2, 1, 1, 1], strict=True):
        scored.node.metadata |= {"file": file, "day": day}
        scored.node.excluded_llm_metadata_keys = ["file", "day"]
    newest = Choice(k=3, version=lambda scored: (scored.metadata["file"], scored.metadata["day"]))
    postprocessor = ContextReusePostprocessor(choose=newest)
    assert sorted(ids(postprocessor.postprocess_nodes(nodes))) == ["Doc_1", "Doc_2", "Doc_3"]
    copied = postprocessor.to_dict()["choose"]
    assert (copied["version"], copied["twins"]) == (None, False)
    one_a_file = Choice(k=3, twins=lambda scored: scored.metadata["file"])
    fed = ContextReusePostprocessor(choose=one_a_file).postprocess_nodes(nodes)
    assert sorted(ids(fed)) == ["Doc_0", "Doc_1"]  # the place of the second of file a stays empty
    assert fed[0].metadata["day"] == 1
    assert not caplog.records
    broken = ContextReusePostprocessor(choose=Choice(k=3, version=lambda scored: scored.metadata["no such key"]))
    assert ids(broken.postprocess_nodes(nodes)) == ids(nodes[:3])
    assert broken.planner.stats().choice_errors == 1


def test_a_twin_has_the_rank_of_the_node_for_which_it_stands(
    make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: Callable[..., list[str]]
) -> None:
    body = "says that the tide comes twice a day, and that nobody who lives there is surprised by it. " * 4
    texts = [f"Docs 4.1 > tides\n{body}", "Glass is old. " * 40, "Bees are many. " * 40, f"Docs 4.2 > tides\n{body}"]
    texts = [text.strip() for text in texts]
    nodes = make_nodes(texts)
    postprocessor = ContextReusePostprocessor(choose=Choice(k=3, twins=True))
    held = make_nodes(texts)
    for place, scored in enumerate([held[3], held[1], held[2]]):
        scored.score = 1 - place / 100
    assert ids(postprocessor.postprocess_nodes([held[3], held[1], held[2]])) == ["Doc_3", "Doc_1", "Doc_2"]
    for order in ([0, 1, 2, 3], [1, 0, 2, 3]):
        found = [nodes[i].model_copy(update={"score": 1 - place / 100}) for place, i in enumerate(order)]
        fed = postprocessor.postprocess_nodes(found)
        assert ids(fed) == ["Doc_3", "Doc_1", "Doc_2"]
        assert [scored.metadata["warmprefix_rank"] for scored in fed] == [*map(order.index, (0, 1)), 2]
        llm = recording_llm()
        get_response_synthesizer(llm=llm).synthesize("What?", fed)
        assert read_note(llm.prompts[0], [texts[i] for i in (3, 1, 2)]) == ([] if order[0] == 0 else ["Doc_1"])


# -- engines, agents, conversations ------------------------------------------------------------------------------------


def query_engine(retriever: Any, llm: Any, steps: list[Any]) -> Callable[[str, str], Any]:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=steps)
    return lambda conversation, question: engine.query(question)


def citation_engine(retriever: Any, llm: Any, steps: list[Any]) -> Callable[[str, str], Any]:
    splitter = TokenTextSplitter(chunk_size=4_096)
    engine = CitationQueryEngine(retriever, llm=llm, node_postprocessors=steps, text_splitter=splitter)
    return lambda conversation, question: engine.query(question)


def chat_engine(retriever: Any, llm: Any, steps: list[Any]) -> Callable[[str, str], Any]:
    chats: dict[str, ContextChatEngine] = {}

    def ask(conversation: str, question: str) -> Any:
        if conversation not in chats:
            memory = ChatMemoryBuffer.from_defaults(token_limit=50_000)
            chats[conversation] = ContextChatEngine.from_defaults(
                retriever, llm=llm, node_postprocessors=steps, memory=memory
            )
        return chats[conversation].chat(question)

    return ask


@pytest.mark.parametrize("make_engine", [query_engine, citation_engine, chat_engine])
async def test_an_engine_computes_less_of_eight_chosen_nodes_than_of_the_first_eight(
    make_engine: Callable[..., Callable[[str, str], Any]],
    start_engine: Callable[[], Any],
    open_model: OpenModel,
    index: VectorStoreIndex,
    turns: list[Any],
) -> None:
    computed = {}
    for name, top_k, choose in (("first", 8, None), ("chosen", CANDIDATES, CHOICE)):
        server = start_engine()
        retriever = index.as_retriever(similarity_top_k=top_k)
        async with open_model(server) as llm:
            ask = make_engine(retriever, llm, [ContextReusePostprocessor(choose=choose)])
            for turn in turns[:24]:
                response = await asyncio.to_thread(ask, turn.conversation, turn.question)
                assert len(response.source_nodes) == 8
                prompt = server.prompts[-1].replace("\\[", "[")
                for scored in response.source_nodes:
                    text = (
                        index.docstore.get_node(scored.node.node_id).get_content()
                        if scored.node.node_id in index.docstore.docs
                        else scored.node.get_content().partition("\n")[2]
                    )
                    assert text.strip() in prompt
                    assert scored.score is not None
        computed[name] = server.prompt_tokens - server.cached_tokens
    assert computed["chosen"] < computed["first"]


NOT_ASKED = ("generation", "no_text", "context_only")


@pytest.mark.parametrize("mode", [mode.value for mode in ResponseMode if mode.value not in NOT_ASKED])
def test_every_response_mode_gets_the_chosen_nodes(
    mode: str, index: VectorStoreIndex, turns: list[Any], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=CANDIDATES),
        response_synthesizer=get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode)),
        node_postprocessors=[ContextReusePostprocessor(choose=CHOICE)],
    )
    for turn in turns[:4]:
        llm.prompts.clear()
        response = engine.query(turn.question)
        found = engine.retriever.retrieve(turn.question)
        chosen(found, response.source_nodes)
        prompts = "\n\n".join(llm.prompts).replace("\\[", "[")
        if mode == "simple_summarize":  # a list as Python prints it
            prompts = prompts.replace("\\n", "\n").replace("\\'", "'").replace("\\\\", "\\")
        shown = {scored.node_id for scored in found if scored.node.get_content().strip() in prompts}
        assert shown == {*ids(response.source_nodes)}


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_chat_streams_over_the_chosen_nodes(
    streaming: bool, start_engine: Callable[[], Any], open_model: OpenModel, index: VectorStoreIndex, turns: list[Any]
) -> None:
    async with open_model(start_engine()) as llm:
        chat = CondensePlusContextChatEngine.from_defaults(
            index.as_retriever(similarity_top_k=CANDIDATES),
            llm=llm,
            skip_condense=True,
            node_postprocessors=[ContextReusePostprocessor(choose=CHOICE)],
            memory=ChatMemoryBuffer.from_defaults(token_limit=50_000),
        )
        for turn in turns[:3]:
            if streaming:
                response: Any = await chat.astream_chat(turn.question)
                assert "".join([word async for word in response.async_response_gen()])
            else:
                response = await chat.achat(turn.question)
            chosen(index.as_retriever(similarity_top_k=CANDIDATES).retrieve(turn.question), response.source_nodes)


async def test_nodes_of_earlier_turns_become_references(index: VectorStoreIndex, turns: list[Any]) -> None:
    retriever = index.as_retriever(similarity_top_k=CANDIDATES)
    history: list[ChatMessage] = []
    tail = ContextReusePostprocessor(
        choose=CHOICE, placement="tail", annotate="labels", conversation=lambda query: list(history)
    )
    seen: dict[str, str] = {}
    references = 0
    for question in [turns[0].question, turns[0].question, turns[1].question, turns[0].question]:
        found = retriever.retrieve(question)
        fed = await tail.apostprocess_nodes(found)
        assert sorted(ids(fed)) == sorted(ids(found[:8]))  # later turns have no prefix to share
        assert {scored.node_id: scored.score for scored in fed} == {
            scored.node_id: scored.score for scored in found[:8]
        }
        shown = "\n\n".join([scored.node.get_content(MetadataMode.LLM) for scored in fed])
        for scored in fed:
            text = scored.node.get_content(MetadataMode.NONE)
            assert (text.strip() in shown.replace("\\[", "[")) == (scored.node_id not in seen)
            references += scored.node_id in seen
            seen[scored.node_id] = text
        history += [ChatMessage(role="user", content=f"{shown}\n\n{question}"), ChatMessage("Yes.", role="assistant")]
    assert references >= 16


async def test_a_memory_counts_only_the_nodes_that_are_fed(index: VectorStoreIndex, turns: list[Any]) -> None:
    """Twenty candidates would leave no room for the first turn in the memory; eight do."""
    found = index.as_retriever(similarity_top_k=CANDIDATES).retrieve(turns[0].question)
    texts = [scored.node.get_content(MetadataMode.LLM) for scored in found]
    count = Memory.from_defaults().tokenizer_fn
    first, of_all = (len(count("\n\n".join(part))) for part in (texts[:8], texts))
    assert of_all > 1.5 * first
    memory = Memory.from_defaults(token_limit=4 * first, token_flush_size=first // 4, chat_history_token_ratio=1.0)
    tail = ContextReusePostprocessor(choose=CHOICE, placement="tail", annotate="labels", conversation=memory)
    fed = await tail.apostprocess_nodes(found)
    shown = "\n\n".join([scored.node.get_content(MetadataMode.LLM) for scored in fed])
    await memory.aput(ChatMessage(role="user", content=shown))
    await memory.aput(ChatMessage(role="assistant", content="Yes."))
    again = await tail.apostprocess_nodes(found)
    assert len(again) == 8
    assert sum("above in this conversation" in scored.node.get_content(MetadataMode.LLM) for scored in again) == 1


async def test_an_agent_gets_the_chosen_nodes_of_its_tool(
    start_engine: Callable[[], Any], open_model: OpenModel, index: VectorStoreIndex, turns: list[Any]
) -> None:
    retriever = index.as_retriever(similarity_top_k=CANDIDATES)
    tool = RetrieverTool.from_defaults(
        retriever,
        node_postprocessors=[ContextReusePostprocessor(choose=CHOICE)],
        name="search",
        description="Finds passages.",
    )
    for turn in turns[:6]:
        found = retriever.retrieve(turn.question)
        output = await tool.acall(turn.question)
        chosen(found, output.raw_output)
        assert output.content == "".join(
            [scored.node.get_content(MetadataMode.LLM) + "\n\n" for scored in output.raw_output]
        )
        assert {*ids(tool(turn.question).raw_output)} <= {*ids(found)}


def test_nothing_that_another_tenant_asks_changes_what_is_fed(index: VectorStoreIndex, turns: list[Any]) -> None:
    retriever = index.as_retriever(similarity_top_k=CANDIDATES)
    asked = [retriever.retrieve(turn.question) for turn in turns]
    alone, shared = ContextPlanner(), ContextPlanner()
    mine = [ContextReusePostprocessor(planner=planner, choose=CHOICE, tenant="a") for planner in (alone, shared)]
    other = ContextReusePostprocessor(planner=shared, choose=CHOICE, tenant="b")
    for number, found in enumerate(asked):
        other.postprocess_nodes(asked[-number])
        fed = [{*ids(postprocessor.postprocess_nodes(found))} for postprocessor in mine]
        assert fed[0] == fed[1]


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_wrong_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="choose must be None with order_locked=True"):
        ContextReusePostprocessor(choose=CHOICE, order_locked=True)
    with pytest.raises(ValueError, match="choose\n"):
        ContextReusePostprocessor(choose=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be at most k"):
        ContextReusePostprocessor(choose={"k": 2, "keep": 3})  # type: ignore[arg-type]


def test_a_dictionary_and_copies_hold_the_choice(make_nodes: MakeNodes) -> None:
    choose = Choice(k=2, keep=1, within=0.5, extra=1, scores="distance", twins=True)
    postprocessor = ContextReusePostprocessor(choose=choose)
    assert postprocessor.choose is not None
    read = ContextReusePostprocessor.from_dict(json.loads(json.dumps(postprocessor.to_dict())))
    for other in (read, pickle.loads(pickle.dumps(postprocessor)), copy.deepcopy(postprocessor)):
        assert other.choose == postprocessor.choose
        nodes = make_nodes(["one", "two", "three"])
        for place, scored in enumerate(nodes):
            scored.score = float(place)
        assert ids(other.postprocess_nodes(nodes)) == ids(nodes[:2])


def test_events_name_the_places(index: VectorStoreIndex, turns: list[Any]) -> None:
    handler = LlamaDebugHandler(print_trace_on_end=False)
    postprocessor = ContextReusePostprocessor(choose=CHOICE, callback_manager=CallbackManager([handler]))
    postprocessor.postprocess_nodes(index.as_retriever(similarity_top_k=CANDIDATES).retrieve(turns[0].question))
    [(start, end)] = handler.get_event_pairs(CBEventType.RERANKING)
    assert start.payload is not None
    assert end.payload is not None
    assert (start.payload["top_k"], len(start.payload["nodes"]), len(end.payload["nodes"])) == (8, CANDIDATES, 8)
