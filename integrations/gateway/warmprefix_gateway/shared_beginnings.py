"""Beginnings of requests that sessions send again and again: each is read, named and rewritten once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from warmprefix.fair_lru import FairLru
from warmprefix_gateway.sessions import PromptParts, front_parts
from warmprefix_requests import StoredHistory
from warmprefix_requests.beginnings import NOTHING, Beginning, ReadBody, lengthened, read_body
from warmprefix_requests.prompts import Path, RewriteRoute, canonical_messages
from warmprefix_requests.repeats import Rewriting, Rewritten, rewrite
from warmprefix_requests.splicing import spliced

__all__ = ["GrownRequest", "SharedBeginning", "SharedBeginnings"]

_LATEST = 4
"""Messages at the end that may come again in another form: clients move cache marks, and replace the last message."""
_STEP = 8_192
"""Bytes; a shorter beginning is read again."""
_SAMPLE = 32
_BYTES_PER_PART = 600
_LARGEST_SHARE = 4
"""One beginning may take this part of the memory for all."""


class SharedBeginning(NamedTuple):
    """The beginning of a request, and what was found in it. Immutable."""

    read: Beginning
    parts: PromptParts
    sent: tuple[bytes, ...]
    """What went out for it, in pieces."""
    texts: Mapping[Path, str]
    """The new texts in that, such as references."""
    rewriting: Rewriting | None
    """How they were made; never changed, only copied."""

    @property
    def size(self) -> int:
        """Bytes in memory, as an upper bound."""
        texts = sum([4 * len(text) for text in self.texts.values()])
        rewriting = 0 if self.rewriting is None else self.rewriting.size
        sent = sum(map(len, self.sent))
        return self.read.size + sent + texts + _BYTES_PER_PART * len(self.parts.digests) + rewriting


class GrownRequest:
    """A request of which a beginning may be known. For one thread at a time."""

    def __init__(self, route: str, content: bytes, read: ReadBody, known: SharedBeginning) -> None:
        self.body = read.body
        """The body, as `json.loads` returns it."""
        self.new_body = read.new
        """The body without the messages that are known."""
        self._content, self._read, self._known = content, read, known
        first = len(read.known.items)
        self._items = max(len(read.body[read.name]) - _LATEST, first)
        parts = front_parts(read.body)
        if known.parts.digests[0] == parts.digests[0]:
            parts = known.parts
        else:
            first = 0
        self._parts = parts.followed_by(canonical_messages(route, read.body, first, self._items))
        self.parts = self._parts.followed_by(canonical_messages(route, read.body, self._items))
        """What `prompt_parts` returns for the body."""
        self._sent: tuple[tuple[bytes, ...], Mapping[Path, str]] | None = None
        self._rewriting: Rewriting | None = None
        self._is_refuted = False

    @classmethod
    def read(cls, route: str | None, content: bytes, known: SharedBeginning, *, strictly: bool) -> GrownRequest | None:
        """Read a request; return None if it is small, or must be read in another way. O(bytes that are not known)."""
        if len(content) < _STEP or route in (None, "completions"):
            return None
        assert route is not None
        read = read_body(route, content, known.read, strictly=strictly)
        return None if read is None else cls(route, content, read, known)

    def rewritten(
        self,
        route: RewriteRoute,
        body: Mapping[str, Any],
        *,
        check: Callable[[], object] | None,
        earlier: StoredHistory | None,
        **options: Any,
    ) -> Rewritten:
        """Return what `rewrite` returns; of the request's own body, only new messages are looked at."""
        known = self._known.rewriting
        begun = Rewriting(route, body, None, **options) if known is None else known.copy()
        if body is not self.body or earlier is not None or begun.leaves(body):
            return rewrite(route, body, check=check, earlier=earlier, **options)
        begun.read(body, self._items, check)
        self._rewriting, whole = begun, begun.copy()
        whole.read(body, None, check)
        return whole.rewritten(body)

    def spliced(self, content: bytes, texts: Mapping[Path, str]) -> bytes:
        """Return what `spliced` returns; of the request's own content, the known beginning is not read again."""
        first = len(self._read.known.items)
        old = {path: text for path, text in texts.items() if path[1] < first}  # type: ignore[operator]
        if content is not self._content or old != self._known.texts:
            self._is_refuted = content is self._content
            return spliced(content, texts)
        new = {path: text for path, text in texts.items() if path not in old}
        front, rest = self._read.spliced(new, self._items)
        begun = {path: text for path, text in texts.items() if path[1] < self._items}  # type: ignore[operator]
        self._sent = lengthened(self._known.sent, front), begun
        return b"".join((*self._known.sent, front, rest))

    def beginning(self) -> SharedBeginning | None:
        """Return the beginning for the next request; None if there is none. O(bytes)."""
        if self._is_refuted or not self._items:
            return None
        if self._items == len(self._read.known.items):
            return self._known
        read = self._read.beginning(self._items)
        sent, texts = self._sent or (read.pieces, {})
        return SharedBeginning(read, self._parts, sent, texts, self._rewriting)


_Key = tuple[str | None, str, int]


class SharedBeginnings:
    """Beginnings of the latest requests, each for its tenant alone, in fair shares of the memory. Not thread-safe.

    A beginning is found by some of its bytes, and used only where all of them are the same.

    Args:
        max_bytes: Memory for all of them.
    """

    none = SharedBeginning(NOTHING, PromptParts((b"",), (0,), (0,), "", 1, ()), (), {}, None)
    """What is known of a request that begins like no other."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: FairLru[_Key, SharedBeginning] = FairLru()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def size(self) -> int:
        """Bytes of all beginnings."""
        return self._known.size

    def find(self, tenant: str | None, kind: str, content: bytes) -> tuple[Sequence[_Key], SharedBeginning]:
        """Return the keys for beginnings of a request of this kind, and the longest known one. O(bytes)."""
        keys = [(tenant, kind, number) for number in _sampled(content)]
        for key in reversed(keys):
            known = self._known.get(key)
            if known is not None and known.read.begins(content):
                self._known.use(key)
                return keys, known
        return keys, self.none

    def keep(self, keys: Sequence[_Key], known: SharedBeginning, new: SharedBeginning | None) -> None:
        """Keep the beginning of the request with these keys in place of the one that was known."""
        if known is not self.none and known is not new:
            self._known.pop(keys[known.read.length // _STEP - 1])
        if new is None or new.read.length < _STEP or (size := new.size) > self._max_bytes // _LARGEST_SHARE:
            return
        key = keys[new.read.length // _STEP - 1]
        self._known.put(key, new, key[0], size)
        while self._known.size > self._max_bytes:
            self._known.evict()


def _sampled(content: bytes) -> list[int]:
    """Return a number for each beginning of so many whole steps: of the first one, and of samples of the others."""
    numbers = [hash(content[:_STEP])]
    for end in range(2 * _STEP, len(content) + 1, _STEP):
        numbers.append(hash((numbers[-1], content[end - _SAMPLE : end])))
    return numbers
