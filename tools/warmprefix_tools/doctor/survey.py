"""Facts about a log as it was sent: lists, conversations, and how widespread each text is."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from warmprefix.forks import ForkSafeProperty
from warmprefix_tools.doctor.conversations import Continuation, find_continuations
from warmprefix_tools.doctor.lists import ItemList, ListFinder
from warmprefix_tools.doctor.request_log import EMPTY, WIDTH, LogMessage, Memo, RequestLog, packed
from warmprefix_tools.doctor.slots import Slots
from warmprefix_tools.doctor.text_checks import TEXT_KINDS, Rewriter

__all__ = ["LogSurvey"]

_MEMORY = re.compile(
    r"(?i)memor(?:y|ies)|remember|recall|facts about|kn(?:own (?:facts|about)|ow about)|preferences|profile"
)
_MEMORY_LABEL = re.compile(r"(?i)[\s<\[(#*-]*(?:memor(?:y|ies)|facts?)\b")


class LogSurvey:
    """Views of one log; each is computed at the first need and kept."""

    def __init__(self, log: RequestLog) -> None:
        self.log = log
        self.pool = log.pool
        self.uses: Counter[LogMessage] = Counter()
        """Number of requests that have each message."""
        for request in log.requests:
            self.uses.update(dict.fromkeys(request.messages, 1))
        finder = ListFinder(log.pool)
        finder.learn(self.uses, self._spread({message: message for message in self.uses}), Rewriter(log.pool).rewritten)
        self.lists = finder.lists
        """Returns the lists in a message, or in the one that it was made from."""
        self._rewriter = Rewriter(log.pool, {message: self.lists(message) for message in self.uses})
        self.plain = Memo[LogMessage, LogMessage](lambda message: self.rewritten(message, TEXT_KINDS)).__getitem__
        """Returns a message with every defect of wording repaired."""
        self.key = Memo[LogMessage, bytes](
            lambda message: message.role.encode("utf-8", "surrogatepass") + b"\n" + packed(self.plain(message).ids)
        ).__getitem__
        """Returns a key that is equal for messages of equal text, apart from defects of wording."""
        self.tools_of = Memo[LogMessage, list[Any]](lambda message: json.loads(log.text(message))).__getitem__
        """Returns the tools that a message was made of."""
        self.list_key = Memo(self._list_key).__getitem__
        """Returns a key that is equal for lists in the same place of a prompt: of one style, behind one heading."""
        self._lists_of = Memo[tuple[LogMessage, bool], tuple[ItemList, ...]](
            lambda key: tuple(each for each in self.lists(key[0]) if self._is_memory(each) == key[1])
        )
        self._memory_keys: dict[Hashable, bool] = {}
        self._without_space = Memo[int, int](lambda number: self.pool.intern(self.pool.texts[number].lstrip()))
        self._space = Memo[int, str](lambda number: _space_in_front(self.pool.texts[number]))
        self._spaced = Memo[tuple[str, int], int](
            lambda pair: self.pool.intern(pair[0].lstrip(" \t") + self.pool.texts[pair[1]].lstrip())
        )
        for message in self.uses:
            self.plain(message)

    def rewritten(self, message: LogMessage, kinds: frozenset[str]) -> LogMessage:
        """Return the message with these defects of wording repaired."""
        return message.with_ids(self._rewriter.rewritten(message.ids, kinds))

    def _list_key(self, each: ItemList) -> Hashable:
        heading = self.plain(each.source).ids[each.start - 1] if each.start else None
        if heading is not None and (heading >= len(self.plain_spread) or self.plain_spread[heading] < 2):
            heading = None
        return each.source.role, each.style, heading

    def item_keys(self, each: ItemList) -> list[bytes]:
        """Return the text of each item of a list as a key, apart from defects of wording."""
        ids = self.plain(each.source).ids
        return [
            self._without_space[ids[item.start]].to_bytes(WIDTH, "little") + packed(ids[item.start + 1 : item.end])
            for item in each.items
        ]

    def lists_of(self, message: LogMessage, *, memories: bool) -> tuple[ItemList, ...]:
        """Return the lists of memories in a message, or all others."""
        return self._lists_of[message.source, memories]

    def _is_memory(self, each: ItemList) -> bool:
        """Return whether a list holds memories, by its heading or labels; the first list with a key decides for all."""
        texts = [self.pool.texts[i] for i in each.source.ids[max(each.start - 1, 0) : each.start + 1]]
        named = _MEMORY_LABEL.match(texts[-1]) or (each.start > 0 and _MEMORY.search(texts[0]))
        return self._memory_keys.setdefault(self.list_key(each), bool(named))

    def with_space_of(self, other: int, segment: int) -> int:
        """Return a segment with the line feeds in front of another one in place of its own white space."""
        space = self._space[other]
        return segment if space == self._space[segment] else self._spaced[space, segment]

    @ForkSafeProperty
    def slots(self) -> Slots:
        """Places of templates that hold other text in each request."""
        return Slots(self.log, plain=self.plain, lists=self.lists, spread=self.plain_spread, owners=self.owners)

    @ForkSafeProperty
    def continuations(self) -> list[Continuation | None]:
        """For each request, how it continues an earlier one of its conversation."""
        return find_continuations(self.log.requests, self.key, self._similarity)

    def _similarity(self, old: LogMessage, new: LogMessage) -> float:
        """Return how much of the shorter message the longer one contains."""
        if old.role != new.role:
            return 0.0
        one, other = (set(self.plain(message).ids) - {EMPTY} for message in (old, new))
        return len(one & other) / max(min(len(one), len(other)), 1)

    @ForkSafeProperty
    def roots(self) -> list[int]:
        """For each request, the first one of its conversation."""
        roots: list[int] = []
        for request, continuation in enumerate(self.continuations):
            roots.append(request if continuation is None else roots[continuation.earlier])
        return roots

    @ForkSafeProperty
    def owners(self) -> list[str | None]:
        """For each request, its user, session or conversation; None if unknown."""
        sizes = Counter(self.roots)
        return [
            request.user or request.session or (f"#{root}" if sizes[root] > 1 else None)
            for request, root in zip(self.log.requests, self.roots, strict=True)
        ]

    @ForkSafeProperty
    def plain_spread(self) -> Sequence[int]:
        """Number of requests that have each segment, apart from defects of wording."""
        return self._spread({message: self.plain(message) for message in self.uses})

    def _spread(self, versions: Mapping[LogMessage, LogMessage]) -> Sequence[int]:
        """Count the requests that have each segment, given a version of each message of the log."""
        spread = array("I", bytes(WIDTH * len(self.pool)))
        for message, version in versions.items():
            uses = self.uses[message]
            for segment in set(version.ids):
                spread[segment] += uses
        spread[EMPTY] = 0
        return spread


def _space_in_front(segment: str) -> str:
    return segment[: len(segment) - len(segment.lstrip())]
