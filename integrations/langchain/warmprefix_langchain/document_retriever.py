"""A retriever that arranges the documents of another one for the prefix cache."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import MessageLikeRepresentation
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import set_config_context
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, Field

from warmprefix_langchain.document_labels import append_note, as_list
from warmprefix_langchain.plugin_options import ContextReuseOptions

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
    too, if it accepts a `k`."""

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
        k = self._limit(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        found = self.retriever.invoke(query, config, **self._limit_argument(k), **kwargs)
        arranged = self.arranged(as_list(found)[:k], ensure_config(), run_manager, history)
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
        k = self._limit(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        found = await self.retriever.ainvoke(query, config, **self._limit_argument(k), **kwargs)
        arranged = await self.aarranged(as_list(found)[:k], ensure_config(), run_manager, history)
        return append_note(arranged, self.shown_in)

    def _limit(self, k: int | None) -> int | None:
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        return self.k if k is None else k

    def _limit_argument(self, k: int | None) -> dict[str, Any]:
        return {} if k is None or not _accepts_k(self.retriever) else {"k": k}


def _inheritable(config: RunnableConfig | None) -> RunnableConfig:
    """Return the config for inner runs: without the name and the id of this run."""
    inherited = ensure_config(config)
    inherited.pop("run_name", None)
    inherited.pop("run_id", None)
    return inherited


def _accepts_k(retriever: Runnable[str, list[Document]]) -> bool:
    while isinstance(retriever, RunnableBindingBase):
        retriever = retriever.bound
    if isinstance(retriever, VectorStoreRetriever):
        return True
    # A retriever that accepts any keyword passes `k` on, for example to one whose results are still to be reranked.
    return (
        isinstance(retriever, BaseRetriever) and "k" in inspect.signature(retriever._get_relevant_documents).parameters  # noqa: SLF001
    )
