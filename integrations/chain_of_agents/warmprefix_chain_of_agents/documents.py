"""An application's documents, as blocks for the router and as plain values for a framework's storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmprefix import ContextBlock

__all__ = ["as_blocks", "as_list", "as_plain", "has_value", "value_of"]

_FIELDS = ("text", "id", "tokens", "score", "pinned")
"""Fields of a block in its plain form."""


def as_list(documents: Any) -> list[Any]:
    """Return the documents as a list. One document is refused: its parts must not pass for documents.

    Raises:
        TypeError: `documents` is one document, or nothing that can be listed.
    """
    # Iterating over a pydantic model would give its fields.
    is_one = isinstance(documents, str | bytes | Mapping) or _text(documents) is not None
    if is_one or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be a sequence of documents, got one {type(documents).__name__}")
    return list(documents)


def as_blocks(documents: Any) -> list[ContextBlock]:
    """Return a block for each document.

    A document is a block, a text, an object with its text as `page_content` or `text` (LangChain) or from
    `get_content()` (LlamaIndex); or a mapping with the same fields, as a framework's storage may return it.

    Raises:
        TypeError: `documents` is one document, or no sequence, or holds another object.
    """
    return [_as_block(position, document) for position, document in enumerate(as_list(documents))]


def as_plain(document: Any) -> Any:
    """Return the document itself, or a block as a mapping: frameworks can't restore blocks."""
    if isinstance(document, ContextBlock):
        return {name: getattr(document, name) for name in _FIELDS}
    return document


def has_value(item: object, name: str) -> bool:
    """Return True if the item has an entry or attribute of this name, even if it is None."""
    return name in item if isinstance(item, Mapping) else hasattr(item, name)


def value_of(item: object, name: str) -> Any:
    """Return an entry of a mapping, or an attribute of any other object; None without one."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _as_block(position: int, document: Any) -> ContextBlock:
    if isinstance(document, ContextBlock):
        return document
    if isinstance(document, str):
        return ContextBlock(document)
    if isinstance(document, Mapping) and document.keys() >= set(_FIELDS):
        return ContextBlock(**{name: document[name] for name in _FIELDS})
    text = _text(document)
    if text is None:
        kind = type(document).__name__
        raise TypeError(f"documents[{position}] must be a text, a block, a document or a node, got {kind}")
    named = next((name for key in ("id", "node_id", "id_") if (name := _deep(document, key)) is not None), None)
    usable = isinstance(named, str | int) and not isinstance(named, bool)
    return ContextBlock(text, id=named if usable else None)


def _text(document: Any) -> str | None:
    get_content = getattr(document, "get_content", None)
    texts = [get_content()] if callable(get_content) else [_deep(document, key) for key in ("page_content", "text")]
    return next((text for text in texts if isinstance(text, str)), None)


def _deep(document: Any, key: str) -> Any:
    """Return a value of the document or, if it is a node with a score, of the node."""
    value = value_of(document, key)
    return value_of(value_of(document, "node"), key) if value is None else value
