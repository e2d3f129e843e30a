"""The step itself: what comes in, what comes out, and that nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import (
    BaseNode,
    Document,
    ImageNode,
    IndexNode,
    MetadataMode,
    NodeWithScore,
    QueryBundle,
    TextNode,
)
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import instrument_tags

from warmprefix import ContextPlanner, MissingExtraError, Templates
from warmprefix.annotate import Annotate
from warmprefix_llamaindex import ContextReusePostprocessor

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [scored.node_id for scored in nodes]


def test_a_resident_prefix_comes_first_and_the_copies_remember_where_they_stood(make_nodes: MakeNodes) -> None:
    postprocessor = ContextReusePostprocessor(annotate="labels")
    a, b, c = make_nodes(["The sky is blue.", "The sea is deep.", "The sun is far."])
    postprocessor.postprocess_nodes([a, b])
    arranged = postprocessor.postprocess_nodes([c, b, a], query_str="How far?")
    assert ids(arranged) == ["Doc_0", "Doc_1", "Doc_2"]
    assert [scored.metadata["warmprefix_rank"] for scored in arranged] == [2, 1, 0]
    assert [scored.metadata["warmprefix_label"] for scored in arranged] == ["Doc_0", "Doc_1", "Doc_2"]
    assert [scored.score for scored in arranged] == [a.score, b.score, c.score]


def test_no_model_and_no_embedding_is_shown_a_mark(make_nodes: MakeNodes) -> None:
    [given] = make_nodes(["The sky is blue."])
    given.node.metadata["file"] = "sky.txt"
    [arranged] = ContextReusePostprocessor(annotate="both").postprocess_nodes([given])
    for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
        assert arranged.node.get_content(mode) == given.node.get_content(mode)


def test_it_may_run_twice(make_nodes: MakeNodes) -> None:
    planner = ContextPlanner(templates=Templates(order="Best first: {order}."))
    once = ContextReusePostprocessor(planner=planner, annotate="both").postprocess_nodes(make_nodes(["one", "two"]))
    assert len(once[0].metadata) == 9
    twice = ContextReusePostprocessor().postprocess_nodes(once)
    assert ids(twice) == ids(once)
    for scored in twice:
        keys = ["warmprefix_rank", "warmprefix_annotation", "warmprefix_block"]
        assert list(scored.metadata) == keys
        assert scored.node.excluded_llm_metadata_keys == keys
        assert scored.node.excluded_embed_metadata_keys == keys


def test_equal_texts_are_all_kept_the_repeats_behind(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(["same", "other", "same", "third"])
    arranged = ContextReusePostprocessor(annotate="both").postprocess_nodes(nodes)
    assert ids(arranged) == ["Doc_0", "Doc_1", "Doc_3", "Doc_2"]
    assert arranged[3].metadata["warmprefix_label"] == arranged[0].metadata["warmprefix_label"]


def test_what_a_model_reads_of_a_node_is_its_identity() -> None:
    nodes = [
        NodeWithScore(node=TextNode(text="same", id_=f"n{i}", metadata=metadata))
        for i, metadata in enumerate([{"year": 1999}, {"year": 2000}])
    ]
    arranged = ContextReusePostprocessor(annotate="labels").postprocess_nodes(nodes)
    assert len({scored.metadata["warmprefix_label"] for scored in arranged}) == 2


def test_nodes_without_a_text_keep_their_places() -> None:
    nodes = [
        NodeWithScore(node=ImageNode(image_url="http://127.0.0.1/sky.png", id_="image")),
        NodeWithScore(node=TextNode(text=" \n", id_="blank")),
        NodeWithScore(node=Document(text="The sky is blue.", id_="document")),
        NodeWithScore(node=IndexNode(text="The sea is deep.", id_="index", index_id="i")),
    ]
    postprocessor = ContextReusePostprocessor(planner=ContextPlanner(policy="greedy"))
    postprocessor.postprocess_nodes(nodes[3:])
    arranged = postprocessor.postprocess_nodes([nodes[2], *nodes[:2], nodes[3]])
    assert ids(arranged) == ["index", "image", "blank", "document"]
    assert [type(scored.node) for scored in arranged] == [IndexNode, ImageNode, TextNode, Document]
    assert ["warmprefix_annotation" in scored.metadata for scored in arranged] == [True, False, False, True]
    assert all("warmprefix_label" not in scored.metadata for scored in arranged)
    assert ids(ContextReusePostprocessor().postprocess_nodes(nodes[:2])) == ["image", "blank"]


def test_no_nodes_stay_none() -> None:
    planner = ContextPlanner()
    assert ContextReusePostprocessor(planner=planner).postprocess_nodes([]) == []
    assert planner.stats().plans == 0


def test_a_subclass_of_the_scored_node_is_kept() -> None:
    class Found(NodeWithScore):
        by: str = "bm25"

    found = Found(node=TextNode(text="one"), score=0.5, by="dense")
    [arranged] = ContextReusePostprocessor().postprocess_nodes([found])
    assert isinstance(arranged, Found)
    assert (arranged.by, arranged.score) == ("dense", 0.5)


@st.composite
def node_lists(draw: st.DrawFn) -> list[NodeWithScore]:
    texts = draw(st.lists(st.text(max_size=12), min_size=1, max_size=8))
    nodes: list[NodeWithScore] = []
    for i, text in enumerate(texts):
        node: BaseNode = draw(st.sampled_from([TextNode, Document]))(text=text, id_=f"n{i}")
        node.metadata = draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 2)))
        nodes.append(NodeWithScore(node=node, score=draw(st.none() | st.floats(allow_nan=False))))
    return nodes


@given(st.lists(node_lists(), max_size=4), node_lists(), st.sampled_from(get_args(Annotate)))
def test_nothing_is_lost_nothing_given_is_changed_and_it_is_deterministic(
    earlier: list[list[NodeWithScore]], nodes: list[NodeWithScore], annotate: Annotate
) -> None:
    before = [scored.model_dump() for scored in nodes]
    outcomes = []
    for _ in range(2):
        postprocessor = ContextReusePostprocessor(annotate=annotate)
        for others in earlier:
            postprocessor.postprocess_nodes(others)
        outcomes.append(postprocessor.postprocess_nodes(nodes))
    arranged, again = outcomes
    assert [scored.model_dump() for scored in nodes] == before
    assert [scored.model_dump() for scored in arranged] == [scored.model_dump() for scored in again]
    given_by_id = {scored.node_id: scored for scored in nodes}
    assert sorted(ids(arranged)) == sorted(given_by_id)
    for scored in arranged:
        given = given_by_id[scored.node_id]
        assert scored is not given
        assert scored.node is not given.node
        assert scored.node.metadata is not given.node.metadata
        assert scored.score == given.score
        assert scored.node.get_content(MetadataMode.LLM) == given.node.get_content(MetadataMode.LLM)


# -- recorded requests -----------------------------------------------------------------------------------------------


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ValueError, match=r"placement\n.*'head'.*'middle'"):
        ContextReusePostprocessor(placement="middle")  # type: ignore[arg-type]


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(ValueError, match="tenent"):
        ContextReusePostprocessor(tenent="acme")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="conversation must have at least one character"):
        ContextReusePostprocessor(conversation="")


class RequestLog:
    """Recorder that keeps the names of each request."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str | int | None]] = []

    def record(self, blocks: object, **names: str | int | None) -> None:
        self.requests.append(names)


