"""A document compressor for the last step of a compression pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.runnables import ensure_config
from pydantic import model_validator
from typing_extensions import Self

from warmprefix_langchain.document_labels import append_note
from warmprefix_langchain.plugin_options import ContextReuseOptions

__all__ = ["ContextReuseCompressor"]


class ContextReuseCompressor(ContextReuseOptions, BaseDocumentCompressor, BaseDocumentTransformer):
    """Compressor that arranges the documents of a retriever or a compressor pipeline.

    It works in a `ContextualCompressionRetriever` and in a `DocumentCompressorPipeline`. Put it last: a later step
    would reorder, cut or rewrite the arranged documents.

    With `choose`, it is given the candidates: let the retriever, and a reranker before this step, return more documents
    than the prompt is to hold. A reranker that drops its scores, such as `CrossEncoderReranker`, leaves no choice.

    Outside a chain, a `ContextualCompressionRetriever` passes only the config's `metadata`.
    """

    mode: Literal["reuse", "long_context"] = "reuse"
    """`"long_context"` does the same as LangChain's `LongContextReorder`: it puts the most relevant documents at both
    ends and the least relevant ones in the middle. It returns the documents themselves and uses neither the planner nor
    another option. Prompts then rarely share a prefix."""

    @model_validator(mode="after")
    def _check_history(self) -> Self:  # another name than the validator of the options, which it would replace
        if self.placement == "tail" and self.conversation is None:
            raise ValueError("placement must be 'head' without a conversation, got 'tail': compressors get no history")
        if self.choose is not None and self.mode == "long_context":
            raise ValueError("mode must be 'reuse' with choose, got 'long_context'")
        return self

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        if self.mode == "long_context":
            return _best_at_both_ends(documents)
        return append_note(self.arranged(documents, ensure_config(), callbacks), self.shown_in)

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> Sequence[Document]:
        if self.mode == "long_context":
            return _best_at_both_ends(documents)
        return append_note(await self.aarranged(documents, ensure_config(), callbacks), self.shown_in)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Do the same as `compress_documents`, for pipelines that call a transformer."""
        return self.compress_documents(documents, "")

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Do the same as `transform_documents`."""
        return await self.acompress_documents(documents, "")


def _best_at_both_ends(documents: Sequence[Document]) -> list[Document]:
    """Place documents alternately at the front and at the back, least relevant first.

    The most relevant document is first if their number is odd, and last if it is even. After Liu et al., arXiv
    2307.03172.
    """
    odd = len(documents) % 2
    return [*documents[1 - odd :: 2], *documents[odd::2][::-1]]
