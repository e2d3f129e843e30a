"""A retriever around any other, whose documents come in an order that the prefix cache knows."""

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

from warmprefix_langchain.arrange import as_list, note_in_last
from warmprefix_langchain.settings import ContextReuseSettings

__all__ = ["ContextReuseRetriever"]


class ContextReuseRetriever(ContextReuseSettings, BaseRetriever):
    """Finds what `retriever` finds; chains take it as it is. An agent's tools want the plain `retriever`.

    Put it last: a compressor or ensemble behind it would reorder, cut or rewrite what it arranged. Rerank inside.

    `invoke(query, history=messages)` shows the history for `placement="tail"`, in any form that LangChain takes
    messages in. All other arguments but `k` go to `retriever` as they are.

    The conversation is the config's `thread_id`, `session_id` or `conversation_id`, in `configurable` or `metadata`.
    """

    model_config = ConfigDict(extra="forbid")

    retriever: RetrieverLike
    """A retriever, or any Runnable from a question to documents, best first."""

    k: int | None = Field(default=None, ge=1)
    """The most documents to return, best ones first kept; a call's `k` overrides it. `retriever` is told if it takes a
    `k` itself."""

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
        k = self._most(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        found = self.retriever.invoke(query, config, **self._told(k), **kwargs)
        arranged = self.arranged(as_list(found)[:k], ensure_config(), metadata=run_manager.metadata, history=history)
        return note_in_last(arranged, self.annotate)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        k = self._most(k)
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        found = await self.retriever.ainvoke(query, config, **self._told(k), **kwargs)
        arranged = await self.aarranged(
            as_list(found)[:k], ensure_config(), metadata=run_manager.metadata, history=history
        )
        return note_in_last(arranged, self.annotate)

    def _most(self, k: int | None) -> int | None:
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        return self.k if k is None else k

    def _told(self, k: int | None) -> dict[str, Any]:
        return {} if k is None or not _takes_k(self.retriever) else {"k": k}


def _inheritable(config: RunnableConfig | None) -> RunnableConfig:
    """The config without what names this very run, so that runs inside it may see the rest."""
    inherited = ensure_config(config)
    inherited.pop("run_name", None)
    inherited.pop("run_id", None)
    return inherited


def _takes_k(retriever: Runnable[str, list[Document]]) -> bool:
    while isinstance(retriever, RunnableBindingBase):
        retriever = retriever.bound
    if isinstance(retriever, VectorStoreRetriever):
        return True
    # Others that take any keyword hand it on: to a retriever whose results are still to be reranked, for one.
    return (
        isinstance(retriever, BaseRetriever) and "k" in inspect.signature(retriever._get_relevant_documents).parameters  # noqa: SLF001
    )
