"""An embedding that needs no model, so that the service starts without a download."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from zlib import crc32

from langchain_core.embeddings import Embeddings

__all__ = ["HashedWords"]

_DIMENSIONS = 1_024
_WORD = re.compile(r"[a-z0-9]{3,}")


class HashedWords(Embeddings):
    """Texts that share rare words are near each other. In production, use `OpenAIEmbeddings` or the like here."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Count in how many texts each word occurs."""
        listed = [set(_words(text)) for text in texts]
        self._texts = len(listed)
        self._holders = Counter(word for words in listed for word in words)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * _DIMENSIONS
        for word, count in Counter(_words(text)).items():
            rarity = math.log((1 + self._texts) / (1 + self._holders[word]))
            vector[crc32(word.encode()) % _DIMENSIONS] += (1 + math.log(count)) * rarity
        length = math.hypot(*vector)
        # A text without a familiar word is equally far from all others.
        return [value / length for value in vector] if length else [_DIMENSIONS**-0.5] * _DIMENSIONS


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
