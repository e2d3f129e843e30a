"""Where a defect shows: two requests of the log, and the spot where they part because of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from warmprefix_tools.doctor.checks import by_kind
from warmprefix_tools.doctor.checks.base import DraftCheck, HistoryCheck, MessageCheck, Spot, SpotPair, TextCheck
from warmprefix_tools.doctor.mending import Kinds, Mender
from warmprefix_tools.doctor.prompts import PLAIN, TOOLS, Draft, Message
from warmprefix_tools.doctor.report import Divergence, Place
from warmprefix_tools.doctor.survey import Survey

__all__ = ["Places"]

_TRIED = 40
_BEFORE, _WITHIN, _AFTER = 60, 100, 40
"""Characters of a snippet."""


class Places:
    """Finds, for each defect, the pair of requests that shows it best."""

    def __init__(self, survey: Survey, mender: Mender, kinds: Kinds) -> None:
        self._survey = survey
        self._mender = mender
        self._kinds = kinds

    def of(self, kind: str) -> Divergence | None:
        """The instance that costs most, of those that can be shown."""
        check = by_kind(kind)
        for later, earlier in self._pairs(kind):
            spots = (
                self._word_spot(check, later, earlier)
                if isinstance(check, TextCheck)
                else check.spot(self._survey, later, earlier)
                if isinstance(check, DraftCheck | HistoryCheck | MessageCheck)
                else None
            )
            if spots is not None:
                return self.divergence(later, earlier, spots)
        return None

    def divergence(self, later: int, earlier: int, spots: SpotPair) -> Divergence:
        """The report's form of a pair of spots."""
        return Divergence(
            earlier=self._place(earlier, spots[1]),
            later=self._place(later, spots[0]),
            shared_tokens=self._shared(self._mender.as_it_stands, later, earlier),
            could_share_tokens=self._shared(self._mender.mended(self._kinds), later, earlier),
        )

    def _pairs(self, kind: str) -> Iterator[tuple[int, int]]:
        """Yield the requests that lose most, each with earlier ones that it could share with."""
        after = self._mender.outcome(self._kinds)
        gains = after.gains(self._mender.outcome(self._kinds - {kind}))
        for later in heapq.nlargest(_TRIED, range(len(gains)), key=gains.__getitem__):
            thread = self._survey.threads[later]
            likely = [after.donors[later], None if thread is None else thread.earlier]
            nearest = range(later - 1, max(later - _TRIED, 0) - 1, -1)
            for earlier in dict.fromkeys(each for each in (*likely, *nearest) if each is not None):
                yield later, earlier

    def _word_spot(self, check: TextCheck, later: int, earlier: int) -> SpotPair | None:
        """The first segment that differs between the two, and would not without this defect."""
        survey, wording = self._survey, self._survey.wording
        others = wording.all_kinds - {check.kind}
        old: dict[int, tuple[int, int, int, int]] = {}
        for at, message in enumerate(survey.log.requests[earlier].messages):
            plain = survey.plain(message).ids.tolist()
            rough = wording.mended(message.ids, others).tolist()
            for index, made in enumerate(plain):
                old.setdefault(made, (at, index, message.ids[index], rough[index]))
        for at, message in enumerate(survey.log.requests[later].messages):
            plain = survey.plain(message).ids.tolist()
            rough = wording.mended(message.ids, others).tolist()
            for index, made in enumerate(plain):
                match = old.get(made)
                if match is not None and rough[index] != match[3] and message.ids[index] != match[2]:
                    return self._differing(later, at, index, earlier, match[0], match[1])
        return None

    def _differing(self, later: int, at: int, index: int, earlier: int, old_at: int, old_index: int) -> SpotPair:
        pool, requests = self._survey.pool, self._survey.log.requests
        ids, old_ids = requests[later].messages[at].ids, requests[earlier].messages[old_at].ids
        text, other = pool.texts[ids[index]], pool.texts[old_ids[old_index]]
        common = next(
            (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
        )
        tail = 0
        while tail < min(len(text), len(other)) - common and text[-1 - tail] == other[-1 - tail]:
            tail += 1
        return (
            Spot(at, len(pool.text(ids[:index])) + common, len(text) - common - tail),
            Spot(old_at, len(pool.text(old_ids[:old_index])) + common, len(other) - common - tail),
        )

    def _place(self, request: int, spot: Spot) -> Place:
        entry = self._survey.log.requests[request]
        if spot.path is not None or spot.message is None:
            return Place(request + 1, entry.file, entry.line, path=spot.path, snippet=_clipped(spot.text or ""))
        message = entry.messages[spot.message]
        offset = spot.offset or 0
        text = self._survey.log.text(message)
        start = max(offset - _BEFORE, 0)
        end = min(offset + min(spot.length, _WITHIN) + _AFTER, len(text))
        front, back = "…" if start else "", "…" if end < len(text) else ""
        mark = (len(front) + offset - start, len(front) + offset - start + min(spot.length, _WITHIN))
        snippet = f"{front}{text[start:end]}{back}"
        if message.role == TOOLS:
            return Place(request + 1, entry.file, entry.line, path="tools", offset=offset, snippet=snippet, mark=mark)
        if message.role == PLAIN:
            return Place(request + 1, entry.file, entry.line, offset=offset, snippet=snippet, mark=mark)
        index = spot.message - (entry.messages[0].role == TOOLS)
        return Place(
            request + 1, entry.file, entry.line, index, message.role, offset=offset, snippet=snippet, mark=mark
        )

    def _shared(self, draft: Draft, later: int, earlier: int) -> int:
        """Tokens that two prompts of one version have in common at their start."""
        if draft.salts[later] != draft.salts[earlier]:
            return 0
        pool = self._survey.pool
        one, other = (self._flat(draft.prompts[request]) for request in (later, earlier))
        shared = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                first, second = pool.packed_tokens(a), pool.packed_tokens(b)
                same = 0
                while same < min(len(first), len(second)) and first[same : same + 4] == second[same : same + 4]:
                    same += 4
                return shared + same // 4
            shared += pool.token_counts[a]
        return shared

    def _flat(self, prompt: tuple[Message, ...]) -> list[int]:
        pool = self._survey.pool
        flat: list[int] = []
        for message in prompt:
            if message.role != PLAIN:
                flat.append(pool.message_head(message.role))
            flat += filter(None, message.ids)
            if message.role != PLAIN:
                flat.append(pool.message_end)
        return flat


def _clipped(text: str) -> str:
    most = _BEFORE + _WITHIN + _AFTER
    return text if len(text) <= most else f"{text[:most]}…"
