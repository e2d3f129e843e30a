"""Orders that are facts: neighbours in one source, locked orders, pinned documents, documents without text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import RecursiveCharacterTextSplitter

from warmprefix import ContextPlanner
from warmprefix.blocks import Pin
from warmprefix_langchain import ContextReuseCompressor, ContextReuseRetriever, context_reuse

Arrange = Callable[..., list[Document]]


def by_retriever(documents: Sequence[Document], **options: Any) -> list[Document]:
    retriever = ContextReuseRetriever(retriever=RunnableLambda(lambda _: list(documents)), **options)
    return retriever.invoke("How?")


def by_compressor(documents: Sequence[Document], **options: Any) -> list[Document]:
    return list(ContextReuseCompressor(**options).compress_documents(documents, "How?"))


def by_step(documents: Sequence[Document], **options: Any) -> list[Document]:
    found: list[Document] = context_reuse(**{"annotate": "none", **options}).invoke(list(documents))["documents"]
    return found


@pytest.fixture(params=[by_retriever, by_compressor, by_step])
def arrange(request: pytest.FixtureRequest) -> Arrange:
    """Arrange documents where the engine's cache holds the last of them."""
    by: Callable[..., list[Document]] = request.param

    def arrange(documents: Sequence[Document], **options: Any) -> list[Document]:
        planner = ContextPlanner(policy="greedy")
        by(documents[-1:], planner=planner, **options)
        return by(documents, planner=planner, **options)

    return arrange


def chunks(name: str = "manual.md", **metadata: Any) -> list[Document]:
    text = "\n\n".join(
        f"Step {i} of {name}. " + " ".join(f"Turn screw {i}.{j} by hand." for j in range(8)) for i in range(9)
    )
    splitter = RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=40, add_start_index=True)
    return splitter.split_documents([Document(text, metadata={"source": name, **metadata})])


def texts(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]


def test_chunks_that_follow_each_other_stay_in_order(arrange: Arrange) -> None:
    manual, [other, *_] = chunks(), chunks("other.md")
    assert len(manual) > 6
    a, b, c, d = texts(manual[2:6])
    assert texts(arrange([*manual[2:6], other])) == [other.page_content, a, b, c, d]
    assert texts(arrange(manual[2:6])) == [a, b, c, d]
    assert texts(arrange([manual[3], manual[5]])) == [d, b]
    assert texts(arrange([manual[4], manual[3]])) == [b, c]


def test_a_chunk_continues_the_one_before_across_pages(arrange: Arrange) -> None:
    first, second = chunks(page=1), chunks(page=2)
    other = Document("Another text.")
    request = [first[-1], second[0], second[1], other]
    assert texts(arrange(request)) == texts([other, *request[:3]])
    assert texts(arrange([first[-1], second[1]])) == texts([second[1], first[-1]])


def test_pages_of_one_file_stay_in_order(arrange: Arrange) -> None:
    pages = [Document(f"Page {page}.", metadata={"source": "a.pdf", "page": page}) for page in (3, 4, 6)]
    assert texts(arrange(pages)) == ["Page 6.", "Page 3.", "Page 4."]
    assert texts(arrange(pages[:2])) == ["Page 3.", "Page 4."]


def test_a_locked_order_is_kept(arrange: Arrange) -> None:
    documents = [Document(f"Message {i}.") for i in range(3)]
    assert texts(arrange(documents)) == ["Message 2.", "Message 0.", "Message 1."]
    assert texts(arrange(documents, order_locked=True)) == texts(documents)


def test_pins_come_from_metadata_or_a_function(arrange: Arrange) -> None:
    documents = [Document(f"Text {i}.", metadata={"place": place}) for i, place in enumerate(["end", None, "x", "x"])]

    def by_text(document: Document) -> Pin | None:
        return "end" if document.page_content == "Text 0." else None

    for rule in ("place", by_text):
        assert texts(arrange(documents, pinned=rule)) == ["Text 3.", "Text 1.", "Text 2.", "Text 0."]


def test_documents_without_text_keep_their_places(arrange: Arrange) -> None:
    pictures = [Document("", metadata={"image": f"{i}.png"}) for i in range(2)]
    one, two, three = [Document(f"Text {i}.") for i in range(3)]
    assert arrange([one, pictures[0], two, pictures[1], three]) == [three, pictures[0], one, pictures[1], two]
    assert arrange([pictures[0], pictures[0], one, pictures[1]]) == [pictures[0], one, pictures[1]]
    assert arrange(pictures) == pictures
