"""Defects of wording as tables: from each segment to the one without the defect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from warmprefix.doctor.checks.base import TextCheck
from warmprefix.doctor.layout import ItemList
from warmprefix.doctor.prompts import Message
from warmprefix.doctor.segments import Ids, PerSegment, SegmentPool
from warmprefix.errors import MissingExtraError

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError as exc:
    raise MissingExtraError("doctor", "numpy") from exc

__all__ = ["Wording"]

_INSIDE, _OUTSIDE, _HEADER = 1, 2, 4
_WANTED = {"inside": _INSIDE, "outside": _OUTSIDE, "headers": _HEADER, "everywhere": _INSIDE | _OUTSIDE | _HEADER}

_TELLING = re.compile(r"[^ -/:-~]")


class Wording:
    """What each text check makes of each segment. A segment is rewritten once, however often it occurs."""

    def __init__(self, pool: SegmentPool, checks: Sequence[TextCheck]) -> None:
        self._pool = pool
        self._checks = checks
        self.all_kinds = frozenset(check.kind for check in checks)
        self._flags: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._unseen = _INSIDE | _OUTSIDE
        """What a segment counts as that no message of the log has; all of them until `learn`."""
        self._tables: dict[str, Ids] = {check.kind: np.zeros(0, np.uint32) for check in checks}
        self._fused: dict[frozenset[str], Ids] = {}
        self._telling = PerSegment(pool.texts, _is_telling, np.bool_)
        self._braces = PerSegment(pool.texts, lambda text: '{"' in text or text.endswith("{"), np.bool_)
        self._learned = len(pool)

    def learn(self, lists: Mapping[Message, Sequence[ItemList]]) -> None:
        """Note which segments stand in list items, which open one, and which stand elsewhere.

        Until then all count as standing both inside and outside of lists.
        """
        flags: NDArray[np.uint8] = np.zeros(len(self._pool), np.uint8)
        for message, found in lists.items():
            if not found:
                flags[message.ids] |= _OUTSIDE
                continue
            marks = np.full(len(message.ids), _OUTSIDE, np.uint8)
            headers = []
            for each in found:
                marks[each.start : each.end] = _INSIDE
                headers += [item.start for item in each.items]
            flags[message.ids[marks == _INSIDE]] |= _INSIDE
            flags[message.ids[marks == _OUTSIDE]] |= _OUTSIDE
            flags[message.ids[headers]] |= _HEADER
        flags[flags == 0] = _OUTSIDE  # what the checks made, so far
        self._flags = flags
        self._unseen = _OUTSIDE
        self._fused.clear()
        listed: NDArray[np.bool_] = (flags & _INSIDE) > 0
        for check in self._checks:
            table = self._tables[check.kind]
            reach = np.flatnonzero(listed[: len(table)])
            if check.part == "headers":
                self._rewrite(check, [number for number in reach.tolist() if self._flag(number) & _HEADER], table)
            elif check.part != "everywhere":  # done everywhere so far: undo what should not have been
                self._rewrite(check, np.flatnonzero(table != np.arange(len(table))).tolist(), table)
            moved = reach[table[reach] != reach].tolist()
            for number in moved:
                self._inherit(int(table[number]), number)
            made = table[moved]
            if len(made) and int(made.max()) >= len(listed):
                listed = np.concatenate((listed, np.zeros(int(made.max()) + 1 - len(listed), np.bool_)))
            listed[made] = True

    def mended(self, ids: Ids, kinds: frozenset[str]) -> Ids:
        """The segments with these defects mended."""
        table = self._fused.get(kinds)
        if table is None or (len(ids) and int(ids.max()) >= len(table)):
            table = self._table(kinds)
        return table[ids]

    def merges(self, kind: str) -> bool:
        """Whether mending the defect makes any two segments equal that differ now."""
        (check,) = (check for check in self._checks if check.kind == kind)
        others = np.flatnonzero(np.bincount(self._table(self.all_kinds - {kind})[: self._learned]))
        made = self._grown(check)[others]
        return bool((np.bincount(made)[made] > 1)[made != others].any())

    def braces(self, ids: Ids) -> bool:
        """Whether a JSON object could begin in a text of these segments."""
        return bool(self._braces()[ids].any())

    def _table(self, kinds: frozenset[str]) -> Ids:
        """The number of each segment with these defects mended."""
        fused = np.arange(len(self._pool), dtype=np.uint32)
        for check in self._checks:
            if check.kind in kinds:
                fused = self._grown(check)[fused]
        self._fused[kinds] = fused
        return fused

    def _grown(self, check: TextCheck) -> Ids:
        """The check's own table, for all segments that there are."""
        while (done := len(self._tables[check.kind])) < len(self._pool):
            table = np.concatenate((self._tables[check.kind], np.arange(done, len(self._pool), dtype=np.uint32)))
            self._tables[check.kind] = table
            self._rewrite(check, (np.flatnonzero(self._telling()[done : len(table)]) + done).tolist(), table)
        return self._tables[check.kind]

    def _rewrite(self, check: TextCheck, numbers: Iterable[int], table: Ids) -> None:
        """Set the table's entries for these segments."""
        texts, intern, wanted = self._pool.texts, self._pool.intern, _WANTED[check.part]
        for number in numbers:
            text = texts[number]
            rewrite = check.rewrite if self._flag(number) & wanted else check.elsewhere
            rewritten = rewrite(text) if text and rewrite is not None else text
            if rewritten == text:
                table[number] = number
            else:
                made = table[number] = intern(rewritten)
                self._inherit(made, number)

    def _flag(self, number: int) -> int:
        return int(self._flags[number]) if number < len(self._flags) else self._unseen

    def _inherit(self, made: int, number: int) -> None:
        if made >= len(self._flags):
            more = np.full(max(made + 1 - len(self._flags), len(self._flags)), self._unseen, np.uint8)
            more[made - len(self._flags)] = self._flag(number)
            self._flags = np.concatenate((self._flags, more))
        else:
            self._flags[made] |= self._flag(number)


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
