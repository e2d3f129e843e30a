"""Lists within messages: retrieved passages, search results, memories, however they are labelled.

A list is a run of items of one style, such as ``[1] ...``, ``Document 3: ...``, ``<doc index="2">`` or bullets. In a
message without labels, paragraphs are the items. The last item of a list ends where the same text ended elsewhere; if
it stands nowhere else, the end is a guess.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

from warmprefix_tools.doctor.request_log import PLAIN, TOOLS, Ids, LogMessage, Memo, PerSegment, SegmentPool

__all__ = ["ItemList", "ListFinder", "ListItem", "without_number"]

_KIND = (
    r"(?:search[ _])?(?:document|doc|passage|source|context|chunk|result|snippet|reference|ref|excerpt|article|memory|"
    r"fact|item|note|citation|evidence|section|page|hit)"
)
_TAG = re.compile(rf"(?i)<({_KIND})s?[ _-]?(\d+)?(?=[\s>])[^>\n]*>")
_TAG_NUMBER = re.compile(
    r"""(?i)\b(?:index|idx|id|n|no|num|number|rank|position|pos)\s*=\s*["']?(?:doc\w*[_-])?(\d+)\b["']?"""
)
_WORD = re.compile(
    rf"(?i)(?:\#{{1,4}} |\*\*|\[|\(|--+ ?|=+ ?)?{_KIND}"
    r"(?:[ _]?(?:\#|no\.? ?|number ?)?[ _-]?(\d+)\b[^\w\n]?|[ _:#-]{1,2}\S{1,60}?(?:(?::|\]|\)|\*\*)(?=\s)|\Z))"
)
_BRACKET = re.compile(r"\[\^?([^\[\]\n]{1,60})\]:?(?=\s|\Z)|【(\d+)】|\((\d{1,3})\)(?=\s)")
_RULED = re.compile(
    r"(?:-{2,}|={2,}|\*{2,}|~{2,}|#{2,}) ?(?:(\d+)|\w[^\n]{0,60}?) ?(?:-{2,}|={2,}|\*{2,}|~{2,}|#{2,})(?=\s|\Z)"
)
_HEADING = re.compile(r"#{1,4} \S")
_COUNTED = re.compile(r"(\d{1,3})[.)](?=\s)")
_NUMBER = re.compile(r"\s*(\d{1,3})\b")
_COUNT_ALONE = re.compile(r"(\d{1,3})[.):]?\Z")
_BULLET = re.compile(r"[-*•–](?=\s)")
_STYLES = (_TAG, _WORD, _BRACKET, _RULED, _HEADING, _COUNTED, _BULLET)
_COUNTED_STYLE, _BULLET_STYLE, _PARAGRAPHS, _COUNTED_PARAGRAPHS = 6, 7, 8, 9  # the first two have items of a line or so
_FEWEST_PARAGRAPHS = 3
_MOST_INDENT = 3
_SHORT_PARAGRAPH_TOKENS = 12
_KEYED = re.compile(r"\s*(?:[-*•–]|\d{1,3}[.)]) \**([A-Za-z][\w ()/-]{0,30}):")
_LEAST_USES = 4
_MOSTLY = 0.7
_ASKS = re.compile(
    r"(?i)\s*(?:\#+ |\*\*|<)?(?:answer\b|(?:\w+[ '-]?){0,2}"
    r"(?:question|query|q|request|task|input|user|instructions?|message)s?\W{0,3}[:>\n])"
)


