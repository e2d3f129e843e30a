"""Retrieval as an application does it: BM25 over the context blocks' texts."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.blocks import ContextBlock
from warmprefix.demo.words import content_words
from warmprefix.errors import MissingExtraError

try:
    import bm25s  # type: ignore[import-untyped]
    import numpy as np
except ImportError as exc:
    raise MissingExtraError("cli", exc.name or "bm25s") from exc

__all__ = ["Bm25Retriever"]


class Bm25Retriever:
    """Finds the blocks that fit a query best; the same ones for the same blocks and query, on every run."""

    def __init__(self, blocks: Sequence[ContextBlock]) -> None:
        self._blocks = blocks
        self._index = bm25s.BM25()
        self._index.index([content_words(block.text) for block in blocks], show_progress=False)

    def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """At most `k` blocks that share a word with the query, best first; of equals the one indexed first."""
        words = content_words(query)
        if not words:
            return ()
        scores = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:k]
        return tuple(self._blocks[i] for i in best if scores[i] > 0)
