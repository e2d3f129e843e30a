"""What blocks are called in a trace."""

from __future__ import annotations

import re
from collections import OrderedDict

from warmprefix.blocks import ContextBlock
from warmprefix.traces.format import MAX_TRACE_TOKENS

__all__ = ["BlockNames"]

_MAX_ID = 256
_MADE_UP = re.compile(r"[0-9a-f]{32}~\d+")


class BlockNames:
    """One name a text, and one text and one length a name, however many blocks come. Not thread-safe.

    The first id that comes with a text names it, unless that id names another text or is no name: empty, longer than
    256 characters, not encodable as UTF-8, or the text itself. Then, and without an id, the fingerprint does. That
    holds for the first `max_blocks` texts, which are remembered for good. Any other is named by fingerprint and
    length, so that it has the same name and length whenever it comes back, though it was forgotten meanwhile.

    >>> names = BlockNames(max_blocks=100)
    >>> names.name(ContextBlock("The sky is blue.", id="sky"))
    ('sky', 4)
    >>> names.name(ContextBlock("The sky is blue.", id="ciel"))
    ('sky', None)
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._names: dict[bytes, str] = {}
        self._owners: dict[str, bytes] = {}
        self._declared_lately: OrderedDict[str, None] = OrderedDict()

    def name(self, block: ContextBlock) -> tuple[str, int | None]:
        """The block's name, and its length in tokens if that has to be declared first, and None otherwise. O(1)."""
        name = self._names.get(block.fingerprint)
        if name is not None:
            return name, None
        tokens = min(block.tokens, MAX_TRACE_TOKENS)
        if len(self._names) < self._max_blocks:
            for name in _candidates(block):
                if name not in self._owners:
                    self._names[block.fingerprint] = name
                    self._owners[name] = block.fingerprint
                    return name, tokens
        name = f"{block.fingerprint.hex()}~{tokens}"
        known = name in self._declared_lately
        self._declared_lately[name] = None
        self._declared_lately.move_to_end(name)
        if len(self._declared_lately) > self._max_blocks:
            self._declared_lately.popitem(last=False)
        return name, None if known else tokens


def _candidates(block: ContextBlock) -> list[str]:
    fingerprint = block.fingerprint.hex()
    return [block.id, fingerprint] if block.id is not None and _is_a_name(block.id, block.text) else [fingerprint]


def _is_a_name(id: str, text: str) -> bool:
    if not 0 < len(id) <= _MAX_ID or id == text or _MADE_UP.fullmatch(id):
        return False
    try:
        id.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
