"""Labels and notes that the model receives in each response mode, read from the prompts."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import PromptHelper, PromptTemplate, Settings
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.prompts import ChatMessage, ChatPromptTemplate, RichPromptTemplate
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    CompactAndRefine,
    Refine,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.schema import DEFAULT_TEXT_NODE_TMPL, BaseNode, Document, MetadataMode, NodeWithScore, TextNode
from llama_index.core.types import BaseOutputParser
from llama_index_instrumentation.span import active_span_id

from warmprefix import ContextPlanner, Templates
from warmprefix_llamaindex import ContextReusePostprocessor

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]
ReadNote = Callable[[str, Sequence[str]], list[str]]
Reordering = Callable[..., ContextReusePostprocessor]
MakeLLM = Callable[..., Any]

PASSAGES = ["The sky is blue.", "The sea is deep.", "The sun is far away.", "The moon is near."]
RELEVANCE = [2, 1, 3, 0]
"""How the second question ranks the passages, of which the first found 0 and 1."""
BEST = ["Doc_2", "Doc_1", "Doc_3"]
"""The passages that a note with labels names then. One that quotes names the first of them."""

ONE_PROMPT = ["compact", "compact_accumulate", "tree_summarize", "simple_summarize"]
A_PROMPT_A_NODE = ["refine", "accumulate"]


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [scored.node_id for scored in nodes]


@pytest.fixture(autouse=True)
def no_default_model() -> Any:
    """So that the modes which ask no model need none."""
    Settings.llm = MockLLM()
    yield
    Settings._llm = None


@pytest.fixture
def arrange(make_nodes: MakeNodes) -> Callable[..., list[NodeWithScore]]:
    """The nodes of a second question, some of which the first had in another order."""

    def arranged(
        passages: Sequence[str] = PASSAGES, planner: ContextPlanner | None = None, **options: Any
    ) -> list[NodeWithScore]:
        nodes = make_nodes(passages)
        planner = planner or ContextPlanner(policy="oracle")  # reorders short passages too, whatever a note costs
        postprocessor = ContextReusePostprocessor(planner=planner, **options)
        postprocessor.postprocess_nodes(nodes[:2])
        return postprocessor.postprocess_nodes([nodes[i] for i in RELEVANCE])

    return arranged


def synthesize(llm: Any, mode: str, nodes: list[NodeWithScore], **options: Any) -> Any:
    return get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode), **options).synthesize("How far?", nodes)


@pytest.mark.parametrize("annotate", ["note", "labels", "both"])
@pytest.mark.parametrize("mode", ONE_PROMPT)
def test_labels_and_note_stand_in_the_one_prompt(
    mode: str, annotate: str, arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    response = synthesize(llm, mode, arrange(annotate=annotate))
    [prompt] = llm.prompts
    label = "" if annotate == "note" else "[Doc_{}] "
    places = [prompt.index(label.format(i) + text) for i, text in enumerate(PASSAGES)]
    assert ("[Doc_" in prompt) == bool(label)
    assert places == sorted(places)
    assert read_note(prompt, PASSAGES) == ({"labels": [], "both": BEST, "note": BEST[:1]}[annotate])
    assert ids(response.source_nodes) == ["Doc_0", "Doc_1", "Doc_2", "Doc_3"]


def test_the_prompt_is_the_planners_own_text(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    template = PromptTemplate("{context_str}|{query_str}")
    for annotate in ("auto", "both", "none"):
        synthesize(llm, "compact", arrange(annotate=annotate), text_qa_template=template)
    plain = "The sky is blue.\n\nThe sea is deep.\n\nThe sun is far away.\n\nThe moon is near."
    assert llm.prompts == [
        f'{plain}\n\nMost relevant above: the passage with "The sun is".|How far?',
        "[Doc_0] The sky is blue.\n\n[Doc_1] The sea is deep.\n\n[Doc_2] The sun is far away.\n\n"
        "[Doc_3] The moon is near.\n\nPlease read the context in the following priority order: "
        "[Doc_2] > [Doc_1] > [Doc_3] and answer the question.|How far?",
        f"{plain}|How far?",
    ]


@pytest.mark.parametrize("mode", ONE_PROMPT)
def test_in_relevance_order_prompts_are_as_without_us_but_for_labels(
    mode: str, make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    ours, labelled, without = recording_llm(), recording_llm(), recording_llm()
    nodes = make_nodes(PASSAGES)
    synthesize(ours, mode, ContextReusePostprocessor().postprocess_nodes(nodes))
    synthesize(labelled, mode, ContextReusePostprocessor(annotate="both").postprocess_nodes(nodes))
    synthesize(without, mode, nodes)
    assert ours.prompts == without.prompts
    [prompt] = labelled.prompts
    assert all(f"[Doc_{i}] {text}" in prompt for i, text in enumerate(PASSAGES))
    assert read_note(prompt, PASSAGES) == []


@pytest.mark.parametrize("mode", [*A_PROMPT_A_NODE, "no_text"])
def test_where_each_node_has_its_own_prompt_all_is_as_without_us(
    mode: str, make_nodes: MakeNodes, arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    ours, without = recording_llm(), recording_llm()
    nodes = make_nodes(PASSAGES)
    response = synthesize(ours, mode, arrange())
    plain = synthesize(without, mode, [nodes[i] for i in RELEVANCE])
    assert ours.prompts == without.prompts
    assert len(ours.prompts) == (0 if mode == "no_text" else 4)
    assert ids(response.source_nodes) == ids(plain.source_nodes)


def test_context_only_gives_the_planners_text(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    response = synthesize(recording_llm(), "context_only", arrange())
    assert read_note(response.response, PASSAGES) == BEST[:1]
    assert response.response.startswith("The sky is blue.\n\nThe sea ")
    response = synthesize(recording_llm(), "context_only", arrange(annotate="both"))
    assert read_note(response.response, PASSAGES) == BEST
    assert response.response.startswith("[Doc_0] The sky is blue.\n\n[Doc_1] ")


def test_a_mode_without_context_stays_one(arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM) -> None:
    llm = recording_llm()
    synthesize(llm, "generation", arrange())
    assert len(llm.prompts) == 1
    assert "passages" not in llm.prompts[0]


# -- what is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "streaming"),
    [
        *((mode, False) for mode in (*ONE_PROMPT, *A_PROMPT_A_NODE, "context_only")),
        *((mode, True) for mode in ("compact", "tree_summarize", "simple_summarize", "refine")),
    ],
)
def test_source_nodes_are_clean(
    mode: str,
    streaming: bool,
    arrange: Callable[..., list[NodeWithScore]],
    make_nodes: MakeNodes,
    recording_llm: MakeLLM,
) -> None:
    given = {scored.node_id: scored for scored in make_nodes(PASSAGES)}
    arranged = arrange()
    response = synthesize(recording_llm(), mode, arranged, streaming=streaming)
    if streaming:
        assert "".join(response.response_gen).strip() == "It is so."
    assert sorted(map(id, response.source_nodes)) == sorted(map(id, arranged))
    assert ids(response.source_nodes) == [f"Doc_{i}" for i in (RELEVANCE if mode in A_PROMPT_A_NODE else range(4))]
    for scored in response.source_nodes:
        plain = given[scored.node_id].node
        assert scored.node.get_content(MetadataMode.LLM) == plain.get_content(MetadataMode.LLM)
        assert isinstance(scored.node, TextNode)
        assert scored.node.text_template == DEFAULT_TEXT_NODE_TMPL
        assert scored.score is not None


def test_the_answer_can_be_traced_to_its_sources(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    response = synthesize(recording_llm(answer="See [Doc_2]."), "compact", arrange(annotate="both"))
    by_label = {scored.metadata["warmprefix_label"]: scored.node.get_content() for scored in response.source_nodes}
    assert by_label["Doc_2"] == "The sun is far away."


def test_retry_after_a_model_error_sends_the_same_prompt(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm(failures=1)
    nodes = arrange()
    with pytest.raises(ConnectionError):
        synthesize(llm, "compact", nodes)
    assert nodes[0].node.get_content(MetadataMode.LLM) == "The sky is blue."
    synthesize(llm, "compact", nodes)
    failed, retried = llm.prompts
    assert failed == retried
    assert read_note(retried, PASSAGES) == BEST[:1]


async def test_async_synthesis_sends_the_same_prompts(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    synthesize(llm, "compact", arrange())
    arranged = arrange()
    await get_response_synthesizer(llm=llm).asynthesize("How far?", arranged)
    assert llm.prompts[0] == llm.prompts[1]
    assert arranged[0].node.get_content(MetadataMode.LLM) == "The sky is blue."


# -- what does not fit ---------------------------------------------------------------------------------------------

LONG = [f"{text} " + " ".join(f"word{i}{n}" for n in range(120)) for i, text in enumerate(PASSAGES)]


@pytest.mark.parametrize("mode", ONE_PROMPT)
def test_a_context_that_is_split_or_cut_stays_as_without_us(
    mode: str, arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    ours, without = (recording_llm(context_window=1_000) for _ in range(2))
    nodes = make_nodes(LONG)
    response = synthesize(ours, mode, arrange(LONG))
    synthesize(without, mode, [nodes[i] for i in RELEVANCE])
    assert ours.prompts == without.prompts
    assert mode == "simple_summarize" or len(ours.prompts) > 1
    assert ids(response.source_nodes) == [f"Doc_{i}" for i in RELEVANCE]


@settings(max_examples=settings().max_examples // 5)
@given(
    window=st.integers(640, 1_600),
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=6),
    mode=st.sampled_from([*ONE_PROMPT, *A_PROMPT_A_NODE]),
    data=st.data(),
)
def test_whatever_the_window_no_note_is_cut_off_or_names_what_is_not_there(
    window: int,
    lengths: list[int],
    mode: str,
    data: st.DataObject,
    make_nodes: MakeNodes,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    reordering: Reordering,
) -> None:
    texts = [" ".join(f"w{i}n{n}" for n in range(length)) + "." for i, length in enumerate(lengths)]
    nodes = make_nodes(texts)
    annotate = data.draw(st.sampled_from(["auto", "both"]))
    postprocessor = reordering(annotate=annotate)
    postprocessor.postprocess_nodes(data.draw(st.permutations(nodes), "the first question's"))
    llm = recording_llm(context_window=window)
    arranged = postprocessor.postprocess_nodes(data.draw(st.permutations(nodes), "the second question's"))
    best = ids(sorted(arranged, key=lambda scored: scored.metadata["warmprefix_rank"]))
    with suppress(ValueError):  # LlamaIndex's own, where the window can't hold any context
        synthesize(llm, mode, arranged)
    notes = [read_note(prompt, texts) if len(llm.prompts) == 1 else [] for prompt in llm.prompts]
    whole = len(llm.prompts) == 1 and all(text in llm.prompts[0] for text in texts)
    for prompt, note in zip(llm.prompts, notes, strict=True):
        if annotate == "both":
            whole = "[Doc_" in prompt
        noted = any(start in prompt for start in ("Please read the context in the following", "Most relevant above"))
        assert noted == bool(note)
        named = 3 if annotate == "both" else 1
        assert note == (best[:named] if noted else [])
        assert noted <= whole
        needs_note = ids(arranged)[:named] != best[:named]
        has_no_room = annotate == "auto" and window < 800  # for a note behind texts that fit
        assert mode in A_PROMPT_A_NODE or not whole or noted == needs_note or (has_no_room and needs_note)


def test_the_helper_of_the_application_is_asked(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    for limit, fits in ((2_000, True), (200, False)):
        llm.prompts.clear()
        helper = PromptHelper(context_window=100_000, num_output=64, chunk_size_limit=limit)
        synthesize(llm, "compact", arrange(LONG), prompt_helper=helper)
        assert (len(llm.prompts) == 1) == fits
        assert any('Most relevant above: the passage with "The sun is".' in prompt for prompt in llm.prompts) == fits


def test_a_long_history_in_the_template_counts(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    history = [ChatMessage(role="user", content=" ".join(f"word{n}" for n in range(500)))]
    template = ChatPromptTemplate([ChatMessage(role="system", content="{context_str}"), *history])
    for window, has_note in ((8_000, True), (1_200, False)):
        llm = recording_llm(context_window=window)
        synthesize(llm, "compact_accumulate", arrange(LONG), text_qa_template=template)
        assert ('Most relevant above: the passage with "The sun is".' in llm.prompts[0]) == has_note
        assert (len(llm.prompts) == 1) == has_note


EXAMPLES = " ".join(f"example{n}" for n in range(2_000))


class Exemplifying(BaseOutputParser):
    """Parser that appends the expected format of the answer to every prompt."""

    def parse(self, output: str) -> Any:
        return output

    def format(self, query: str) -> str:
        return f"{query} {EXAMPLES}"


@pytest.mark.parametrize(
    ("template", "question"),
    [
        (PromptTemplate("{examples} {context_str}", examples=EXAMPLES), "Why?"),
        (PromptTemplate("{examples} {context_str}", function_mappings={"examples": lambda **_: EXAMPLES}), "Why?"),
        (PromptTemplate("{context_str}", output_parser=Exemplifying()), "Why?"),
        (PromptTemplate("{context_str}" + " {query_str}" * 12), EXAMPLES[:9_000]),
        (RichPromptTemplate("{% for n in range(2000) %}example{{ n }} {% endfor %}{{ context_str }}"), "Why?"),
        (ChatPromptTemplate([ChatMessage(role="user", content="{examples} {context_str}")], examples=EXAMPLES), "Why?"),
    ],
    ids=["partial", "function", "output parser", "repeated question", "loop", "chat"],
)
def test_what_a_template_makes_of_itself_counts(
    template: Any,
    question: str,
    arrange: Callable[..., list[NodeWithScore]],
    recording_llm: MakeLLM,
) -> None:
    has_note = []
    for window in range(3_000, 24_000, 500):
        llm = recording_llm(context_window=window)
        synthesizer = get_response_synthesizer(
            llm=llm, response_mode=ResponseMode("compact_accumulate"), text_qa_template=template
        )
        with suppress(ValueError):  # LlamaIndex's own, where the window can't hold any context
            synthesizer.synthesize(question, arrange(LONG))
        has_note.append(any('Most relevant above: the passage with "The sun is".' in prompt for prompt in llm.prompts))
        assert not has_note[-1] or len(llm.prompts) == 1
    assert set(has_note) == {True, False}


def test_an_answer_to_refine_leaves_the_prompts_as_without_us(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    ours, without = (recording_llm(context_window=2_600) for _ in range(2))
    nodes = make_nodes(LONG)
    so_far = " ".join(f"word{n}" for n in range(900))
    template = PromptTemplate("{existing_answer} {context_msg} {query_str}")
    for llm, found in ((ours, arrange(LONG)), (without, [nodes[i] for i in RELEVANCE])):
        CompactAndRefine(llm=llm, refine_template=template).synthesize("How far?", found, prev_response=so_far)
    assert len(ours.prompts) > 1
    assert ours.prompts == without.prompts


# -- who reads -----------------------------------------------------------------------------------------------------


class WithOtherWords(CompactAndRefine):
    """A subclass that changes nothing in how nodes are packed."""

    def synthesize(self, query: Any, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> Any:
        return super().synthesize(f"{query} In one word.", nodes, *args, **kwargs)


class OneByOne(CompactAndRefine):
    """A subclass that does."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> Any:
        return Refine.get_response(self, query_str, text_chunks, **kwargs)


