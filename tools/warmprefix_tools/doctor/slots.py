"""Places of a template that hold other text in each request.

In a prompt that shares well, text gets rarer from front to back. A rare line in front of a widespread one is a slot of
a template: a name, a question, a greeting. Lists are left out, because other checks handle their order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, groupby

from warmprefix.forks import ForkSafeProperty
from warmprefix_tools.doctor.lists import ItemList
from warmprefix_tools.doctor.request_log import EMPTY, TOOLS, LogMessage, Memo, Prompt, RequestLog

__all__ = ["SlotRun", "Slots"]

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


@dataclass
class Slots:
    """Slots of a log, each with text of its user or with anything else."""

    log: RequestLog
    """The log as it was sent."""
    plain: Callable[[LogMessage], LogMessage]
    """Repairs the wording of a message."""
    lists: Callable[[LogMessage], Sequence[ItemList]]
    """Finds the lists in a message."""
    spread: Sequence[int]
    """Number of requests that have each segment of a plain message."""
    owners: Sequence[str | None]
    """User, session or conversation of each request; None if not recorded."""

    def __post_init__(self) -> None:
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
        spread = self.spread
        size = len(spread)
        return [spread[number] if number < size else 0 for number in self.plain(message).ids]

    def _find(self, message: LogMessage, later: int) -> Iterator[SlotRun]:
        """Yield the slots of a message, if the most widespread segment behind it is in `later` requests."""
        spread = self._spread_of(message)
        plain = self.plain(message).ids
        behind = accumulate(reversed(spread), max, initial=later)
        rare = [count * _RARER <= widest for count, widest in zip(reversed(spread), behind, strict=False)]
        rare.reverse()
        for each in self.lists(message):
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
        for request, owner in zip(self.log.requests, self.owners, strict=True):
            for at, run in self.runs(request.messages):
                ids = self.plain(request.messages[at]).ids[run.start : run.end]
                value = ids.tobytes()
                if not values[run.slot][value]:
                    texts[run.slot].append(self.log.pool.text(ids))
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
