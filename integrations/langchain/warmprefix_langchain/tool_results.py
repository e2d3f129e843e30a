"""Where the context blocks stand in a tool's result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warmprefix import ContextBlock

__all__ = ["cut", "documents_of"]


def documents_of(artifact: object) -> list[ContextBlock]:
    """The documents that a retrieval tool hands over beside its text; empty if the artifact is something else.

    A document is what has a text as `page_content`: a checkpoint gives every kind of it back as a mapping.
    """
    if not isinstance(artifact, list | tuple):
        return []
    return [block for item in artifact if (block := _block(item)) is not None]


def _block(item: object) -> ContextBlock | None:
    text = _get(item, "page_content")
    if not isinstance(text, str):
        return None
    identity = _get(item, "id")
    if identity is None:
        identity = _get(_get(item, "metadata"), "id")
    usable = isinstance(identity, str | int) and not isinstance(identity, bool)
    return ContextBlock(text, id=identity if usable else None)


def _get(item: object, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def cut(
    text: str, documents: Sequence[ContextBlock], separator: str | None, min_tokens: int
) -> list[ContextBlock | str]:
    """Cut a result into its blocks and the text between them: joined again, the pieces are `text`.

    The documents are looked for in sequence; one that the tool left out or changed is no block. Where none is found,
    the parts between separators are the blocks, and without those the whole text is one. What is shorter than
    `min_tokens` belongs to the text between.
    """
    for blocks in (documents, [ContextBlock(part) for part in text.split(separator)] if separator else []):
        pieces = _around((block for block in blocks if block.text and block.tokens >= min_tokens), text)
        if len(pieces) > 1:
            return pieces
    return [ContextBlock(text) if text else text]


def _around(blocks: Iterable[ContextBlock], text: str) -> list[ContextBlock | str]:
    pieces: list[ContextBlock | str] = []
    end = gap = 0
    for block in blocks:
        # Mostly there is the same between all of them, and looking there takes a hundredth of the time.
        start = end + gap if text.startswith(block.text, end + gap) else text.find(block.text, end)
        if start >= 0:
            pieces += text[end:start], block
            gap, end = start - end, start + len(block.text)
    pieces.append(text[end:])
    return pieces