@dataclass(frozen=True, slots=True)
class ListItem:
    """One item: segments `start` to `end` of its message."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """Consecutive items of one style."""

    source: LogMessage
    """Message of the log with the list."""
    style: int
    items: tuple[ListItem, ...]

    @property
    def start(self) -> int:
        return self.items[0].start

    @property
    def end(self) -> int:
        return self.items[-1].end


def without_number(segment: str) -> str:
    r"""Return the segment with "#" in place of the number of its item.

    >>> without_number("\n[3] Tides."), without_number('<doc index="4" id="x">'), without_number("Document 12: Tides.")
    ('\n[#] Tides.', '<doc index="#" id="x">', 'Document #: Tides.')
    """
    text = segment.lstrip()
    for style in (_TAG, _WORD, _BRACKET, _RULED, _COUNTED, _COUNT_ALONE):
        found = style.match(text)
        if found is None:
            continue
        spans = (found.span(group) for group in range(1, style.groups + 1) if found[group] and found[group].isdigit())
        span = next(spans, None)
        if style is _TAG and span is None:
            number = _TAG_NUMBER.search(text, found.start(), found.end())
            span = number.span(1) if number else None
        if span is None:
            return segment
        at = len(segment) - len(text)
        return f"{segment[: at + span[0]]}#{segment[at + span[1] :]}"
    return segment


_StyleRun = tuple[int, list[int], int]
"""Style of a run of items, where each item starts, and where the last one ends at the latest."""


class ListFinder:
    """Finds the lists of each message, after `learn` has seen all of them."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._styles = PerSegment(pool.texts, _style)
        self._opens_line = PerSegment(pool.texts, _opens)
        self._rough: Callable[[Ids], Ids] = lambda ids: ids
        self._runs = Memo[LogMessage, tuple[_StyleRun, ...]](lambda message: tuple(self._find_runs(message)))
        self._lists = Memo(self._find)
        self._bodies: set[int] = set()
        """Texts of items, without the first segment."""
        self._uses: Counter[Hashable] = Counter()
        """Uses of an item at a place of a list; with None for the item, of any item."""
        self._frame: set[int] = set()
        """Segments that open a paragraph of a template."""

    def learn(self, messages: Mapping[LogMessage, int], spread: Sequence[int], rough: Callable[[Ids], Ids]) -> None:
        """Learn from all messages how items end, and which lists belong to a template.

        Args:
            messages: Messages of the log, each with the number of requests that have it.
            spread: Number of requests that have each segment.
            rough: Makes segments equal that differ in wording only.
        """
        self._learn_frame(messages, spread)
        self._rough = rough
        for message, uses in messages.items():
            if message.role in (TOOLS, "assistant"):
                continue
            plain = rough(message.ids)
            for number, (style, starts, _) in enumerate(self._runs[message]):
                places = self._places(message, style, number, starts[0])
                for place, (start, end) in enumerate(pairwise(starts)):
                    self._bodies.add(hash(plain[start + 1 : end].tobytes()))
                    item = hash(plain[start:end].tobytes())
                    for key in places:
                        self._uses[key, place, item] += uses
                        self._uses[key, place, None] += uses

    def lists(self, message: LogMessage) -> tuple[ItemList, ...]:
        """Return the lists of a message in the order in which they stand; none for tools and answers."""
        return self._lists[message.source]

    def _find(self, message: LogMessage) -> tuple[ItemList, ...]:
        if message.role in (TOOLS, "assistant"):
            return ()
        lists = []
        for number, (style, starts, limit) in enumerate(self._runs[message]):
            if not self._is_fixed(message, style, number, starts):
                end = limit if style == _PARAGRAPHS else self._end_of_last(message, starts[-1], limit, style)
                bounds = pairwise([*starts, end])
                lists.append(ItemList(message, style, tuple(ListItem(start, stop) for start, stop in bounds)))
        del self._runs[message]  # needed no more, and large
        return tuple(sorted(lists, key=lambda each: each.start))

    def _places(self, message: LogMessage, style: int, number: int, start: int) -> tuple[Hashable, ...]:
        """Return what identifies a list: its number in the message, the message's first words too, or its heading."""
        first, heading = self._rough(array("I", [message.ids[0], message.ids[max(start - 1, 0)]]))
        return (
            (message.role, style, number),
            (message.role, style, number, first),
            (message.role, style, "behind", heading),
        )

    def _is_fixed(self, message: LogMessage, style: int, number: int, starts: list[int]) -> bool:
        """Return whether most items are always the same, such as rules, and were not retrieved for a request."""
        if style in (_COUNTED_STYLE, _BULLET_STYLE) and self._is_keyed(message, starts):
            return True
        plain = self._rough(message.ids)
        for key in self._places(message, style, number, starts[0]):
            same = 0
            for place, (start, end) in enumerate(pairwise(starts)):
                uses = self._uses[key, place, hash(plain[start:end].tobytes())]
                total = self._uses[key, place, None]
                same += total >= _LEAST_USES and uses >= _MOSTLY * total
            if same * 2 >= len(starts) - 1:
                return True
        return False

    def _is_keyed(self, message: LogMessage, starts: list[int]) -> bool:
        """Return whether the items are fields, each with a name of its own: ``- Plan: free``."""
        found = [_KEYED.match(self._pool.texts[message.ids[start]]) for start in starts]
        names = [match[1] for match in found if match]
        return len(names) == len(set(names)) and len(names) * 2 >= len(starts)

    def _find_runs(self, message: LogMessage) -> Iterator[_StyleRun]:
        ids = message.ids
        if not len(ids):
            return
        opens = self._opens(message)
        opens[0] = max(opens[0], 1)
        styles = self._styles()
        of_style: dict[int, list[int]] = {}
        for at in compress(range(len(ids)), opens):
            if style := styles[ids[at]]:
                of_style.setdefault(style, []).append(at)
        free = [(0, len(ids))]
        labelled = message.role == PLAIN
        for style, places in sorted(of_style.items()):
            if style >= _COUNTED_STYLE and not labelled:
                labelled = True
                counted = [i for i in of_style.get(_COUNTED_STYLE, ()) if opens[i] == 2 or i == 0]
                if self._counts_up(message, counted) and self._rare_paragraphs(message, opens, counted[0]) < 2:
                    yield _COUNTED_PARAGRAPHS, counted, len(ids)
                    return
                free = yield from self._paragraphs(message, opens, free[0])
            left: list[tuple[int, int]] = []
            for low, high in free:
                starts = self._without_inner_lines(opens, places[bisect_left(places, low) : bisect_left(places, high)])
                at = low
                for run in self._split_runs(message, opens, starts) if style >= _COUNTED_STYLE else [starts]:
                    if len(run) < 2:
                        continue
                    labelled = True
                    last = self._end_of_last(message, run[-1], high, style)
                    yield style, run, high
                    left.append((at, run[0]))
                    at = last
                left.append((at, high))
            free = left
        if not labelled:
            yield from self._paragraphs(message, opens, free[0])

    @staticmethod
    def _without_inner_lines(opens: bytearray, starts: list[int]) -> list[int]:
        """Keep only items behind a blank line, if most stand behind one: other lines belong to an item."""
        parted = [i for i in starts[1:] if opens[i] == 2]
        return [*starts[:1], *parted] if len(parted) * 2 >= len(starts) - 1 > 0 else starts

    def _rare_paragraphs(self, message: LogMessage, opens: bytearray, end: int) -> int:
        """Count the paragraphs in front of a segment that are neither short nor in most requests."""
        ids = message.ids
        starts = [0, *_paragraph_starts(opens, 1, end), end]
        return sum(
            ids[start] not in self._frame and self._pool.count_tokens(ids[start:stop]) >= _SHORT_PARAGRAPH_TOKENS
            for start, stop in pairwise(starts)
        )

    def _learn_frame(self, messages: Mapping[LogMessage, int], spread: Sequence[int]) -> None:
        """Note the paragraphs that half of all requests have, in the same place: as the n-th, or the n-th last."""
        widest = max(spread)
        places: dict[int, Counter[int]] = {}
        for message, uses in messages.items():
            starts = _paragraph_starts(self._opens(message), 1, len(message.ids))
            paragraphs = [message.ids[start] for start in (0, *starts)] if message.ids else []
            for place, paragraph in enumerate(paragraphs):
                if spread[paragraph] * 2 > widest:
                    found = places.setdefault(paragraph, Counter())
                    found[place] += uses
                    found[place - len(paragraphs)] += uses
        self._frame = {
            segment
            for segment, found in places.items()
            if max(found.values()) >= _MOSTLY * sum(uses for place, uses in found.items() if place < 0)
        }

    def _counts_up(self, message: LogMessage, starts: list[int]) -> bool:
        """Return whether these are numbered 1 to n, in any order."""
        found = [_NUMBER.match(self._pool.texts[message.ids[i]]) for i in starts]
        return len(starts) > 1 and sorted(int(match[1]) for match in found if match) == [*range(1, len(starts) + 1)]

    def _split_runs(self, message: LogMessage, opens: bytearray, starts: list[int]) -> list[list[int]]:
        """Split bullets or counted lines where another line that is not indented stands between two of them."""
        if len(starts) > 1 and all(opens[i] == 2 for i in starts[1:]):
            return [starts]
        runs: list[list[int]] = []
        for start in starts:
            between = range(runs[-1][-1] + 1, start) if runs else range(0)
            if not runs or any(opens[i] and not self._is_indented(message.ids[i]) for i in between):
                runs.append([])
            runs[-1].append(start)
        return runs

    def _paragraphs(
        self, message: LogMessage, opens: bytearray, within: tuple[int, int]
    ) -> Generator[_StyleRun, None, list[tuple[int, int]]]:
        """Yield runs of long paragraphs that not every request has, and return the ranges between them."""
        ids, texts = message.ids, self._pool.texts
        low, high = within
        starts = _paragraph_starts(opens, low, high)
        if len(starts) < _FEWEST_PARAGRAPHS - 1:
            return [within]
        bounds = [*([] if starts[0] == low else [low]), *starts, high]
        left: list[tuple[int, int]] = []
        run: list[int] = []
        for start, end in [*pairwise(bounds), (high, high)]:
            if start < high and ids[start] not in self._frame and not _ASKS.match(texts[ids[start]]):
                if not run or self._pool.count_tokens(ids[start:end]) >= _SHORT_PARAGRAPH_TOKENS:
                    run.append(start)  # a short paragraph belongs to the item before it
                continue
            if len(run) >= _FEWEST_PARAGRAPHS:
                yield _PARAGRAPHS, run, start
                left.append((low, run[0]))
                low = start
            run = []
        return [*left, (low, high)]

    def _end_of_last(self, message: LogMessage, start: int, limit: int, style: int) -> int:
        """Return where the last item ends: after a text seen elsewhere, else before a question or at a blank line."""
        ids, behind = message.ids, range(start + 1, limit)
        opens = self._opens(message, start + 1, limit)
        if style in (_COUNTED_STYLE, _BULLET_STYLE):
            return next((i for i in compress(behind, opens) if not self._is_indented(ids[i])), limit)
        blank = [behind[i] for i in _paragraph_starts(opens, 0, len(opens))]
        plain = self._rough(ids)
        end: int
        for end in [limit, *reversed(blank)]:
            if hash(plain[start + 1 : end].tobytes()) in self._bodies:
                return end
        if style == 1:
            closed = [i for i in range(start, limit) if "</" in self._pool.texts[ids[i]]]
            return closed[0] + 1 if closed else limit
        asks = [i for i in blank if _ASKS.match(self._pool.texts[ids[i]])]
        return asks[0] if asks else blank[-1] if blank else limit

    def _opens(self, message: LogMessage, start: int = 0, end: int | None = None) -> bytearray:
        """Return `_opens` of each segment of a part of a message."""
        return bytearray(map(self._opens_line().__getitem__, message.ids[start:end]))

    def _is_indented(self, segment: int) -> bool:
        text = self._pool.texts[segment]
        space = text[: len(text) - len(text.lstrip())]
        return not space.endswith("\n") and "\n\n" not in space


