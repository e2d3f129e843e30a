"""Repairs of wording as tables: from each segment to the one without the defect."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from warmprefix_tools.doctor.lists import ItemList
from warmprefix_tools.doctor.request_log import LogMessage
from warmprefix_tools.doctor.segments import Ids, PerSegment, SegmentPool
from warmprefix_tools.doctor.text_checks import TEXT_CHECKS, TextCheck

__all__ = ["TEXT_KINDS", "Rewriter"]

TEXT_KINDS = frozenset(check.kind for check in TEXT_CHECKS)

_INSIDE, _OUTSIDE, _HEADER = 1, 2, 4
_PARTS = {"inside": _INSIDE, "outside": _OUTSIDE, "headers": _HEADER, "everywhere": _INSIDE | _OUTSIDE | _HEADER}

_SUSPECT = re.compile(r"[^ -/:-~]")


@dataclass(slots=True)
class _RewriteTable:
    """New numbers of the segments below `size`; a segment that stays as it is has no entry in `changed`."""

    size: int = 0
    changed: dict[int, int] = field(default_factory=dict)


class Rewriter:
    """Results of the text checks per segment. A segment is rewritten once, however often it occurs."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._flags = bytearray()
        self._default_flags = _INSIDE | _OUTSIDE
        """Flags of a segment that no message of the log has; of all segments until `use_lists`."""
        self._tables = {check.kind: _RewriteTable() for check in TEXT_CHECKS}
        self._fused: dict[frozenset[str], _RewriteTable] = {}
        self._suspect = PerSegment(pool.texts, _is_suspect)
        self._log_size = len(pool)

    def use_lists(self, lists: Mapping[LogMessage, Sequence[ItemList]]) -> None:
        """Note which segments stand in list items, which open one, and which stand elsewhere.

        Before this call, all segments count as standing both inside and outside of lists.
        """
        self._flags = flags = self._flags_of(lists)
        self._default_flags = _OUTSIDE
        self._fused.clear()
        listed = bytearray(map(_INSIDE.__and__, flags))
        for check in TEXT_CHECKS:
            table = self._tables[check.kind]
            if check.part == "headers":
                reach = compress(range(table.size), listed)
                self._rewrite(check, [number for number in reach if self._flag(number) & _HEADER], table)
            elif check.part != "everywhere":  # it was applied everywhere so far: undo it outside of its part
                self._rewrite(check, sorted(table.changed), table)
            moved = sorted(number for number in table.changed if number < len(listed) and listed[number])
            for number in moved:
                self._inherit(table.changed[number], number)
            for number in moved:
                made = table.changed[number]
                listed.extend(bytes(max(made + 1 - len(listed), 0)))
                listed[made] = True

    def _flags_of(self, lists: Mapping[LogMessage, Sequence[ItemList]]) -> bytearray:
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
        return flags.replace(b"\0", bytes([_OUTSIDE]))  # segments that only the checks have made so far

    def rewritten(self, ids: Ids, kinds: frozenset[str] = TEXT_KINDS) -> Ids:
        """Return the segments without these defects; the same array if there are none."""
        table = self._fused.get(kinds)
        if table is None or (table.size < len(self._pool) and len(ids) and max(ids) >= table.size):
            table = self._table(kinds)
        changed = table.changed
        if changed.keys().isdisjoint(ids):
            return ids
        numbers = ids.tolist()
        return array("I", list(map(changed.get, numbers, numbers)))

    def merges(self, check: TextCheck) -> bool:
        """Return whether any two segments that differ now are equal without the defect."""
        others = self._table(TEXT_KINDS - {check.kind}).changed
        moved = self._grown(check).changed
        made_by_others = {made for number, made in others.items() if number < self._log_size}

        def exists(number: int) -> bool:
            return (number < self._log_size and number not in others) or number in made_by_others

        made = Counter(target for number, target in moved.items() if exists(number))
        return any(count > 1 or (target not in moved and exists(target)) for target, count in made.items())

    def _table(self, kinds: frozenset[str]) -> _RewriteTable:
        """Return the table of several checks together."""
        size = len(self._pool)
        tables = [self._grown(check).changed for check in TEXT_CHECKS if check.kind in kinds]
        fused: dict[int, int] = {}
        for number in set().union(*tables):
            made = number
            for changed in tables:
                made = changed.get(made, made)
            if made != number:
                fused[number] = made
        table = self._fused[kinds] = _RewriteTable(size, fused)
        return table

    def _grown(self, check: TextCheck) -> _RewriteTable:
        """Return the check's own table, extended to all segments of the pool."""
        table = self._tables[check.kind]
        while (done := table.size) < len(self._pool):  # rewriting adds segments
            table.size = len(self._pool)
            new = self._suspect()[done : table.size]
            self._rewrite(check, compress(range(done, table.size), new), table)
        return table

    def _rewrite(self, check: TextCheck, numbers: Iterable[int], table: _RewriteTable) -> None:
        """Set the table's entries for these segments."""
        texts, intern, part = self._pool.texts, self._pool.intern, _PARTS[check.part]
        for number in numbers:
            text = texts[number]
            rewritten = (check.rewrite if self._flag(number) & part else check.elsewhere)(text)
            if rewritten == text:
                table.changed.pop(number, None)
            else:
                made = table.changed[number] = intern(rewritten)
                self._inherit(made, number)

    def _flag(self, number: int) -> int:
        return self._flags[number] if number < len(self._flags) else self._default_flags

    def _inherit(self, made: int, number: int) -> None:
        """Let a segment count as standing wherever the segment stands that it was made from."""
        flag, size = self._flag(number), len(self._flags)
        if made >= size:
            self._flags.extend(bytes([self._default_flags]) * max(made + 1 - size, size))
            self._flags[made] = flag
        else:
            self._flags[made] |= flag


def _is_suspect(segment: str) -> bool:
    """Return whether a check could find anything in a segment; in most there is nothing."""
    return bool(segment) and (
        _SUSPECT.search(segment, segment[0] in " \n") is not None
        or "  " in segment
        or "day" in segment
        or "ago" in segment
        or "now" in segment
        or segment[-1] in " \n"
    )
