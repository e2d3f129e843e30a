"""Places of a template where each request has something else.

In a prompt that shares well, text gets rarer from front to back. A rare line in front of a widespread one is a slot of
a template: a name, a question, a greeting. Lists are left out; their order is another matter.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, compress, groupby
from typing import TYPE_CHECKING

from warmprefix_tools.doctor.prompts import TOOLS, Message
from warmprefix_tools.doctor.segments import EMPTY

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["Run", "Slots"]

_RARER = 2
"""A line in a slot is in at most one of so many of the requests that have what comes later."""
_DEEPEST = 8
"""Segments of one slot that are told apart, counted from its end."""
_PERSONAL = re.compile(
    r"(?i)\b(?:user|username|name|customer|account|client|employee|patient|member|e-?mail|phone|company|profile|"
    r"(?:speak|talk|chat)ing (?:to|with)|assisting|helping|serving|on behalf of|signed in|logged in|hello|hi|dear)\b"
)
_PROPER = re.compile(r"(?<=[\w,:>] )[A-Z][a-z]+|@\w")
_MOST_VALUES = 1.3
"""Different texts that one person's requests have in one slot, on average."""


@dataclass(frozen=True, slots=True)
class Run:
    """Segments `start` to `end` of a message, which stand in one slot, or one part of it."""

    start: int
    end: int
    slot: Hashable
    near: bool
    """Nothing that is more widespread follows in later messages: the end of its own message would do for it."""


@dataclass(slots=True)
class Slots:
    """The slots of a log, each with what it holds: text of its user, or anything else."""

    survey: Survey
    _runs: dict[tuple[Message, int], tuple[Run, ...]] = field(default_factory=dict)
    _personal: dict[Hashable, bool] | None = None
    _widest_of: dict[Message, int] = field(default_factory=dict)

    def runs(self, prompt: tuple[Message, ...]) -> Iterator[tuple[int, Run]]:
        """Message index and run, for the messages up to the first answer; last message first."""
        head = next(
            (i for i, message in enumerate(prompt) if message.role in ("assistant", "tool", "function")), len(prompt)
        )
        later = 0
        for at in range(head - 1, -1, -1):
            message = prompt[at].source
            if message.role == TOOLS:
                continue
            key = (message, later)
            if key not in self._runs:
                self._runs[key] = tuple(self._found(message, later))
            for run in self._runs[key]:
                yield at, run
            later = max(later, self._widest(message))

    def is_personal(self, slot: Hashable) -> bool:
        """Whether a slot holds what goes with the user or the conversation, and not with the request."""
        if self._personal is None:
            self._personal = self._classified()
        return self._personal.get(slot, False)

    def _widest(self, message: Message) -> int:
        widest = self._widest_of.get(message)
        if widest is None:
            widest = self._widest_of[message] = max(self._spread(message), default=0)
        return widest

    def _spread(self, message: Message) -> list[int]:
        """Return for each segment of a message the number of requests that have it."""
        spread = self.survey.plain_spread
        size = len(spread)
        return [spread[number] if number < size else 0 for number in self.survey.plain(message).ids]

    def _found(self, message: Message, later: int) -> Iterator[Run]:
        spread = self._spread(message)
        plain = self.survey.plain(message).ids
        behind = accumulate(reversed(spread), max, initial=later)
        rare = [count * _RARER <= widest for count, widest in zip(reversed(spread), behind, strict=False)]
        rare.reverse()
        for each in self.survey.lists(message):
            rare[each.start : each.end] = [False] * (each.end - each.start)
        places = (at for at in compress(range(len(rare)), rare) if plain[at] != EMPTY)
        for _, group in groupby(enumerate(places), lambda found: found[1] - found[0]):
            run = [at for _, at in group]  # places that follow one another
            end = run[-1] + 1
            anchor = plain[end] if end < len(plain) else -1
            for at in run:
                near = later < _RARER * spread[at]
                yield Run(at, at + 1, (message.role, anchor, min(end - at, _DEEPEST)), near)

    def _classified(self) -> dict[Hashable, bool]:
        survey = self.survey
        values: dict[Hashable, Counter[bytes]] = defaultdict(Counter)
        of_owner: dict[Hashable, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        owned: Counter[Hashable] = Counter()
        texts: dict[Hashable, list[str]] = defaultdict(list)
        for request, owner in zip(survey.log.requests, survey.owners, strict=True):
            for at, run in self.runs(request.messages):
                ids = survey.plain(request.messages[at]).ids[run.start : run.end]
                value = ids.tobytes()
                if not values[run.slot][value]:
                    texts[run.slot].append(survey.pool.text(ids))
                values[run.slot][value] += 1
                if owner is not None:
                    of_owner[run.slot][owner].add(value)
                    owned[run.slot] += 1
        return {
            slot: _goes_with_owner(of_owner[slot], owned[slot], count) or _reads_personal(texts[slot])
            for slot, count in values.items()
        }


def _goes_with_owner(of_owner: dict[str, set[bytes]], requests: int, values: Counter[bytes]) -> bool:
    owners = len(of_owner)
    if owners < 2 or len(values) < 2 or requests < max(1.5 * owners, sum(values.values()) / 2):
        return False
    return sum(map(len, of_owner.values())) <= _MOST_VALUES * owners


def _reads_personal(texts: list[str]) -> bool:
    """Whether the texts speak of somebody, by name."""
    some = texts[:50]
    return sum(bool(_PERSONAL.search(text) and _PROPER.search(text)) for text in some) * 2 > len(some)
