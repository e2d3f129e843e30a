"""The documents that a retrieval tool hands over next to its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["documents_of"]


def documents_of(artifact: object) -> list[str]:
    """Return the texts of an artifact's documents; none if it is something else.

    A document has a text as `page_content`: an object, or the mapping that a checkpoint makes of it.
    """
    if not isinstance(artifact, list | tuple):
        return []
    texts: list[Any] = [
        item.get("page_content") if isinstance(item, Mapping) else getattr(item, "page_content", None)
        for item in artifact
    ]
    return [text for text in texts if isinstance(text, str)]
