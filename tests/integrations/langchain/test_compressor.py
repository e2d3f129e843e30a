"""The compressor in the places LangChain has for one, and in the place of `LongContextReorder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.runnables import RunnableConfig, RunnableLambda

from warmprefix import ContextPlanner
from warmprefix_langchain import ContextReuseCompressor

Make = Callable[..., Any]


class Without(BaseDocumentTransformer):
    """A filter, as stands in front of ours."""

    def __init__(self, name: str) -> None:
        self.name = name

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        return [document for document in documents if document.id != self.name]

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        return self.transform_documents(documents)


@pytest.mark.parametrize("in_pipeline", [False, True])
async def test_a_compression_retriever_gives_back_what_it_arranged(
    in_pipeline: bool, planner: ContextPlanner, named: Make, shelf: Make, ids: Make
) -> None:
    ours = ContextReuseCompressor(planner=planner, annotate="auto")
    compressor = DocumentCompressorPipeline(transformers=[Without("x"), ours]) if in_pipeline else ours
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=shelf({"?": named("ab"), "!": named("ba")})
    )
    retriever.invoke("?")
    for found in (retriever.invoke("!"), await retriever.ainvoke("!")):
        assert ids(found) == "ab"
        assert found[-1].metadata["page_content"].endswith('\n\nMost relevant above: the passage with "The text of b".')


def test_a_note_names_what_a_filter_in_front_left(planner: ContextPlanner, named: Make) -> None:
    pipeline = DocumentCompressorPipeline(
        transformers=[Without("x"), ContextReuseCompressor(planner=planner, annotate="both")]
    )
    pipeline.compress_documents(named("ab"), "?")
    note = pipeline.compress_documents(named("bxa"), "?")[-1].metadata["page_content"]
    assert note.endswith("order: [b] > [a] and answer the question.")


def test_a_filter_behind_it_takes_the_note_only_with_its_document(planner: ContextPlanner, named: Make) -> None:
    """The wrong way round: then a note may be gone or name what is gone, but all that is left is labelled."""
    ours = ContextReuseCompressor(planner=planner, annotate="both")
    ours.compress_documents(named("ab"), "?")
    note = "\n\nPlease read the context in the following priority order: [b] > [a] and answer the question."
    for name, left in (("a", f"[b] The text of b.{note}"), ("b", "[a] The text of a.")):
        pipeline = DocumentCompressorPipeline(transformers=[ours, Without(name)])
        [document] = pipeline.compress_documents(named("ba"), "?")
        assert document.metadata["page_content"] == left


async def test_whose_call_it_is(planner: ContextPlanner, named: Make, shelf: Make, request_log: Any) -> None:
    retriever = ContextualCompressionRetriever(
        base_compressor=ContextReuseCompressor(planner=planner, annotate="both"),
        base_retriever=shelf({"?": named("ab")}),
    )
    config: RunnableConfig = {"metadata": {"session_id": "chat-7", "tenant": "acme"}}
    retriever.invoke("?", config)
    await retriever.ainvoke("?", config)
    in_thread: RunnableConfig = {"configurable": {"thread_id": "chat-7", "tenant": "acme"}}
    (RunnableLambda(lambda x: x) | retriever).invoke("?", in_thread)
    await (RunnableLambda(lambda x: x) | retriever).ainvoke("?", in_thread)
    ContextReuseCompressor(planner=planner, tenant="umbrella").compress_documents(named("ab"), "?")
    assert request_log.conversations == ["chat-7"] * 4 + [None]
    assert request_log.tenants == ["acme"] * 4 + ["umbrella"]


def test_a_compressor_has_no_history_to_refer_to() -> None:
    with pytest.raises(ValueError, match="placement must be 'head'"):
        ContextReuseCompressor(placement="tail", annotate="both")


def long_context_reorder(documents: list[str]) -> list[str]:
    """The published algorithm, step by step."""
    reordered: list[str] = []
    for i, document in enumerate(reversed(documents)):
        if i % 2 == 1:
            reordered.append(document)
        else:
            reordered.insert(0, document)
    return reordered


@given(st.lists(st.text(max_size=3), max_size=12))
async def test_the_long_context_mode_is_long_context_reorder(texts: list[str]) -> None:
    documents = [Document(text) for text in texts]
    compressor = ContextReuseCompressor(mode="long_context")
    for found in (
        compressor.transform_documents(documents),
        await compressor.atransform_documents(documents),
        compressor.compress_documents(documents, "?"),
        await compressor.acompress_documents(documents, "?"),
    ):
        assert [document.page_content for document in found] == long_context_reorder(texts)
        assert {id(document) for document in found} == {id(document) for document in documents}
    assert [document.page_content for document in documents] == texts
    assert compressor.planner.stats().plans == 0


def test_it_stands_where_the_transformer_stood(named: Make, ids: Make) -> None:
    pipeline = DocumentCompressorPipeline(transformers=[Without("x"), ContextReuseCompressor(mode="long_context")])
    assert ids(pipeline.compress_documents(named("abxcd"), "?")) == "bdca"


def test_called_as_a_transformer_it_arranges(planner: ContextPlanner, named: Make, ids: Make) -> None:
    compressor = ContextReuseCompressor(planner=planner)
    compressor.transform_documents(named("ab"))
    assert ids(compressor.transform_documents(named("ba"))) == "ab"


def test_its_text_shows_no_planner() -> None:
    assert "planner" not in repr(ContextReuseCompressor())
