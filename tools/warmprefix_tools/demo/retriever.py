"""Retrieval as an application does it: BM25 over the context blocks' texts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from warmprefix.blocks import ContextBlock
from warmprefix_tools.demo.words import content_words

__all__ = ["Bm25Retriever"]

_K1 = 1.5
_B = 0.75


class Bm25Retriever:
    """Finds the blocks that fit a query best; the same ones for the same blocks and query, on every run.

    Scores are those of Lucene's BM25 (Kamphuis et al., ECIR 2020), with k1 = 1.5 and b = 0.75.
    """

    def __init__(self, blocks: Sequence[ContextBlock]) -> None:
        self._blocks = blocks
        counts = [Counter(content_words(block.text)) for block in blocks]
        lengths = [count.total() for count in counts]
        average = sum(lengths) / len(lengths) if lengths else 1.0
        holders = Counter(word for count in counts for word in count)
        self._scores: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        """By word, the number of each block that holds it, and what the word adds to that block's score."""
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                rarity = math.log(1 + (len(blocks) - holders[word] + 0.5) / (holders[word] + 0.5))
                saturation = times / (times + _K1 * (1 - _B + _B * length / average))
                self._scores[word].append((number, rarity * saturation))

    def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return at most `k` blocks that share a word with the query, best first; of equals the one indexed first."""
        totals: defaultdict[int, float] = defaultdict(float)
        for word in content_words(query):
            for number, score in self._scores.get(word, ()):
                totals[number] += score
        best = sorted(totals, key=lambda number: (-totals[number], number))[:k]
        return tuple(self._blocks[number] for number in best)
