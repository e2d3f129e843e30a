"""Searches of vector stores that return the scores of their documents, which LangChain's own retriever drops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, ensure_config
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from warmprefix import Choice

__all__ = ["ScoredDocuments", "bound_retriever", "check_search", "with_scores"]

Retriever = Runnable[str, list[Document]]


class ScoredDocuments(list[Document]):
    """Documents, as a retriever returns them, and their scores."""

    def __init__(self, found: Iterable[tuple[Document, float]]) -> None:
        found = list(found)
        super().__init__([document for document, _ in found])
        self.scores = [score for _, score in found]


class ScoredSearch(VectorStoreRetriever):
    """A vector store's retriever that returns `ScoredDocuments`."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        options = self.search_kwargs | kwargs
        if self.search_type == "similarity":
            return ScoredDocuments(self.vectorstore.similarity_search_with_score(query, **options))
        return ScoredDocuments(self.vectorstore.similarity_search_with_relevance_scores(query, **options))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        options = self.search_kwargs | kwargs
        if self.search_type == "similarity":
            return ScoredDocuments(await self.vectorstore.asimilarity_search_with_score(query, **options))
        return ScoredDocuments(await self.vectorstore.asimilarity_search_with_relevance_scores(query, **options))


def bound_retriever(retriever: Retriever) -> Retriever:
    """Return the retriever inside of bindings, such as those of `with_config` and `with_retry`."""
    while isinstance(retriever, RunnableBindingBase):
        retriever = retriever.bound
    return retriever


def with_scores(retriever: Retriever) -> Retriever:
    """Return a retriever that does the same, and returns `ScoredDocuments` if it is that of a vector store.

    It keeps its bindings, its name and its place in traces; fields that the running config sets are set. A retriever
    with a search of its own stays as it is, and so does that of a store without scores.
    """
    if isinstance(retriever, DynamicRunnable):
        return with_scores(retriever.prepare(ensure_config())[0])
    if isinstance(retriever, RunnableBindingBase):
        return retriever.model_copy(update={"bound": with_scores(retriever.bound)})
    if not isinstance(retriever, VectorStoreRetriever) or not _is_plain(retriever):
        return retriever
    return ScoredSearch.model_construct(**{**retriever.__dict__, "name": retriever.get_name()})


def check_search(retriever: Retriever, choose: Choice) -> None:
    """Check that the order of a vector store's documents is that of scores as `choose` describes them.

    Raises:
        ValueError: It is not.
    """
    search = bound_retriever(retriever)
    kind = search.search_type if isinstance(search, VectorStoreRetriever) else ""
    if kind == "mmr":
        raise ValueError("search_type must be 'similarity' with choose, got 'mmr', whose order is not that of scores")
    if kind == "similarity_score_threshold" and choose.scores == "distance":
        raise ValueError("scores must be 'similarity' for a search with a score threshold, got 'distance'")


def _is_plain(retriever: VectorStoreRetriever) -> bool:
    kind, store = type(retriever), type(retriever.vectorstore)
    return (
        kind._get_relevant_documents is VectorStoreRetriever._get_relevant_documents  # noqa: SLF001
        and kind._aget_relevant_documents is VectorStoreRetriever._aget_relevant_documents  # noqa: SLF001
        and store.similarity_search_with_score is not VectorStore.similarity_search_with_score
        and retriever.search_type in ("similarity", "similarity_score_threshold")
    )
