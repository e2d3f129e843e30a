"""Defects of wording as tables: from each segment to the one without the defect."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from warmprefix_tools.doctor.checks.base import TextCheck
from warmprefix_tools.doctor.layout import ItemList
from warmprefix_tools.doctor.prompts import Message
from warmprefix_tools.doctor.segments import Ids, PerSegment, SegmentPool

__all__ = ["Wording"]

_INSIDE, _OUTSIDE, _HEADER = 1, 2, 4
_WANTED = {"inside": _INSIDE, "outside": _OUTSIDE, "headers": _HEADER, "everywhere": _INSIDE | _OUTSIDE | _HEADER}

_TELLING = re.compile(r"[^ -/:-~]")


@dataclass(slots=True)
class _Table:
    """What becomes of the segments below `size`: `changed` holds the new numbers of those that do not stay."""

    size: int = 0
    changed: dict[int, int] = field(default_factory=dict)


class Wording:
    """What each text check makes of each segment. A segment is rewritten once, however often it occurs."""

    def __init__(self, pool: SegmentPool, checks: Sequence[TextCheck]) -> None:
        self._pool = pool
        self._checks = checks
        self.all_kinds = frozenset(check.kind for check in checks)
        self._flags = bytearray()
        self._unseen = _INSIDE | _OUTSIDE
        """What a segment counts as that no message of the log has; all of them until `learn`."""
        self._tables = {check.kind: _Table() for check in checks}
        self._fused: dict[frozenset[str], _Table] = {}
        self._telling = PerSegment(pool.texts, _is_telling)
        self._braces = PerSegment(pool.texts, lambda text: '{"' in text or text.endswith("{"))
        self._learned = len(pool)

    def learn(self, lists: Mapping[Message, Sequence[ItemList]]) -> None:
        """Note which segments stand in list items, which open one, and which stand elsewhere.

        Until then all count as standing both inside and outside of lists.
        """
        flags = bytearray(len(self._pool))
        for message, found in lists.items():
            ids = message.ids
            end = 0
            for each in found:
                for number in ids[end : each.start]:
                    flags[number] |= _OUTSIDE
                for number in ids[each.start : each.end]:
                    flags[number] |= _INSIDE
                for item in each.items:
                    flags[ids[item.start]] |= _HEADER
                end = max(end, each.end)
            for number in ids[end:]:
                flags[number] |= _OUTSIDE
        flags = flags.replace(b"\0", bytes([_OUTSIDE]))  # what the checks made, so far
        self._flags = flags
        self._unseen = _OUTSIDE
        self._fused.clear()
        listed = bytearray(map(_INSIDE.__and__, flags))
        for check in self._checks:
            table = self._tables[check.kind]
            if check.part == "headers":
                reach = compress(range(table.size), listed)
                self._rewrite(check, [number for number in reach if self._flag(number) & _HEADER], table)
            elif check.part != "everywhere":  # done everywhere so far: undo what should not have been
                self._rewrite(check, sorted(table.changed), table)
            moved = sorted(number for number in table.changed if number < len(listed) and listed[number])
            for number in moved:
                self._inherit(table.changed[number], number)
            for number in moved:
                made = table.changed[number]
                listed.extend(bytes(max(made + 1 - len(listed), 0)))
                listed[made] = True

    def mended(self, ids: Ids, kinds: frozenset[str]) -> Ids:
        """Return the segments without these defects."""
        table = self._fused.get(kinds)
        if table is None or (table.size < len(self._pool) and len(ids) and max(ids) >= table.size):
            table = self._table(kinds)
        changed = table.changed
        if changed.keys().isdisjoint(ids):
            return ids
        numbers = ids.tolist()
        return array("I", list(map(changed.get, numbers, numbers)))

    def merges(self, kind: str) -> bool:
        """Return whether any two segments that differ now are equal without the defect."""
        (check,) = (check for check in self._checks if check.kind == kind)
        others = self._table(self.all_kinds - {kind}).changed
        moved = self._grown(check).changed
        made_by_others = {made for number, made in others.items() if number < self._learned}

        def exists(number: int) -> bool:
            return (number < self._learned and number not in others) or number in made_by_others

        made = Counter(target for number, target in moved.items() if exists(number))
        return any(count > 1 or (target not in moved and exists(target)) for target, count in made.items())

    def braces(self, ids: Ids) -> bool:
        """Return whether a JSON object could begin in a text of these segments."""
        return any(map(self._braces().__getitem__, ids))

    def _table(self, kinds: frozenset[str]) -> _Table:
        """Return what each segment is without these defects."""
        size = len(self._pool)
        tables = [self._grown(check).changed for check in self._checks if check.kind in kinds]
        fused: dict[int, int] = {}
        for number in set().union(*tables):
            made = number
            for changed in tables:
                made = changed.get(made, made)
            if made != number:
                fused[number] = made
        table = self._fused[kinds] = _Table(size, fused)
        return table

    def _grown(self, check: TextCheck) -> _Table:
        """Return the check's own table, for all segments that there are."""
        table = self._tables[check.kind]
        while (done := table.size) < len(self._pool):
            table.size = len(self._pool)
            new = self._telling()[done : table.size]
            self._rewrite(check, compress(range(done, table.size), new), table)
        return table

    def _rewrite(self, check: TextCheck, numbers: Iterable[int], table: _Table) -> None:
        """Set the table's entries for these segments."""
        texts, intern, wanted = self._pool.texts, self._pool.intern, _WANTED[check.part]
        for number in numbers:
            text = texts[number]
            rewrite = check.rewrite if self._flag(number) & wanted else check.elsewhere
            rewritten = rewrite(text) if text and rewrite is not None else text
            if rewritten == text:
                table.changed.pop(number, None)
            else:
                made = table.changed[number] = intern(rewritten)
                self._inherit(made, number)

    def _flag(self, number: int) -> int:
        return self._flags[number] if number < len(self._flags) else self._unseen

    def _inherit(self, made: int, number: int) -> None:
        flag, size = self._flag(number), len(self._flags)
        if made >= size:
            self._flags.extend(bytes([self._unseen]) * max(made + 1 - size, size))
            self._flags[made] = flag
        else:
            self._flags[made] |= flag


def _is_telling(segment: str) -> bool:
    """Whether there is anything in it that a check could be about; in most segments, there is not."""
    return bool(segment) and (
        _TELLING.search(segment, segment[0] in " \n") is not None
        or "  " in segment
        or "day" in segment
        or "ago" in segment
        or "now" in segment
        or segment[-1] in " \n"
    )
