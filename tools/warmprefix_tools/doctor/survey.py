"""Facts about a log as it was sent: lists, conversations, how widespread each text is, and slots of templates."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, groupby
from typing import Any

from warmprefix_tools.doctor.conversations import Continuation, find_continuations
from warmprefix_tools.doctor.lists import ItemList, ListFinder
from warmprefix_tools.doctor.request_log import EMPTY, TOOLS, WIDTH, LogMessage, Memo, Prompt, RequestLog, packed
from warmprefix_tools.doctor.text_checks import TEXT_KINDS, CheckedSegments, Rewriter
from warmprefix_tools.fork_safe_property import ForkSafeProperty

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
        checked = CheckedSegments(log.pool)
        finder.learn(self.uses, self._spread({message: message for message in self.uses}), Rewriter(checked).rewritten)
        self.lists = finder.lists
        """Returns the lists in a message, or in the one that it was made from."""
        self._rewriter = Rewriter(checked, {message: self.lists(message) for message in self.uses})
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
        return Slots(self)

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


# -- slots of templates

_RARER = 2
"""A line in a slot is in at most one of this many requests that have the text behind it."""
_DEEPEST = 8
"""Segments of one slot that count as different slots, from its end."""
_PERSONAL = re.compile(
    r"(?i)\b(?:user|username|name|customer|account|client|employee|patient|member|e-?mail|phone|company|profile|"
    r"(?:speak|talk|chat)ing (?:to|with)|assisting|helping|serving|on behalf of|signed in|logged in|hello|hi|dear)\b"
)
_PROPER = re.compile(r"(?<=[\w,:>] )[A-Z][a-z]+|@\w")
_MOST_VALUES = 1.3
"""Different texts that one person's requests have in one slot, on average."""


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Segments `start` to `end` of a message, which stand in one slot or in one part of it."""

    start: int
    end: int
    slot: Hashable
    near: bool
    """True if later messages hold nothing more widespread: then the text may move to the end of its own message."""


class Slots:
    """Places of a template that hold other text in each request, of its user or anything else.

    In a prompt that shares well, text gets rarer from front to back. A rare line in front of a widespread one is a slot
    of a template: a name, a question, a greeting. Lists are left out, because another repair handles their order.
    """

    def __init__(self, survey: LogSurvey) -> None:
        self._survey = survey
        self._runs = Memo[tuple[LogMessage, int], tuple[SlotRun, ...]](lambda key: tuple(self._find(*key)))
        self._widest = Memo[LogMessage, int](lambda message: max(self._spread_of(message), default=0))

    def runs(self, prompt: Prompt) -> Iterator[tuple[int, SlotRun]]:
        """Yield message index and run, for the messages up to the first answer; last message first."""
        answers = ("assistant", "tool", "function")
        head = next((i for i, message in enumerate(prompt) if message.role in answers), len(prompt))
        later = 0
        for at in range(head - 1, -1, -1):
            message = prompt[at].source
            if message.role != TOOLS:
                for run in self._runs[message, later]:
                    yield at, run
                later = max(later, self._widest[message])

    def is_personal(self, slot: Hashable) -> bool:
        """Return whether the text in a slot depends on the user or the conversation, not on the request."""
        return self.personal.get(slot, False)

    def _spread_of(self, message: LogMessage) -> list[int]:
        """Return for each segment of a message the number of requests that have it."""
        spread = self._survey.plain_spread
        size = len(spread)
        return [spread[number] if number < size else 0 for number in self._survey.plain(message).ids]

    def _find(self, message: LogMessage, later: int) -> Iterator[SlotRun]:
        """Yield the slots of a message, if the most widespread segment behind it is in `later` requests."""
        spread = self._spread_of(message)
        plain = self._survey.plain(message).ids
        behind = accumulate(reversed(spread), max, initial=later)
        rare = [count * _RARER <= widest for count, widest in zip(reversed(spread), behind, strict=False)]
        rare.reverse()
        for each in self._survey.lists(message):
            rare[each.start : each.end] = [False] * (each.end - each.start)
        places = (at for at in compress(range(len(rare)), rare) if plain[at] != EMPTY)
        for _, group in groupby(enumerate(places), lambda found: found[1] - found[0]):
            run = [at for _, at in group]  # consecutive places: their distance to the count is the same
            end = run[-1] + 1
            anchor = plain[end] if end < len(plain) else -1
            for at in run:
                near = later < _RARER * spread[at]
                yield SlotRun(at, at + 1, (message.role, anchor, min(end - at, _DEEPEST)), near)

    @ForkSafeProperty
    def personal(self) -> dict[Hashable, bool]:
        """For each slot of the log, whether its text is personal."""
        values: dict[Hashable, Counter[bytes]] = defaultdict(Counter)
        of_owner: dict[Hashable, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        owned: Counter[Hashable] = Counter()
        texts: dict[Hashable, list[str]] = defaultdict(list)
        for request, owner in zip(self._survey.log.requests, self._survey.owners, strict=True):
            for at, run in self.runs(request.messages):
                ids = self._survey.plain(request.messages[at]).ids[run.start : run.end]
                value = ids.tobytes()
                if not values[run.slot][value]:
                    texts[run.slot].append(self._survey.pool.text(ids))
                values[run.slot][value] += 1
                if owner is not None:
                    of_owner[run.slot][owner].add(value)
                    owned[run.slot] += 1
        return {
            slot: _depends_on_owner(of_owner[slot], owned[slot], count) or _names_someone(texts[slot])
            for slot, count in values.items()
        }


def _depends_on_owner(of_owner: dict[str, set[bytes]], requests: int, values: Counter[bytes]) -> bool:
    owners = len(of_owner)
    if owners < 2 or len(values) < 2 or requests < max(1.5 * owners, sum(values.values()) / 2):
        return False
    return sum(map(len, of_owner.values())) <= _MOST_VALUES * owners


def _names_someone(texts: list[str]) -> bool:
    """Return whether most texts mention a person by name."""
    some = texts[:50]
    return sum(bool(_PERSONAL.search(text) and _PROPER.search(text)) for text in some) * 2 > len(some)
