"""The last step of a compression pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.runnables import ensure_config
from pydantic import model_validator
from typing_extensions import Self

from warmprefix_langchain.arrange import note_in_last
from warmprefix_langchain.settings import ContextReuseSettings

__all__ = ["ContextReuseCompressor"]


class ContextReuseCompressor(ContextReuseSettings, BaseDocumentCompressor, BaseDocumentTransformer):
    """Arranges what a `ContextualCompressionRetriever` or a `DocumentCompressorPipeline` has retrieved and filtered.

    Put it last: what follows it would reorder, cut or rewrite what it arranged.

    The conversation is the running config's `thread_id`, `session_id` or `conversation_id`. A
    `ContextualCompressionRetriever` that is invoked by itself, outside a chain, passes the config's `metadata` only.
    """

    mode: Literal["reuse", "long_context"] = "reuse"
    """`"long_context"` is LangChain's `LongContextReorder`: the most relevant documents at both ends, the least in the
    middle. It returns the documents themselves; no planner or other option has a part in it, and prompts share hardly
    a prefix."""

    @model_validator(mode="after")
    def _shown_no_history(self) -> Self:
        if self.placement == "tail":
            raise ValueError("placement must be 'head': a compressor is shown no history for documents to refer to")
        return self

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        if self.mode == "long_context":
            return _best_at_both_ends(documents)
        metadata = getattr(callbacks, "metadata", None)
        return note_in_last(self.arranged(documents, ensure_config(), metadata=metadata), self.annotate)

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        if self.mode == "long_context":
            return _best_at_both_ends(documents)
        metadata = getattr(callbacks, "metadata", None)
        return note_in_last(await self.aarranged(documents, ensure_config(), metadata=metadata), self.annotate)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """`compress_documents` for those who call a transformer, such as `LongContextReorder`."""
        return self.compress_documents(documents, "")

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """`transform_documents`, for tasks."""
        return await self.acompress_documents(documents, "")


def _best_at_both_ends(documents: Sequence[Document]) -> list[Document]:
    """From the least relevant on, by turns at the front and at the back (after Liu et al., arXiv 2307.03172).

    So the most relevant of all is first if their number is odd, and last if it is even.
    """
    odd = len(documents) % 2
    return [*documents[1 - odd :: 2], *documents[odd::2][::-1]]
