"""Finds passages, and arranges them for the engine's prefix cache."""

from __future__ import annotations

from pathlib import Path

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import MarkdownTextSplitter

from warmprefix import ContextPlanner
from warmprefix_langchain import ContextReuseRetriever
from warmprefix_redis.settings import SharedSettings

from .embeddings import HashedWords

__all__ = ["create_planner", "create_retriever", "read_passages"]


def create_planner() -> ContextPlanner:
    """Return a planner that shares its state through Redis, if `WARMPREFIX_REDIS_URL` is set.

    Redis may be down, now or later: the service then answers without what other workers learned.
    """
    settings = SharedSettings()
    if settings.redis_url is None:
        return ContextPlanner(capacity_tokens=settings.capacity_tokens)
    return ContextPlanner.from_url(settings=settings)


def read_passages(folder: Path) -> list[Document]:
    """Return the Markdown files of a folder in passages of about 300 tokens.

    Passages do not overlap, and a passage has the same text for each question: both let the cache hold it once.
    """
    splitter = MarkdownTextSplitter(chunk_size=1_200, chunk_overlap=0)
    passages: list[Document] = []
    for path in sorted(folder.rglob("*.md")):
        name = path.relative_to(folder).as_posix()
        for number, text in enumerate(splitter.split_text(path.read_text(encoding="utf-8")), 1):
            passages.append(Document(text, id=f"{name}:{number}", metadata={"source": name}))
    if not passages:
        raise ValueError(f"documents must be a folder with Markdown files, got {folder}")
    return passages


def create_retriever(passages: list[Document], planner: ContextPlanner, k: int) -> ContextReuseRetriever:
    """Return a retriever of the `k` best passages, in the order that reuses most of the engine's cache."""
    store = InMemoryVectorStore(HashedWords(passage.page_content for passage in passages))
    store.add_documents(passages)
    # A reranker goes between the two: the planner must come last. `shown_in="content"` puts the note on the
    # relevance order into the last passage's text, because the prompt joins the texts itself.
    return ContextReuseRetriever(
        retriever=store.as_retriever(search_kwargs={"k": k}), planner=planner, annotate="auto", shown_in="content"
    )