def _paragraph_starts(opens: bytearray, low: int, high: int) -> list[int]:
    """Return the indices from `low` to `high` of segments that open a paragraph."""
    return [at for at in range(low, high) if opens[at] == 2]


_OPENERS = frozenset("<[(#*-•–【=~0123456789")


def _style(segment: str) -> int:
    """Return the style of item that the segment could open, from 1; 0 if it opens none."""
    if segment[:1] == " " and "\n" not in segment[:_MOST_INDENT]:
        return 0  # in the middle of a line
    text = segment.lstrip()
    if not text or (text[0] not in _OPENERS and not text[0].isalpha()):
        return 0
    indent = len(segment) - len(text) - segment.rfind("\n", 0, len(segment) - len(text)) - 1
    for number, style in enumerate(_STYLES, 1):
        found = style.match(text)
        if found and style is _WORD and found[1] is None and not text[0].isupper() and text[0].isalpha():
            continue  # prose
        if found and (indent <= _MOST_INDENT or number in (1, _BULLET_STYLE)):
            return number
    return _COUNTED_STYLE if _COUNT_ALONE.match(text) else 0


def _opens(segment: str) -> int:
    """Return 1 if the segment opens a line, 2 if it opens a paragraph, else 0."""
    space = segment[: len(segment) - len(segment.lstrip())]
    return min(space.replace("\r", "").count("\n"), 2) if space else 0