async def test_names_come_from_the_constructor_or_else_from_tags(make_nodes: MakeNodes) -> None:
    log = RequestLog()
    planner = ContextPlanner(recorder=log)
    nodes = make_nodes(["one", "two"])
    tagged = ContextReusePostprocessor(planner=planner, model="m", preamble="p")
    fixed = ContextReusePostprocessor(planner=planner, conversation="fixed", tenant="own")
    with instrument_tags({"conversation_id": 42, "tenant": "acme"}):
        tagged.postprocess_nodes(nodes)
        await tagged.apostprocess_nodes(nodes)
        fixed.postprocess_nodes(nodes)
    with instrument_tags({"conversation_id": ""}):
        tagged.postprocess_nodes(nodes)
    acme = {"conversation": "42", "tenant": "acme", "model": "m", "preamble": "p"}
    assert log.requests == [
        acme,
        acme,
        {"conversation": "fixed", "tenant": "own", "model": None, "preamble": None},
        {"conversation": None, "tenant": None, "model": "m", "preamble": "p"},
    ]


async def test_tasks_that_are_planned_together_share_a_prefix(make_nodes: MakeNodes) -> None:
    """The asynchronous call considers the requests of tasks that are ready; the other one can't."""
    nodes = make_nodes(["own a", "own b", "own c", "shared"])
    found = [[nodes[i], nodes[3]] for i in range(3)]
    postprocessor = ContextReusePostprocessor(annotate="none")
    arranged = await asyncio.gather(*[postprocessor.apostprocess_nodes(asked) for asked in found])
    assert [ids(nodes)[0] for nodes in arranged] == ["Doc_3"] * 3
    alone = ContextReusePostprocessor(annotate="none")
    assert ids(alone.postprocess_nodes(found[0])) == ["Doc_0", "Doc_3"]