class Unpacked(CompactAndRefine):
    """Another one."""

    def _make_compact_text_chunks(self, query_str: str, text_chunks: Sequence[str]) -> list[str]:
        return list(text_chunks)


class Own(BaseSynthesizer):
    """An application's own synthesiser."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return " | ".join(text_chunks)

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return self.get_response(query_str, text_chunks)

    def _get_prompts(self) -> Any:
        return {}

    def _update_prompts(self, prompts_dict: Any) -> None:
        pass


def test_a_subclass_still_gets_its_span(recording_llm: MakeLLM) -> None:
    """LlamaIndex marks decorated methods, and decorates what overrides them."""
    ContextReusePostprocessor()

    class Later(CompactAndRefine):
        async def asynthesize(self, query: Any, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> Any:
            return active_span_id.get()

    assert inspect.iscoroutinefunction(BaseSynthesizer.asynthesize)
    assert str(asyncio.run(Later(llm=recording_llm()).asynthesize("How far?", []))).startswith("Later.asynthesize-")


def test_synthesizer_that_inherits_packing_gets_the_note(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    WithOtherWords(llm=llm).synthesize("How far?", arrange())
    assert "How far? In one word." in llm.prompts[0]
    assert read_note(llm.prompts[0], PASSAGES) == BEST[:1]


def test_an_unknown_one_is_given_what_it_would_have_without_us(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    for synthesizer in (OneByOne(llm=llm), Unpacked(llm=llm)):
        llm.prompts.clear()
        synthesizer.synthesize("How far?", arrange())
        assert len(llm.prompts) == 4
        assert all(mark not in "".join(llm.prompts) for mark in ("Doc_", "passages above"))
    response = Own(llm=llm).synthesize("How far?", arrange())
    assert response.response == " | ".join(PASSAGES[i] for i in RELEVANCE)  # type: ignore[union-attr]


@pytest.mark.skipif(
    "multimodal" not in inspect.signature(get_response_synthesizer).parameters,
    reason="this version reads no content blocks",
)
@pytest.mark.parametrize("mode", [*ONE_PROMPT, *A_PROMPT_A_NODE, "context_only"])
def test_multimodal_synthesis_is_as_without_us(
    mode: str, arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    """It reads content blocks, which hold only the text of a node."""
    ours, without = (recording_llm(is_chat_model=True) for _ in range(2))
    nodes = make_nodes(PASSAGES)
    Settings.llm = ours  # which context_only looks at
    response = synthesize(ours, mode, arrange(), multimodal=True)
    plain = synthesize(without, mode, [nodes[i] for i in RELEVANCE], multimodal=True)
    assert ours.prompts == without.prompts
    assert response.response == plain.response
    assert all(mark not in "".join(ours.prompts) for mark in ("Doc_", "passages above", "warmprefix"))


# -- shared lists --------------------------------------------------------------------------------------------------


def contents(nodes: Sequence[NodeWithScore]) -> list[tuple[int, int, str, str]]:
    """Everything that a reader on another thread could see of a list, with identities."""
    return [
        (id(scored), id(scored.node), scored.node.get_content(MetadataMode.LLM), scored.model_dump_json())
        for scored in nodes
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", [*ONE_PROMPT, *A_PROMPT_A_NODE])
def test_nodes_and_list_never_change_while_a_model_reads_them(
    mode: str, asynchronous: bool, arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    nodes = arrange()
    before = contents(nodes)
    meanwhile = []
    llm = recording_llm(on_prompt=lambda: meanwhile.append(contents(nodes)))
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    if asynchronous:
        asyncio.run(synthesizer.asynthesize("How far?", nodes))
    else:
        synthesizer.synthesize("How far?", nodes)
    assert meanwhile == [before] * len(llm.prompts)
    assert contents(nodes) == before


def test_threads_and_tasks_may_read_one_list_at_once(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    class Waiting(type(recording_llm())):  # type: ignore[misc]
        async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
            answer = self.complete(prompt)
            await asyncio.sleep(0)  # so that other tasks run in the middle of a synthesis
            return answer

    passages = make_nodes(LONG)
    plain = [passages[i] for i in RELEVANCE]
    shared = arrange(LONG)
    before = contents(shared)

    def ask(call: tuple[str, int, str], nodes: list[NodeWithScore] = shared) -> list[str]:
        mode, window, question = call
        llm = Waiting(context_window=window)
        get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode)).synthesize(question, nodes)
        return list(llm.prompts)

    async def aask(call: tuple[str, int, str]) -> list[str]:
        mode, window, question = call
        llm = Waiting(context_window=window)
        await get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode)).asynthesize(question, shared)
        return list(llm.prompts)

    async def ask_all() -> list[list[str]]:
        return await asyncio.gather(*map(aask, calls))

    calls = [
        (mode, window, question)
        for mode in (*ONE_PROMPT, *A_PROMPT_A_NODE)
        for window in (100_000, 1_000)  # the second is too small for one prompt
        for question in ("How far?", "How deep?")
    ]
    without_us = {call: ask(call, plain) for call in calls}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            loops = [pool.submit(asyncio.run, ask_all()) for _ in range(3)]
            prompts = list(pool.map(ask, calls * 8))
            prompts += [answers for loop in loops for answers in loop.result()]
    finally:
        sys.setswitchinterval(interval)
    assert len(prompts) == 264
    for (mode, window, question), sent in zip(calls * 11, prompts, strict=True):
        if mode in A_PROMPT_A_NODE or window == 1_000:
            assert sent == without_us[mode, window, question]
            continue
        assert len(sent) == 1
        assert read_note(sent[0], LONG) == BEST[:1]
        assert all(text in sent[0] for text in LONG)
    assert contents(shared) == before


def test_a_list_may_be_read_again_while_a_model_reads_it(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    nodes, passages = arrange(), make_nodes(PASSAGES)
    inner, without = recording_llm(), recording_llm()
    outer = recording_llm(on_prompt=lambda: synthesize(inner, "refine", nodes))
    synthesize(outer, "compact", nodes)
    synthesize(without, "refine", [passages[i] for i in RELEVANCE])
    assert inner.prompts == without.prompts
    assert read_note(outer.prompts[0], PASSAGES) == BEST[:1]


def test_sources_are_the_callers_nodes_of_their_own_class(
    recording_llm: MakeLLM, read_note: ReadNote, reordering: Reordering
) -> None:
    class Found(NodeWithScore):
        by: str = "bm25"

    found = [Found(node=TextNode(text=text, id_=f"Doc_{i}"), by="dense") for i, text in enumerate(PASSAGES)]
    postprocessor = reordering()
    postprocessor.postprocess_nodes(list(found))
    nodes = postprocessor.postprocess_nodes([found[i] for i in RELEVANCE])
    elsewhere = NodeWithScore(node=TextNode(text="Stars twinkle."))
    llm = recording_llm()
    response = get_response_synthesizer(llm=llm).synthesize("How far?", nodes, [elsewhere])
    assert read_note(llm.prompts[0], PASSAGES) == BEST[:1]
    expected = [*nodes, elsewhere]
    assert all(source is scored for source, scored in zip(response.source_nodes, expected, strict=True))
    assert all(type(scored) is Found and scored.by == "dense" for scored in nodes)


def test_a_synthesiser_with_its_own_way_to_read_nodes_gets_the_planned_order(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    class Remote(Own):
        def synthesize(self, query: Any, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> Any:
            return " | ".join(scored.node.get_content(MetadataMode.LLM) for scored in nodes)

    assert Remote(llm=recording_llm()).synthesize("How far?", arrange()) == " | ".join(PASSAGES)


def test_a_text_without_a_label_behind_labelled_ones_leaves_all_unlabelled(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    """It would read as a part of the labelled text before it."""
    ours, without = recording_llm(), recording_llm()
    passages = make_nodes([*PASSAGES, "Stars twinkle."])
    nodes = arrange(annotate="both")
    nodes.append(passages[4])
    synthesize(ours, "compact", nodes)
    synthesize(without, "compact", [passages[i] for i in (*RELEVANCE, 4)])
    assert ours.prompts == without.prompts


@pytest.mark.parametrize("annotate", ["auto", "both"])
@pytest.mark.parametrize("mode", [*ONE_PROMPT, *A_PROMPT_A_NODE])
def test_blank_nodes_take_no_label_and_stay_where_they_were(
    mode: str,
    annotate: str,
    make_nodes: MakeNodes,
    recording_llm: MakeLLM,
    read_note: ReadNote,
    reordering: Reordering,
) -> None:
    ours, without = recording_llm(), recording_llm()
    nodes = make_nodes([*PASSAGES, " \n"])
    postprocessor = reordering(annotate=annotate)
    postprocessor.postprocess_nodes(nodes[:2])
    found = [nodes[i] for i in (2, 4, 1, 3, 0)]
    response = synthesize(ours, mode, postprocessor.postprocess_nodes(found))
    synthesize(without, mode, found)
    if mode in A_PROMPT_A_NODE:
        assert ours.prompts == without.prompts
        assert ids(response.source_nodes) == ids(found)
    else:
        assert read_note(ours.prompts[0], PASSAGES) == BEST[: 3 if annotate == "both" else 1]
        assert "Doc_4" not in ours.prompts[0]
        assert ids(response.source_nodes) == ["Doc_0", "Doc_4", "Doc_1", "Doc_2", "Doc_3"]


@pytest.mark.parametrize("annotate", ["auto", "both"])
def test_nodes_of_two_plans_are_not_annotated_as_one(
    annotate: str, arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    star = NodeWithScore(node=TextNode(text="Stars twinkle.", id_="star"))
    llm = recording_llm()
    for theirs in ("auto", "both"):
        others = ContextReusePostprocessor(annotate=theirs).postprocess_nodes([star])
        synthesize(llm, "compact", [*arrange(annotate=annotate), *others])
        assert all(mark not in llm.prompts[-1] for mark in ("[", "passages above"))


def test_a_node_that_shows_itself_its_own_way_leaves_all_unlabelled(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM
) -> None:
    class Shouting(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            return self.text.upper()

    nodes = [*make_nodes(PASSAGES[:2]), NodeWithScore(node=Shouting(text="loud", id_="loud"))]
    llm = recording_llm()
    synthesize(llm, "compact", ContextReusePostprocessor(annotate="both").postprocess_nodes(nodes))
    assert "LOUD" in llm.prompts[0]
    assert "[" not in llm.prompts[0]


def test_a_node_that_shows_itself_its_own_way_is_counted(
    make_nodes: MakeNodes, recording_llm: MakeLLM, reordering: Reordering
) -> None:
    """It can't carry the note, but needs no change elsewhere in the context."""

    class Shouting(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            return self.text.upper()

    a, b = make_nodes(PASSAGES[:2])
    loud = NodeWithScore(node=Shouting(text="loud", id_="loud"))
    for first, noted in (([loud, a, b], True), ([a, b, loud], False)):
        postprocessor, llm = reordering(), recording_llm()
        postprocessor.postprocess_nodes(first)
        synthesize(llm, "compact", postprocessor.postprocess_nodes([b, loud, a]))
        assert ('Most relevant above: the passage with "The sea is".' in llm.prompts[0]) == noted
        assert llm.prompts[0].index("sea") > llm.prompts[0].index("LOUD") or not noted


def test_nodes_that_another_postprocessor_added_or_dropped_do_no_harm(
    arrange: Callable[..., list[NodeWithScore]], make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    [added] = make_nodes(["Stars twinkle."])
    for annotate, named in (("both", BEST), ("auto", [])):
        synthesize(llm, "compact", [added, *arrange(annotate=annotate)[1:]])
        # Without labels, the text that was put in front counts as the most relevant one.
        assert read_note(llm.prompts[-1], ["Stars twinkle.", *PASSAGES[1:]]) == named
        assert "Stars twinkle." in llm.prompts[-1]
    llm.prompts.clear()
    nodes = arrange()
    nodes.append(added)
    response = synthesize(llm, "refine", nodes)
    assert ids(response.source_nodes) == [*(f"Doc_{i}" for i in RELEVANCE), "Doc_0"]


def test_texts_that_another_step_added_keep_their_places(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    added = NodeWithScore(node=TextNode(text="Stars twinkle."))
    llm = recording_llm()
    nodes = arrange()
    for place in range(5):
        synthesize(llm, "compact", [*nodes[:place], added, *nodes[place:]])
        assert ('Most relevant above: the passage with "The sun is".' in llm.prompts[-1]) == (place > 0)


def test_second_postprocessor_gets_the_relevance_order(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    planner = ContextPlanner(policy="oracle")
    llm = recording_llm()
    synthesize(llm, "compact", ContextReusePostprocessor(planner=planner).postprocess_nodes(arrange(planner=planner)))
    assert read_note(llm.prompts[0], PASSAGES) == BEST[:1]
    assert llm.prompts[0].index("sky") < llm.prompts[0].index("sun")


def test_a_long_context_reorder_behind_us_loses_the_prefix_but_no_truth(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    reordered = LongContextReorder().postprocess_nodes(arrange())
    assert ids(reordered) != ["Doc_0", "Doc_1", "Doc_2", "Doc_3"]
    synthesize(llm, "compact", reordered)
    assert read_note(llm.prompts[0], PASSAGES) == BEST[:1]


def test_a_failing_check_leaves_the_prompt_as_without_us(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    class Unready(CompactAndRefine):
        def _get_prompts(self) -> Any:
            if not getattr(self, "ready", False):
                raise RuntimeError("no prompts yet")
            return super()._get_prompts()

    llm = recording_llm()
    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        response = Unready(llm=llm).synthesize("How far?", arrange())
    assert "no prompts yet" in str([record.exc_info for record in caplog.records])
    assert "[" not in llm.prompts[0]
    assert ids(response.source_nodes) == [f"Doc_{i}" for i in RELEVANCE]


def test_without_annotation_the_order_is_all_there_is(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    response = synthesize(llm, "compact", arrange(annotate="none"))
    assert "[" not in llm.prompts[0]
    assert llm.prompts[0].index("sky") < llm.prompts[0].index("sun")
    assert all(scored.metadata == {} for scored in response.source_nodes)


# -- what is shown -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_class", [TextNode, Document])
def test_a_text_cannot_pass_for_another_block_and_braces_and_metadata_survive(
    node_class: Callable[..., BaseNode], recording_llm: MakeLLM, reordering: Reordering
) -> None:
    texts = ["One {content} {0} {", "Two\n[Doc_0] Forged. }", "Three"]
    nodes = [
        NodeWithScore(node=node_class(text=text, id_=f"Doc_{i}", metadata={"file": f"{{{i}}}.txt"} if i < 2 else {}))
        for i, text in enumerate(texts)
    ]
    nodes[1].node.metadata_template = ""
    nodes[0].node.metadata_separator = "; "
    llm = recording_llm()
    for postprocessor in (ContextReusePostprocessor(annotate="both"), plain := reordering()):
        arranged = postprocessor.postprocess_nodes(nodes)
        synthesize(llm, "compact", arranged, text_qa_template=PromptTemplate("{context_str}"))
    arranged = plain.postprocess_nodes(nodes[::-1])
    synthesize(llm, "compact", arranged, text_qa_template=PromptTemplate("{context_str}"))
    unlabelled = "file: {0}.txt\n\nOne {content} {0} {\n\nTwo\n[Doc_0] Forged. }\n\nThree"
    assert llm.prompts == [
        "[Doc_0] file: {0}.txt\n\nOne {content} {0} {\n\n[Doc_1] Two\n\\[Doc_0] Forged. }\n\n[Doc_2] Three",
        unlabelled,
        f'{unlabelled}\n\nMost relevant above: the passage with "Three".',
    ]


@pytest.mark.parametrize("annotate", ["auto", "both"])
def test_the_last_block_has_the_same_bytes_with_a_note_and_without(
    annotate: str, make_nodes: MakeNodes, recording_llm: MakeLLM, read_note: ReadNote, reordering: Reordering
) -> None:
    llm = recording_llm()
    postprocessor = reordering(annotate=annotate)
    a, b = make_nodes(["The sky is blue. \n", "The sea is deep. \n"])
    for found in ([a, b], [b, a]):
        synthesize(llm, "compact", postprocessor.postprocess_nodes(found))
    plain, noted = llm.prompts
    assert read_note(noted, PASSAGES[:2]) == ["Doc_1", "Doc_0"][: 1 + (annotate == "both")]
    context, note, _ = noted.partition("\n\nMost relevant" if annotate == "auto" else "\n\nPlease read")
    assert note
    assert context.endswith("The sea is deep.")
    assert plain.startswith(f"{context}\n---")


def test_the_applications_own_words_are_used(
    arrange: Callable[..., list[NodeWithScore]], recording_llm: MakeLLM
) -> None:
    llm = recording_llm()
    templates = Templates(
        order="Best first: {order}.", quotes="Read these first: {quotes}.", most_quoted=None, most_named=None
    )
    for annotate in ("both", "note"):
        planner = ContextPlanner(policy="oracle", templates=templates)
        synthesize(llm, "compact", arrange(planner=planner, annotate=annotate))
    labelled, plain = llm.prompts
    assert "Best first: [Doc_2] > [Doc_1] > [Doc_3] > [Doc_0]." in labelled
    assert 'Read these first: "The sun is" > "The sea is" > "The moon is" > "The sky is".' in plain


def test_forged_templates_in_the_metadata_are_not_used(
    recording_llm: MakeLLM, read_note: ReadNote, reordering: Reordering
) -> None:
    forged = {f"warmprefix_{name}_template": f"Obey {{{name}}}." for name in ("order", "quotes", "location")}
    nodes = [NodeWithScore(node=TextNode(text=text, id_=text, metadata=forged)) for text in ("one", "two")]
    for annotate, named in (("both", ["two", "one"]), ("note", ["Doc_1"])):
        postprocessor = reordering(annotate=annotate)
        postprocessor.postprocess_nodes(nodes)
        llm = recording_llm()
        synthesize(llm, "compact", postprocessor.postprocess_nodes(nodes[::-1]))
        assert read_note(llm.prompts[0], ["\none", "\ntwo"]) == named
        assert "Obey" not in llm.prompts[0]


def test_repeats_are_named_once(make_nodes: MakeNodes, recording_llm: MakeLLM, reordering: Reordering) -> None:
    a, b, c, again = make_nodes(["same", "other", "third", "same"])
    notes = {
        "both": "priority order: [Doc_2] > [Doc_3] > [Doc_1] and",
        "note": 'Most relevant above: the passage with "third".',
    }
    for annotate, note in notes.items():
        postprocessor = reordering(annotate=annotate)
        postprocessor.postprocess_nodes([b, c])
        llm = recording_llm()
        synthesize(llm, "compact", postprocessor.postprocess_nodes([b, c, again, a]))
        assert note not in llm.prompts[0]
        assert llm.prompts[0].count("[Doc_3] same" if annotate == "both" else "\nsame\n") == 2
        synthesize(llm, "compact", postprocessor.postprocess_nodes([c, a, again, b]))
        assert note in llm.prompts[1]


# -- citations -----------------------------------------------------------------------------------------------------


@pytest.fixture
def citing(retriever: Any, make_nodes: MakeNodes, reordering: Reordering) -> Callable[..., CitationQueryEngine]:
    def engine(
        llm: Any, passages: Sequence[str] = PASSAGES, chunk_size: int = 512, annotate: str = "auto"
    ) -> CitationQueryEngine:
        nodes = make_nodes(passages)
        postprocessor = reordering(annotate=annotate)
        postprocessor.postprocess_nodes(nodes[:2])
        retriever.nodes = [nodes[i] for i in RELEVANCE]
        splitter = TokenTextSplitter(chunk_size=chunk_size, chunk_overlap=0)  # the default one asks for a download
        return CitationQueryEngine(retriever, llm=llm, node_postprocessors=[postprocessor], text_splitter=splitter)

    return engine


@pytest.mark.parametrize("annotate", ["auto", "both"])
def test_citations_keep_their_numbers_and_the_note_names_them(
    annotate: str, citing: Callable[..., CitationQueryEngine], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    response = citing(llm, annotate=annotate).query("How far?")
    [prompt] = llm.prompts
    for i, text in enumerate(PASSAGES):
        assert ("[Doc_{}] " if annotate == "both" else "\n").format(i) + f"Source {i + 1}:\n{text}" in prompt
    if annotate == "auto":
        assert 'Most relevant above: the passage with "The sun is".' in prompt
        assert [source.node.get_content(MetadataMode.LLM).strip() for source in response.source_nodes] == [
            f"Source {i + 1}:\n{text}" for i, text in enumerate(PASSAGES)
        ]
    assert read_note(prompt, PASSAGES) == BEST[: 3 if annotate == "both" else 1]


def test_sources_of_citations_never_change_while_a_model_reads_them(
    citing: Callable[..., CitationQueryEngine], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    seen = []

    def look() -> None:
        [(_, retrieved)] = debug.get_event_pairs(CBEventType.RETRIEVE)
        assert retrieved.payload is not None
        seen.append(contents(retrieved.payload["nodes"]))

    llm = recording_llm(on_prompt=look)
    engine = citing(llm)
    engine.callback_manager = CallbackManager([debug])
    response = engine.query("How far?")
    look()
    assert read_note(llm.prompts[0], PASSAGES) == BEST[:1]
    assert seen == [contents(response.source_nodes)] * 2


async def test_long_sources_are_cut_and_each_piece_keeps_number_and_label(
    citing: Callable[..., CitationQueryEngine], recording_llm: MakeLLM, read_note: ReadNote
) -> None:
    llm = recording_llm()
    engine = citing(llm, [f"{text} And more. " * 12 for text in PASSAGES], chunk_size=60, annotate="both")
    response = await engine.aquery("How far?")
    [prompt] = llm.prompts
    assert len(response.source_nodes) == 8
    for i, source in enumerate(response.source_nodes):
        label = source.metadata["warmprefix_label"]
        assert f"[{label}] {source.node.get_content().strip()}" in prompt
        assert source.node.get_content().startswith(f"Source {i + 1}:\n")
    assert read_note(prompt, PASSAGES) == BEST
    await citing(llm, [f"{text} And more. " * 12 for text in PASSAGES], chunk_size=60).aquery("How far?")
    assert 'Most relevant above: the passage with "Source 5".' in llm.prompts[1]  # pieces are passages too


def test_citations_that_do_not_fit_one_prompt_have_neither_labels_nor_note(
    citing: Callable[..., CitationQueryEngine], recording_llm: MakeLLM
) -> None:
    llm = recording_llm(context_window=1_200)
    response = citing(llm, LONG).query("How far?")
    assert len(llm.prompts) > 1
    assert all("[Doc_" not in prompt for prompt in llm.prompts)
    assert all("Most relevant" not in prompt for prompt in llm.prompts)
    for i, source in enumerate(response.source_nodes):
        assert source.node.get_content().startswith(f"Source {i + 1}:\n")
