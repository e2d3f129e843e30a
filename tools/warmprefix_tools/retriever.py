"""Retrieval as an application does it: BM25 over the words of context blocks."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from warmprefix import ContextBlock

__all__ = ["Bm25Retriever", "content_words"]

_K1 = 1.5
_B = 0.75
_WORD = re.compile(r"[^\W\d_]+|\d+")
_ENGLISH_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
"""A character of a language that puts no spaces between words."""

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a about an and any anything are as at be been before but by call can code could did do does do else example find
        for found from good had has have here how i if in into is it its like me mean meant module my need of off
        offer on or other otherwise out pass python rather same self should show so some something standard
        start than that the their them then there these this those to too use used using usual want was way what when
        where which while will with work would write you your
        """,
    )
)


def content_words(text: str) -> list[str]:
    """Return the lower-case words, also those within identifiers; without stop words, plurals as singulars.

    Of a language without spaces between words, return pairs of characters.

    >>> content_words("What does json.JSONEncoder.iterencode(o, _one_shot=False) do with Strings?")
    ['json', 'json', 'encoder', 'iterencode', 'o', 'one', 'shot', 'false', 'string']
    """
    words = [part.lower() for word in _WORD.findall(text) for part in _parts(word)]
    return [_singular(word) for word in words if word not in _STOP_WORDS]


def _parts(word: str) -> list[str]:
    if word.isascii():
        return _ENGLISH_PART.findall(word)
    if _WITHOUT_SPACES.search(word):
        return [word[at : at + 2] for at in range(max(len(word) - 1, 1))]
    return [word]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


class Bm25Retriever:
    """Index that finds the blocks that fit a query best; deterministic.

    Scores are those of Lucene's BM25 (Kamphuis et al., ECIR 2020), with k1 = 1.5 and b = 0.75.
    """

    def __init__(self, blocks: Sequence[ContextBlock]) -> None:
        self._blocks = blocks
        counts = [Counter(content_words(block.text)) for block in blocks]
        lengths = [count.total() for count in counts]
        average = sum(lengths) / len(lengths) if lengths else 1.0
        holders = Counter(word for count in counts for word in count)
        # By word: the number of each block that contains it, and what the word adds to that block's score.
        self._scores: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                rarity = math.log(1 + (len(blocks) - holders[word] + 0.5) / (holders[word] + 0.5))
                saturation = times / (times + _K1 * (1 - _B + _B * length / average))
                self._scores[word].append((number, rarity * saturation))

    def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return at most `k` blocks that share a word with the query, best first; equals in order of the index."""
        return tuple([block for block, _ in self.scored(query, k)])

    def scored(self, query: str, k: int) -> list[tuple[ContextBlock, float]]:
        """Return the same blocks, each with its score."""
        totals: defaultdict[int, float] = defaultdict(float)
        for word in content_words(query):
            for number, score in self._scores.get(word, ()):
                totals[number] += score
        best = sorted(totals, key=lambda number: (-totals[number], number))[:k]
        return [(self._blocks[number], totals[number]) for number in best]
