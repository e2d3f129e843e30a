"""An application's documents, as blocks for the router and as plain values for a framework's storage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from warmprefix import Choice, ContextBlock
from warmprefix_requests.choices import usable_choice
from warmprefix_requests.neighbours import PinRule, SourcePlace, neighbours, pin_of

__all__ = ["as_blocks", "as_list", "as_plain", "candidates_of", "check_choice", "has_value", "value_of"]

_log = logging.getLogger("warmprefix")
_unscored = itertools.count()

_SCORE_KEY = "relevance_score"
_FIELDS = ("text", "id", "tokens", "score", "pinned")
"""Fields of a block in its plain form, besides the one that it follows."""


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


def as_blocks(documents: Any, pinned: PinRule[Any] | None = None) -> list[ContextBlock]:
    """Return a block for each document.

    A document is a block, a text, an object with its text as `page_content` or `text` (LangChain) or from
    `get_content()` (LlamaIndex); or a mapping with the same fields, as a framework's storage may return it. Documents
    one behind the other that also follow each other in their source are linked. `pinned` is for all but blocks.

    Raises:
        TypeError: `documents` is one document, or no sequence, or holds another object.
    """
    listed = as_list(documents)
    blocks = [_as_block(position, document, pinned) for position, document in enumerate(listed)]
    followed = neighbours(listed, [block.text for block in blocks], _continues)
    for i, before in enumerate(followed):
        if before is not None:
            block = blocks[i]
            block = ContextBlock(block.text, block.id, score=block.score, pinned=block.pinned, follows=blocks[before])
            blocks[i] = block
    return blocks


def check_choice(choose: object, *, order_locked: bool) -> None:
    """Check the options of an object that hands out documents.

    Raises:
        TypeError: `choose` is no `Choice`.
        ValueError: The order is locked, which leaves no choice.
    """
    if choose is not None and not isinstance(choose, Choice):
        raise TypeError(f"choose must be a Choice or None, got {type(choose).__name__}")
    if choose is not None and order_locked:
        raise ValueError("order_locked must be False with choose: a locked order has all documents")


def candidates_of(
    choose: Choice | None, documents: Sequence[Any], blocks: list[ContextBlock]
) -> tuple[Choice | None, list[ContextBlock]]:
    """Return the choice among documents and their blocks; without usable scores, None and the first `k`."""
    if choose is None:
        return None, blocks
    usable, first, error = usable_choice(choose, blocks, documents)
    if usable is not None:
        return usable, blocks
    level = logging.WARNING if next(_unscored) == 0 else logging.DEBUG
    source = f"a block's or node's score, or metadata[{_SCORE_KEY!r}]"
    _log.log(level, "the first %d documents are read: %s. Scores are %s.", choose.k, error, source)
    return None, blocks[:first]


def as_plain(document: Any) -> Any:
    """Return the document itself, or a block as a mapping: frameworks can't restore blocks."""
    if isinstance(document, ContextBlock):
        follows: object = document.follows
        if isinstance(follows, bytes):  # which JSON cannot hold
            follows = {"fingerprint": follows.hex()}
        return {**{name: getattr(document, name) for name in _FIELDS}, "follows": follows}
    return document


def has_value(item: object, name: str) -> bool:
    """Return True if the item has an entry or attribute of this name, even if it is None."""
    return name in item if isinstance(item, Mapping) else hasattr(item, name)


def value_of(item: object, name: str) -> Any:
    """Return an entry of a mapping, or an attribute of any other object; None without one."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _as_block(position: int, document: Any, pinned: PinRule[Any] | None) -> ContextBlock:
    if isinstance(document, ContextBlock):
        return document
    if isinstance(document, str):
        return ContextBlock(document)
    if _is_plain_block(document):
        follows = document.get("follows")
        if isinstance(follows, Mapping):
            follows = bytes.fromhex(follows["fingerprint"])
        return ContextBlock(**{name: document[name] for name in _FIELDS}, follows=follows)
    text = _text(document)
    if text is None:
        kind = type(document).__name__
        raise TypeError(f"documents[{position}] must be a text, a block, a document or a node, got {kind}")
    named = next((name for key in ("id", "node_id", "id_") if (name := _deep(document, key)) is not None), None)
    usable = isinstance(named, str | int) and not isinstance(named, bool)
    metadata = _metadata(document)
    pin = pin_of(pinned, document, metadata)
    return ContextBlock(text, id=named if usable else None, score=_score(document, metadata), pinned=pin)


def _score(document: Any, metadata: Mapping[str, Any]) -> float | None:
    """Return the score of a node, or of a document of LangChain behind a reranker; None without one."""
    value = value_of(document, "score")
    with suppress(TypeError, ValueError, OverflowError):
        return float(metadata.get(_SCORE_KEY) if value is None else value)  # type: ignore[arg-type]
    return None


def _is_plain_block(document: Any) -> bool:
    return isinstance(document, Mapping) and document.keys() >= set(_FIELDS)


def _continues(document: Any, before: Any) -> bool:
    """Return True if one document of a framework follows another in their source."""
    if any(isinstance(each, ContextBlock | str) or _is_plain_block(each) for each in (document, before)):
        return False
    with suppress(ValueError):  # LlamaIndex's for a relationship of another kind
        if _related(document, "prev_node") in _ids(before) or _related(before, "next_node") in _ids(document):
            return True
        return _place(document).continues(_place(before))
    return False


def _place(document: Any) -> SourcePlace:
    place = SourcePlace.of_metadata(_metadata(document), len(_text(document) or ""))
    start, end = _deep(document, "start_char_idx"), _deep(document, "end_char_idx")
    if place.start is not None or not isinstance(start, int) or not isinstance(end, int):
        return place
    source = place.source if place.page is not None else _related(document, "source_node")
    return SourcePlace(None if source is None else (source, _related(document, "parent_node")), start, end, place.page)


def _related(node: Any, relationship: str) -> str | None:
    related = value_of(_deep(node, relationship), "node_id")
    return related if isinstance(related, str) else None


def _ids(node: Any) -> tuple[str, ...]:
    name = _deep(node, "node_id")
    return (name,) if isinstance(name, str) else ()


def _metadata(document: Any) -> Mapping[str, Any]:
    metadata = _deep(document, "metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _text(document: Any) -> str | None:
    get_content = getattr(document, "get_content", None)
    texts = [get_content()] if callable(get_content) else [_deep(document, key) for key in ("page_content", "text")]
    return next((text for text in texts if isinstance(text, str)), None)


def _deep(document: Any, key: str) -> Any:
    """Return a value of the document or, if it is a node with a score, of the node."""
    value = value_of(document, key)
    return value_of(value_of(document, "node"), key) if value is None else value
