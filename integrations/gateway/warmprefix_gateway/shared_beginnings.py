"""Beginnings of requests that sessions send again and again: each is read, named and rewritten once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from warmprefix.fair_lru import FairLru
from warmprefix_gateway.sessions import PromptParts, front_parts
from warmprefix_requests import StoredHistory, with_references
from warmprefix_requests.beginnings import NOTHING, Beginning, ReadBody, read_body
from warmprefix_requests.outgoing import Processor
from warmprefix_requests.prompts import Path, RewriteRoute, canonical_messages
from warmprefix_requests.repeats import KnownResults, Rewritten, known_results, rewrite, rewrite_behind
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
    sent: bytes
    """What went out for it."""
    texts: Mapping[Path, str]
    """The new texts in that, such as references."""
    results: KnownResults | None

    @property
    def size(self) -> int:
        """Bytes in memory, as an upper bound."""
        texts = sum([4 * len(text) for text in self.texts.values()])
        return self.read.size + len(self.sent) + texts + _BYTES_PER_PART * len(self.parts.digests)


class GrownRequest:
    """A request of which a beginning may be known. For one thread at a time."""

    def __init__(self, route: str, content: bytes, read: ReadBody, known: SharedBeginning | None) -> None:
        self.body = read.body
        """The body, as `json.loads` returns it."""
        self.new_body = read.new
        """The body without the messages that are known."""
        self._content, self._read, self._known = content, read, known
        first = len(read.known.items)
        self._items = max(len(read.body[read.name]) - _LATEST, first)
        parts = front_parts(read.body)
        if known is not None and known.parts.digests[0] == parts.digests[0]:
            parts = known.parts
        else:
            first = 0
        self._parts = parts.followed_by(canonical_messages(route, read.body, first, self._items))
        self.parts = self._parts.followed_by(canonical_messages(route, read.body, self._items))
        """What `prompt_parts` returns for the body."""
        self._sent: tuple[bytes, Mapping[Path, str]] | None = None
        self._results: KnownResults | None = None
        self._is_refuted = False

    @classmethod
    def read(
        cls, route: str | None, content: bytes, known: SharedBeginning | None, *, strictly: bool
    ) -> GrownRequest | None:
        """Read a request; return None if it is small, or must be read in another way. O(bytes that are not known)."""
        if len(content) < _STEP or route in (None, "completions"):
            return None
        assert route is not None
        read = read_body(route, content, NOTHING if known is None else known.read, strictly=strictly)
        return None if read is None else cls(route, content, read, known)

    def with_references(
        self,
        keep_tools: Collection[str],
        check: Callable[[], object] | None,
        earlier: StoredHistory | None,
        *,
        passages: bool,
    ) -> Processor:
        """Return a processor as `with_references` does. With `passages`, it looks at all results."""
        rewriting = rewrite if passages else self.rewritten
        return with_references(keep_tools, check, earlier, self.spliced, rewriting, passages=passages)

    def rewritten(
        self, route: RewriteRoute, body: Mapping[str, Any], *, earlier: StoredHistory | None = None, **options: Any
    ) -> Rewritten:
        """Return what `rewrite` returns; of the request's own body, only new results are looked at if all are new."""
        if body is not self.body or earlier is not None:
            return rewrite(route, body, earlier=earlier, **options)
        known, first = None if self._known is None else self._known.results, len(self._read.known.items)
        made = rewrite_behind(route, body, known, first) or rewrite(route, body, **options)
        self._results = known_results(route, body, made, known, first, self._items)
        return made

    def spliced(self, content: bytes, texts: Mapping[Path, str]) -> bytes:
        """Return what `spliced` returns; of the request's own content, the known beginning is not read again."""
        first = len(self._read.known.items)
        old = {path: text for path, text in texts.items() if path[1] < first}  # type: ignore[operator]
        sent, sent_texts = (b"", {}) if self._known is None else (self._known.sent, self._known.texts)
        if content is not self._content or old != sent_texts:
            self._is_refuted = content is self._content
            return spliced(content, texts)
        new = {path: text for path, text in texts.items() if path not in old}
        front, rest = self._read.spliced(new, self._items)
        begun = sent + front
        self._sent = begun, {path: text for path, text in texts.items() if path[1] < self._items}  # type: ignore[operator]
        return begun + rest

    def beginning(self) -> SharedBeginning | None:
        """Return the beginning for the next request; None if there is none. O(bytes)."""
        if self._is_refuted or not self._items:
            return None
        if self._items == len(self._read.known.items):
            return self._known
        read = self._read.beginning(self._items)
        sent, texts = self._sent or (read.content, {})
        return SharedBeginning(read, self._parts, sent, texts, self._results)


class SharedBeginnings:
    """Beginnings of the latest requests, each for its tenant alone, in fair shares of the memory. Not thread-safe.

    A beginning is found by some of its bytes, and used only where all of them are the same.

    Args:
        max_bytes: Memory for all of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: FairLru[tuple[str | None, str, int], SharedBeginning] = FairLru()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def size(self) -> int:
        """Bytes of all beginnings."""
        return self._known.size

    def find(self, tenant: str | None, kind: str, content: bytes) -> SharedBeginning | None:
        """Return the longest beginning of a request of this kind. O(bytes)."""
        for number in reversed(_sampled(content)):
            known = self._known.get((tenant, kind, number))
            if known is not None and content.startswith(known.read.content):
                return self._known.use((tenant, kind, number))
        return None

    def keep(self, tenant: str | None, kind: str, known: SharedBeginning | None, new: SharedBeginning | None) -> None:
        """Keep a request's beginning in place of the one that was known."""
        if known is not None and known is not new:
            self._known.pop((tenant, kind, _sampled(known.read.content)[-1]))
        if new is None or len(new.read.content) < _STEP or (size := new.size) > self._max_bytes // _LARGEST_SHARE:
            return
        self._known.put((tenant, kind, _sampled(new.read.content)[-1]), new, tenant, size)
        while self._known.size > self._max_bytes:
            self._known.evict()


def _sampled(content: bytes) -> list[int]:
    """Return a number for each beginning of so many whole steps: of the first one, and of samples of the others."""
    numbers = [hash(content[:_STEP])]
    for end in range(2 * _STEP, len(content) + 1, _STEP):
        numbers.append(hash((numbers[-1], content[end - _SAMPLE : end])))
    return numbers
