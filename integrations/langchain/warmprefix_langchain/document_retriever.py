"""A retriever that arranges the documents of another one for the prefix cache."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import MessageLikeRepresentation
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.runnables.config import set_config_context
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from warmprefix import Choice
from warmprefix_langchain.document_labels import append_note, as_list
from warmprefix_langchain.plugin_options import ContextReuseOptions
from warmprefix_langchain.scored_search import ScoredDocuments, bound_retriever, check_search, with_scores

__all__ = ["ContextReuseRetriever"]


class ContextReuseRetriever(ContextReuseOptions, BaseRetriever):
    """Retriever for chains that returns the documents of `retriever` in planned order.

    Put it last: a compressor or ensemble after it would reorder, cut or rewrite the arranged documents. Rerank inside.
    For an agent's tools, use the plain `retriever` and `ContextReuseMiddleware`.

    `invoke(query, history=messages)` passes the history for `placement="tail"`, in any form that LangChain takes
    messages in; it comes before `conversation`. All other arguments except `k` go to `retriever` unchanged.

    Recorded requests name the conversation by the config's `thread_id`, `session_id` or `conversation_id`, in
    `configurable` or `metadata`.
    """

    model_config = ConfigDict(extra="forbid")

    retriever: RetrieverLike
    """A retriever, or any Runnable that maps a question to documents, best first."""

    k: int | None = Field(default=None, ge=1)
    """Maximum number of documents to return; the best ones are kept. A call's `k` overrides it. `retriever` receives it
    too, if it accepts a `k`. With `choose`, leave it out: the choice has a `k`, which that of a call overrides."""

    fetch_k: int | None = Field(default=None, ge=1)
    """Maximum number of candidates, with `choose`; `retriever` receives it as its `k`, if it accepts one. By default
    2.5 candidates per place of the choice.

    The scores of a vector store's retriever are those of its `similarity_search_with_score`: say in the choice whether
    these are similarities or distances. Other retrievers have them in metadata; see `score_key`."""

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        if self.choose is None:
            if self.fetch_k is not None:
                raise ValueError(f"fetch_k must be None without choose, got {self.fetch_k}")
            return self
        if self.k is not None:
            raise ValueError(f"k must be None with choose, which has a k, got {self.k}")
        if self.fetch_k is not None and self.fetch_k < self.choose.k:
            raise ValueError(f"fetch_k must be at least the k of choose, {self.choose.k}, got {self.fetch_k}")
        check_search(self.retriever, self.choose)
        return self

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:  # noqa: A002
        with set_config_context(_inheritable(config)) as context:
            return context.run(super().invoke, input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:  # noqa: A002
        with set_config_context(_inheritable(config)) as context:
            return await context.run(asyncio.create_task, super().ainvoke(input, config, **kwargs))

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        most, choose = self._limits(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        retriever = self.retriever if choose is None else with_scores(self.retriever)
        found = retriever.invoke(query, config, **_limit_argument(retriever, most), **kwargs)
        scores = found.scores[:most] if isinstance(found, ScoredDocuments) else None
        arranged = self.arranged(as_list(found)[:most], ensure_config(), run_manager, history, choose, scores)
        return append_note(arranged, self.shown_in)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        most, choose = self._limits(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        retriever = self.retriever if choose is None else with_scores(self.retriever)
        found = await retriever.ainvoke(query, config, **_limit_argument(retriever, most), **kwargs)
        scores = found.scores[:most] if isinstance(found, ScoredDocuments) else None
        arranged = await self.aarranged(as_list(found)[:most], ensure_config(), run_manager, history, choose, scores)
        return append_note(arranged, self.shown_in)

    def _limits(self, k: int | None) -> tuple[int | None, Choice | None]:
        """Return the most documents to look at, and the choice of those to return."""
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        choose = self.choose
        if choose is None:
            return (self.k if k is None else k), None
        if k is not None:
            keep = choose.keep if choose.keep is None else min(choose.keep, k)
            choose = replace(choose, k=k, keep=keep)
        most = -(-5 * choose.k // 2) if self.fetch_k is None else max(self.fetch_k, choose.k)
        return most, choose


def _inheritable(config: RunnableConfig | None) -> RunnableConfig:
    """Return the config for inner runs: without the name and the id of this run."""
    inherited = ensure_config(config)
    inherited.pop("run_name", None)
    inherited.pop("run_id", None)
    return inherited


def _limit_argument(retriever: RetrieverLike, k: int | None) -> dict[str, Any]:
    return {} if k is None or not _accepts_k(retriever) else {"k": k}


def _accepts_k(retriever: Runnable[str, list[Document]]) -> bool:
    retriever = bound_retriever(retriever)
    if isinstance(retriever, VectorStoreRetriever):
        return True
    # A retriever that accepts any keyword passes `k` on, for example to one whose results are still to be reranked.
    return (
        isinstance(retriever, BaseRetriever) and "k" in inspect.signature(retriever._get_relevant_documents).parameters  # noqa: SLF001
    )