def test_an_order_must_pay_for_its_note(make_nodes: MakeNodes) -> None:
    short, long = make_nodes(["one", "two"]), make_nodes(["one " * 50, "two " * 50])
    cases: list[tuple[list[NodeWithScore], Annotate, list[str]]] = [
        (short, "none", ["Doc_0", "Doc_1"]),  # without a note, an order is free
        (short, "auto", ["Doc_1", "Doc_0"]),
        (long, "auto", ["Doc_0", "Doc_1"]),
    ]
    for nodes, annotate, planned in cases:
        postprocessor = ContextReusePostprocessor(annotate=annotate)
        postprocessor.postprocess_nodes(nodes)
        assert ids(postprocessor.postprocess_nodes(nodes[::-1])) == planned


def test_nothing_crosses_a_tenant(make_nodes: MakeNodes) -> None:
    postprocessor = ContextReusePostprocessor(annotate="none")
    a, b = make_nodes(["one", "two"])
    with instrument_tags({"tenant": "acme"}):
        postprocessor.postprocess_nodes([a, b])
    with instrument_tags({"tenant": "other"}):
        assert ids(postprocessor.postprocess_nodes([b, a])) == ["Doc_1", "Doc_0"]
    with instrument_tags({"tenant": "acme"}):
        assert ids(postprocessor.postprocess_nodes([b, a])) == ["Doc_0", "Doc_1"]


