"""Mem0 without a server: a Qdrant in this process, and an embedding that needs no model unless you name one."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("MEM0_TELEMETRY", "False")  # read when Mem0 is imported

from mem0 import Memory
from qdrant_client import QdrantClient

from warmprefix_mem0 import ContextReuseMemory

__all__ = ["open_memories"]

_DIMENSIONS = 256
_WORD = re.compile(r"\w{3,}")


@contextmanager
def open_memories(folder: Path | None = None) -> Iterator[ContextReuseMemory]:
    """Yield Mem0's memories, kept in a folder; without one, until the end of the program.

    `EMBEDDING_MODEL` names an embedding model of the endpoint `EMBEDDING_URL`, and `EMBEDDING_DIMENSIONS` the length of
    its vectors.
    """
    model = os.environ.get("EMBEDDING_MODEL")
    dimensions = int(os.environ.get("EMBEDDING_DIMENSIONS", "1536")) if model else _DIMENSIONS
    key = os.environ.get("OPENAI_API_KEY", "none")
    embedder: dict[str, Any] = {"api_key": key}
    if model:
        embedder |= {"model": model, "openai_base_url": os.environ.get("EMBEDDING_URL")}
    client = QdrantClient(":memory:") if folder is None else QdrantClient(path=str(folder / "vectors"))
    store = {"client": client, "collection_name": "memories", "embedding_model_dims": dimensions, "on_disk": True}
    history = ":memory:" if folder is None else str(folder / "changes.db")
    with closing(client):
        memory = Memory.from_config(
            {
                "vector_store": {"provider": "qdrant", "config": store},
                "embedder": {"provider": "openai", "config": embedder},
                "llm": {"provider": "openai", "config": {"api_key": key}},  # not called with infer=False
                "history_db_path": history,
            }
        )
        if not model:
            memory.embedding_model = _HashedWords()
        with closing(memory):
            yield ContextReuseMemory(memory)


class _HashedWords:
    """Texts that share words are near each other."""

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        vector = [0.0] * _DIMENSIONS
        for word in _WORD.findall(text.lower()):
            vector[zlib.crc32(word.removesuffix("s").encode()) % _DIMENSIONS] += 1.0
        length = math.hypot(*vector) or 1.0
        return [value / length for value in vector]

    def embed_batch(self, texts: list[str], memory_action: str = "add") -> list[list[float]]:
        return [self.embed(text) for text in texts]
