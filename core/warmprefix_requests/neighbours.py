"""Lists of texts with metadata: neighbours in one source, pinned texts, and items that keep their places.

For plugins, which turn an application's documents into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from warmprefix.blocks import Pin

__all__ = ["PinRule", "SourcePlace", "neighbours", "pin_of", "with_kept_places"]

T = TypeVar("T")

PinRule = str | Callable[[T], Pin | None]
"""Where items are pinned: the metadata key of `"start"` or `"end"`, or a function that returns one of them or None."""

_SOURCE_KEYS = ("source", "file_path", "doc_id", "document_id", "url")
_PAGE_KEYS = ("page", "page_number", "page_label")

_MOST_GAP = 16
"""Most characters between two neighbours: white space that a splitter has stripped."""


class SourcePlace(NamedTuple):
    """The place of a text in its source; fields are None where nothing names them."""

    source: Hashable = None
    """A name of the source."""
    start: int | None = None
    """Offset of the first character, on its page if it has one."""
    end: int | None = None
    """Offset behind the last character."""
    page: int | None = None

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any], characters: int) -> SourcePlace:
        """Read the place of a text with this length from metadata under the usual keys."""
        source = next((value for key in _SOURCE_KEYS if (value := metadata.get(key)) is not None), None)
        start = _whole_number(metadata.get("start_index"))
        page = next((page for key in _PAGE_KEYS if (page := _whole_number(metadata.get(key))) is not None), None)
        end = None if start is None else start + characters
        return cls(source if isinstance(source, Hashable) else None, start, end, page)

    def continues(self, before: SourcePlace) -> bool:
        """Return True if the text begins where the one before ends, or overlaps its end, or is on the next page."""
        if self.source is None or self.source != before.source:
            return False
        if self.page != before.page:
            is_next = self.page is not None and before.page is not None and self.page == before.page + 1
            return is_next and (self.start is None or self.start <= _MOST_GAP)
        if self.start is None or before.start is None or before.end is None:
            return False
        return before.start < self.start <= before.end + _MOST_GAP


def neighbours(items: Sequence[T], texts: Sequence[str], continues: Callable[[T, T], bool]) -> list[int | None]:
    """Return for each item the one before it that its text follows in their source, if that stands directly before.

    Items without text, such as pictures, do not divide neighbours. O(items).

    Args:
        items: In the caller's order.
        texts: The text of each.
        continues: Returns True if the first item directly follows the second one in its source.
    """
    found: list[int | None] = []
    last: int | None = None
    """The last item with a text."""
    is_linked = True
    """True if each item behind it follows the one before."""
    for i, item in enumerate(items):
        if last is not None:
            # A picture may name both of its neighbours, or the two texts may name each other.
            is_linked = is_linked and continues(item, items[i - 1])
            follows = is_linked or continues(item, items[last])
        else:
            follows = False
        has_text = bool(texts[i].strip())
        found.append(last if has_text and follows and texts[i] != texts[last or 0] else None)
        if has_text:
            last, is_linked = i, True
    return found


def pin_of(rule: PinRule[T] | None, item: T, metadata: Mapping[str, Any]) -> Pin | None:
    """Return where an item is pinned. Other values under a metadata key have no effect."""
    if not isinstance(rule, str):
        return None if rule is None else rule(item)
    value = metadata.get(rule)
    return value if value == "start" or value == "end" else None


def with_kept_places(order: Sequence[int], kept: Iterable[int]) -> list[int]:
    """Return an order of a list's items with others at their own places in the list, which `kept` has ascending.

    >>> with_kept_places([3, 0, 2], [1])
    [3, 1, 0, 2]
    """
    placed = list(order)
    for place in kept:
        placed.insert(place, place)
    return placed


def _whole_number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:18])
    return value if isinstance(value, int) and not isinstance(value, bool) else None