def test_a_failure_leaves_the_nodes_as_they_came(make_nodes: MakeNodes, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            raise RuntimeError("no text today")

    postprocessor = ContextReusePostprocessor()
    nodes = [*make_nodes(["one", "two"]), NodeWithScore(node=Odd(text="odd"))]
    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        for _ in range(2):
            arranged = postprocessor.postprocess_nodes(nodes)
            assert all(is_ is was for is_, was in zip(arranged, nodes, strict=True))
    records = [record for record in caplog.records if record.name == "warmprefix"]
    assert [record.levelno for record in records] == [logging.WARNING, logging.DEBUG]
    assert "no text today" in str(records[0].exc_info)


# -- serialisation -------------------------------------------------------------------------------------------------

FIELDS = {
    "placement": "head",
    "tenant": "acme",
    "model": "m",
    "preamble": None,
    "conversation": "chat-42",
    "annotate": "none",
    "order_locked": True,
    "pinned": "place",
    "choose": None,
}


def a_postprocessor(planner: ContextPlanner) -> ContextReusePostprocessor:
    return ContextReusePostprocessor(
        planner=planner,
        tenant="acme",
        model="m",
        conversation="chat-42",
        annotate="none",
        order_locked=True,
        pinned="place",
    )


def fields(postprocessor: ContextReusePostprocessor) -> dict[str, Any]:
    return {name: getattr(postprocessor, name) for name in FIELDS}


def test_a_dictionary_holds_all_but_the_planner() -> None:
    planner = ContextPlanner()
    written = a_postprocessor(planner).to_dict()
    assert written == {**FIELDS, "class_name": "ContextReusePostprocessor"}
    read = ContextReusePostprocessor.from_dict(json.loads(json.dumps(written)))
    assert fields(read) == FIELDS
    assert read.planner is not planner
    assert ContextReusePostprocessor.from_dict(written, planner=planner).planner is planner


def test_it_pickles_without_its_planner_and_keeps_working(
    make_nodes: MakeNodes, caplog: pytest.LogCaptureFixture
) -> None:
    planner = ContextPlanner()
    original = a_postprocessor(planner)
    read = pickle.loads(pickle.dumps(original))
    assert fields(read) == FIELDS
    assert read.planner is not planner
    assert original.planner is planner
    nodes = make_nodes(["one", "two"])
    assert ids(read.postprocess_nodes(nodes)) == ids(nodes)
    assert not caplog.records


def test_deep_copies_share_the_planner() -> None:
    planner = ContextPlanner()
    copied = copy.deepcopy(a_postprocessor(planner))
    assert copied.planner is planner
    assert fields(copied) == FIELDS


def test_each_has_a_planner_of_its_own_unless_given_one() -> None:
    assert ContextReusePostprocessor().planner is not ContextReusePostprocessor().planner
    with pytest.raises(ValueError, match="planner"):
        ContextReusePostprocessor(planner="coaccess")  # type: ignore[arg-type]


def test_arranged_nodes_pickle(make_nodes: MakeNodes) -> None:
    arranged = ContextReusePostprocessor().postprocess_nodes(make_nodes(["one", "two"]))
    read = pickle.loads(pickle.dumps(arranged))
    assert [scored.model_dump() for scored in read] == [scored.model_dump() for scored in arranged]


# -- tracing -------------------------------------------------------------------------------------------------------


class EventLog(BaseEventHandler):
    events: list[Any] = []  # noqa: RUF012  # a pydantic field

    @classmethod
    def class_name(cls) -> str:
        return "EventLog"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)


@pytest.fixture
def event_log() -> Iterator[EventLog]:
    handler, dispatcher = EventLog(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


async def test_it_shows_in_traces_as_rerankers_do(make_nodes: MakeNodes, event_log: EventLog) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    postprocessor = ContextReusePostprocessor(callback_manager=CallbackManager([debug]))
    nodes = make_nodes(["one", "two", "three"])
    arranged = await postprocessor.apostprocess_nodes(nodes, query_bundle=QueryBundle("why?"))
    start, end = [event for event in event_log.events if isinstance(event, ReRankStartEvent | ReRankEndEvent)]
    assert isinstance(start, ReRankStartEvent)
    assert start.query == QueryBundle("why?")
    assert start.top_n == 3
    assert start.model_name == "ContextReusePostprocessor"
    assert ids(start.nodes) == ids(nodes)
    assert isinstance(end, ReRankEndEvent)
    assert ids(end.nodes) == ids(arranged)
    [(began, ended)] = debug.get_event_pairs(CBEventType.RERANKING)
    assert began.payload is not None
    assert ended.payload is not None
    assert began.payload["query_str"] == "why?"
    assert ids(ended.payload["nodes"]) == ids(arranged)


def test_other_postprocessors_may_follow(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(["one", "two", "three"])
    arranged = ContextReusePostprocessor().postprocess_nodes(nodes)
    kept = SimilarityPostprocessor(similarity_cutoff=0.985).postprocess_nodes(arranged)
    assert ids(kept) == ["Doc_0", "Doc_1"]


def test_import_without_llama_index_names_the_install_command() -> None:
    program = """
import sys
sys.modules["llama_index"] = None
from warmprefix import MissingExtraError
try:
    import warmprefix_llamaindex
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(MissingExtraError("llamaindex", "llama_index.core"))
