"""An application's documents, as the router sees them and as a framework may store them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmprefix import ContextBlock

__all__ = ["as_blocks", "as_list", "has_value", "travelling", "value_of"]

_FIELDS = ("text", "id", "tokens", "score", "pinned")
"""Of a block, in its plain form."""


def as_list(documents: Any) -> list[Any]:
    """What was found, unless it is a mistake: the parts of one document must not pass for documents.

    Raises:
        TypeError: `documents` is one document, or nothing that can be listed.
    """
    # Pydantic's models can be iterated over: that gives their fields.
    if (
        isinstance(documents, str | bytes | Mapping)
        or _text(documents) is not None
        or not isinstance(documents, Iterable)
    ):
        raise TypeError(f"documents must be a sequence of documents, got one {type(documents).__name__}")
    return list(documents)


def as_blocks(documents: Any) -> list[ContextBlock]:
    """A block a document.

    A document is a block, a text, what has a text as `page_content` or `text` as LangChain's have, or gives it by
    `get_content()` as LlamaIndex's nodes do; or a mapping with what one of those has, which is how a framework's
    storage may give it back.

    Raises:
        TypeError: `documents` is one document, or no sequence, or holds something else.
    """
    return [_as_block(position, document) for position, document in enumerate(as_list(documents))]


def travelling(document: Any) -> Any:
    """The document itself, but a block as a mapping: frameworks can't store blocks and give them back."""
    if isinstance(document, ContextBlock):
        return {name: getattr(document, name) for name in _FIELDS}
    return document


def has_value(item: object, name: str) -> bool:
    """Whether `value_of` finds something, if only None."""
    return name in item if isinstance(item, Mapping) else hasattr(item, name)


def value_of(item: object, name: str) -> Any:
    """An entry of a mapping, or an attribute of anything else; None if it has none of that name."""
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
    told = [get_content()] if callable(get_content) else [_deep(document, key) for key in ("page_content", "text")]
    return next((text for text in told if isinstance(text, str)), None)


def _deep(document: Any, key: str) -> Any:
    """Of the document or, for a node that came with its score, of the node."""
    value = value_of(document, key)
    return value_of(value_of(document, "node"), key) if value is None else value
