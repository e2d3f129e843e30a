"""Orders that are facts: neighbours in one source, locked orders, and pinned nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, PrevNextNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever, BaseRetriever
from llama_index.core.schema import BaseNode, Document, NodeRelationship, NodeWithScore, QueryBundle, TextNode
from llama_index.core.storage import StorageContext
from llama_index.core.storage.docstore import SimpleDocumentStore

from warmprefix import ContextPlanner
from warmprefix.blocks import Pin
from warmprefix_llamaindex import ContextReusePostprocessor

from .conftest import RecordingLLM


class Found(BaseRetriever):
    """Finds the nodes whose numbers the question lists."""

    def __init__(self, nodes: Sequence[BaseNode]) -> None:
        self._nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        numbers = map(int, query_bundle.query_str.split())
        return [NodeWithScore(node=self._nodes[number], score=1 - place / 10) for place, number in enumerate(numbers)]


def manual(paragraphs: int = 12, name: str = "manual") -> Document:
    text = "\n\n".join(
        f"Step {i}: take the part. " + " ".join(f"Turn screw {i}.{j} of the {name} by hand." for j in range(8))
        for i in range(paragraphs)
    )
    return Document(text=text, id_=name)


def steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"Step (\d+):", text)]


def scored(nodes: Sequence[BaseNode]) -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=1.0) for node in nodes]


def parent_of(leaf: BaseNode) -> str | None:
    return None if leaf.parent_node is None else leaf.parent_node.node_id


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [each.node_id for each in nodes]


def shuffling(last: NodeWithScore, **options: Any) -> ContextReusePostprocessor:
    """Return a postprocessor that expects this node in the engine's cache, and so puts it first."""
    postprocessor = ContextReusePostprocessor(
        **{"annotate": "none", "planner": ContextPlanner(policy="greedy"), **options}
    )
    postprocessor.postprocess_nodes([last])
    return postprocessor


def sentences(text: str) -> list[str]:
    """Split a text without the data that NLTK would download."""
    return re.findall(r"[^.]+(?:\.\s*|$)", text)


def test_the_output_of_prev_next_keeps_reading_order() -> None:
    nodes = SentenceSplitter(chunk_size=128, chunk_overlap=0, chunking_tokenizer_fn=sentences).get_nodes_from_documents(
        [manual()]
    )
    store = SimpleDocumentStore()
    store.add_documents(nodes)
    llm = RecordingLLM()
    around = PrevNextNodePostprocessor(docstore=store, num_nodes=2, mode="both")
    after = [around, ContextReusePostprocessor(planner=ContextPlanner())]
    engine = RetrieverQueryEngine.from_args(Found(nodes), llm=llm, node_postprocessors=after)
    for question in ("3", "5", "1", "2", "0", "4", "6", "3", "2"):
        engine.query(question)
        found = steps(llm.prompts[-1])
        assert len(found) > 2
        assert found == sorted(found)
        assert "relevant" not in llm.prompts[-1]


def chain(**options: Any) -> list[NodeWithScore]:
    nodes = [TextNode(text=f"Step {i}: do it.", id_=f"s{i}", **options) for i in range(4)]
    return scored(nodes)


def test_one_relationship_of_the_two_is_enough() -> None:
    for kind, one, other in ((NodeRelationship.NEXT, 1, 2), (NodeRelationship.PREVIOUS, 2, 1)):
        nodes = chain()
        nodes[one].node.relationships[kind] = nodes[other].node.as_related_node_info()
        assert ids(shuffling(nodes[3]).postprocess_nodes([*nodes[:3], nodes[3]])) == ["s3", "s0", "s1", "s2"]
        assert ids(shuffling(nodes[1]).postprocess_nodes(nodes)) == ["s1", "s2", "s0", "s3"]


@pytest.mark.parametrize(
    ("offsets", "planned"),
    [
        pytest.param([(0, 20), (20, 40)], "s3 s0 s1", id="adjacent"),
        pytest.param([(0, 20), (12, 40)], "s3 s0 s1", id="overlapping"),
        pytest.param([(0, 20), (22, 40)], "s3 s0 s1", id="stripped white space between"),
        pytest.param([(0, 20), (60, 80)], "s1 s0 s3", id="a gap"),
        pytest.param([(20, 40), (0, 20)], "s1 s0 s3", id="backwards"),
        pytest.param([(0, 20), (0, 20)], "s1 s0 s3", id="the same place"),
    ],
)
def test_offsets_in_one_source_make_neighbours(offsets: list[tuple[int, int]], planned: str) -> None:
    nodes = chain()
    source = Document(text="All steps.", id_="all").as_related_node_info()
    for each, (start, end) in zip(nodes, offsets, strict=False):
        assert isinstance(each.node, TextNode)
        each.node.start_char_idx, each.node.end_char_idx = start, end
        each.node.relationships[NodeRelationship.SOURCE] = source
    request = [nodes[0], nodes[1], nodes[3]]
    first = nodes[3] if planned.startswith("s3") else nodes[1]
    assert ids(shuffling(first).postprocess_nodes(request)) == planned.split()


def test_pages_of_one_file_follow_each_other() -> None:
    pages = [
        TextNode(text=f"Page {page}.", id_=str(page), metadata={"file_path": "a.pdf", "page_label": str(page)})
        for page in (1, 2, 4)
    ]
    other = TextNode(text="Page 3.", id_="other", metadata={"file_path": "b.pdf", "page_label": "3"})
    request = scored([pages[0], pages[1], other, pages[2]])
    assert ids(shuffling(request[2]).postprocess_nodes(request)) == ["other", "1", "2", "4"]
    assert ids(shuffling(request[3]).postprocess_nodes(request)) == ["4", "1", "2", "other"]
    assert ids(shuffling(request[1]).postprocess_nodes(request)) == ["1", "2", "other", "4"]


def test_sentence_windows_that_overlap_stay_in_order() -> None:
    nodes = SentenceWindowNodeParser.from_defaults(sentence_splitter=sentences, window_size=1).get_nodes_from_documents(
        [manual(2)]
    )
    windows = MetadataReplacementPostProcessor(target_metadata_key="window").postprocess_nodes(
        scored([nodes[4], nodes[6], nodes[2], nodes[10]])
    )
    a, b, before, other = ids(windows)
    assert ids(shuffling(windows[1]).postprocess_nodes(windows)) == [a, b, before, other]
    assert ids(shuffling(windows[2]).postprocess_nodes(windows)) == [before, a, b, other]
    assert ids(shuffling(windows[3]).postprocess_nodes(windows)) == [other, a, b, before]


def test_merged_parents_stay_in_order() -> None:
    splitters: dict[str, Any] = {
        f"of {size}": SentenceSplitter(chunk_size=size, chunk_overlap=20, chunking_tokenizer_fn=sentences)
        for size in (512, 128)
    }
    parser = HierarchicalNodeParser.from_defaults(node_parser_ids=list(splitters), node_parser_map=splitters)
    nodes = parser.get_nodes_from_documents([manual(24)])
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(nodes)
    parents = [node for node in nodes if not node.parent_node]
    leaves = [node for node in nodes if node.parent_node]
    numbers = [i for i, leaf in enumerate(leaves) if parent_of(leaf) in {node.node_id for node in parents[1:3]}]
    merging = AutoMergingRetriever(Found(leaves), storage, simple_ratio_thresh=0.3)  # type: ignore[arg-type]
    merged = merging.retrieve(" ".join(map(str, numbers)))
    assert set(ids(merged)) == {parents[1].node_id, parents[2].node_id}
    merged.sort(key=lambda each: each.node.start_char_idx)  # type: ignore[attr-defined]
    other = scored([TextNode(text="Another text.", id_="other")])
    for first in (other[0], merged[1]):
        arranged = ids(shuffling(first).postprocess_nodes([*merged, *other]))
        assert arranged.index(parents[1].node_id) + 1 == arranged.index(parents[2].node_id)


def test_the_note_names_a_run_by_its_first_node() -> None:
    nodes = SentenceSplitter(chunk_size=128, chunk_overlap=0, chunking_tokenizer_fn=sentences).get_nodes_from_documents(
        [manual(), manual(6, "other")]
    )
    of = {name: scored([node for node in nodes if node.ref_doc_id == name]) for name in ("manual", "other")}
    llm = RecordingLLM()
    run, single = of["manual"][:3], of["other"][-1]
    postprocessor = shuffling(single, annotate="both")

    class Fixed(Found):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [*run, single]

    engine = RetrieverQueryEngine.from_args(Fixed(nodes), llm=llm, node_postprocessors=[postprocessor])
    arranged = postprocessor.postprocess_nodes([*run, single])
    labels = [each.metadata["warmprefix_label"] for each in arranged]
    engine.query("How?")
    named = re.findall(r"\[([^\]]+)\]", llm.prompts[-1].split("priority order")[1])
    assert named == [labels[1], labels[0]]
    for mode in ("note", "auto"):
        plain = RecordingLLM()
        step = shuffling(single, annotate=mode)
        RetrieverQueryEngine.from_args(Fixed(nodes), llm=plain, node_postprocessors=[step]).query("How?")
        places = [plain.prompts[-1].index(each.text) for each in (single, *run)]
        assert places == sorted(places)


def test_a_locked_order_is_kept() -> None:
    nodes = chain()
    assert ids(shuffling(nodes[3]).postprocess_nodes(nodes)) == ["s3", "s0", "s1", "s2"]
    assert ids(shuffling(nodes[3], order_locked=True).postprocess_nodes(nodes)) == ["s0", "s1", "s2", "s3"]


def test_pins_come_from_metadata_or_a_function() -> None:
    nodes = chain()
    nodes[0].node.metadata["place"] = "end"
    nodes[1].node.metadata["place"] = "start"
    nodes[2].node.metadata["place"] = "middle"

    def by_id(node: NodeWithScore) -> Pin | None:
        return {"s0": "end", "s1": "start"}.get(node.node_id)  # type: ignore[return-value]

    for rule in ("place", by_id):
        assert ids(shuffling(nodes[3], pinned=rule).postprocess_nodes(nodes)) == ["s1", "s2", "s3", "s0"]


def test_a_dictionary_holds_the_key_of_pins_and_no_function() -> None:
    kept = ContextReusePostprocessor(order_locked=True, pinned="place").to_dict()
    assert (kept["order_locked"], kept["pinned"]) == (True, "place")
    restored = ContextReusePostprocessor.from_dict(kept)
    assert (restored.order_locked, restored.pinned) == (True, "place")
    assert ContextReusePostprocessor(pinned=lambda node: None).to_dict()["pinned"] is None


def test_a_function_that_fails_leaves_the_nodes_as_they_came() -> None:
    nodes = chain()
    assert ids(ContextReusePostprocessor(pinned=lambda node: 1 // 0).postprocess_nodes(nodes)) == ids(nodes)  # type: ignore[arg-type, return-value]


def test_odd_relationships_change_nothing() -> None:
    """A node that names itself, a circle, and a list where one node belongs."""
    nodes = chain()
    info = [each.node.as_related_node_info() for each in nodes]
    nodes[0].node.relationships[NodeRelationship.NEXT] = info[0]
    nodes[1].node.relationships[NodeRelationship.PREVIOUS] = info[1]
    nodes[2].node.relationships = {NodeRelationship.CHILD: [info[1]], NodeRelationship.PREVIOUS: info[3]}
    nodes[3].node.relationships = {NodeRelationship.PREVIOUS: info[2], NodeRelationship.NEXT: info[2]}
    assert sorted(ids(shuffling(nodes[1]).postprocess_nodes(nodes))) == ["s0", "s1", "s2", "s3"]
    assert ids(shuffling(nodes[1]).postprocess_nodes([*nodes, nodes[0]]))[-1] == "s0"
