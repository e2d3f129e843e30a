"""Lists within messages: retrieved passages, search results, memories, however they are labelled.

A list is a run of items of one style, such as ``[1] ...``, ``Document 3: ...``, ``<doc index="2">`` or bullets. Where
nothing is labelled, paragraphs are the items. Where the last item ends is known from its text where that came up
elsewhere, and guessed otherwise.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise

from warmprefix_tools.doctor.prompts import PLAIN, TOOLS, Message
from warmprefix_tools.doctor.segments import Ids, PerSegment, SegmentPool

__all__ = ["Item", "ItemList", "Layout", "without_number"]

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
_SHORT_PARAGRAPH = 12
"""Tokens."""
_KEYED = re.compile(r"\s*(?:[-*•–]|\d{1,3}[.)]) \**([A-Za-z][\w ()/-]{0,30}):")
_FEW = 4
_MOSTLY = 0.7
_ASKS = re.compile(
    r"(?i)\s*(?:\#+ |\*\*|<)?(?:answer\b|(?:\w+[ '-]?){0,2}"
    r"(?:question|query|q|request|task|input|user|instructions?|message)s?\W{0,3}[:>\n])"
)


@dataclass(frozen=True, slots=True)
class Item:
    """One item: segments `start` to `end` of its message."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """Items of one style, one right after another."""

    style: int
    items: tuple[Item, ...]

    @property
    def start(self) -> int:
        return self.items[0].start

    @property
    def end(self) -> int:
        return self.items[-1].end


def without_number(segment: str) -> str:
    r"""The segment with the number of its item taken out.

    >>> without_number("\n[3] Tides."), without_number('<doc index="4" id="x">'), without_number("Document 12: Tides.")
    ('\n[#] Tides.', '<doc index="#" id="x">', 'Document #: Tides.')
    """
    text = segment.lstrip()
    for style in (_TAG, _WORD, _BRACKET, _RULED, _COUNTED, _COUNT_ALONE):
        found = style.match(text)
        if found is None:
            continue
        span = next(
            (found.span(group) for group in range(1, style.groups + 1) if found[group] and found[group].isdigit()), None
        )
        if style is _TAG and span is None:
            number = _TAG_NUMBER.search(text, found.start(), found.end())
            span = number.span(1) if number else None
        if span is not None:
            at = len(segment) - len(text)
            return f"{segment[: at + span[0]]}#{segment[at + span[1] :]}"
        return segment
    return segment


@dataclass(slots=True)
class Layout:
    """The lists of every message, found when first asked for."""

    pool: SegmentPool
    _lists: dict[Message, tuple[ItemList, ...]] = field(default_factory=dict)
    _found_runs: dict[Message, tuple[tuple[int, list[int], int], ...]] = field(default_factory=dict)
    _styles: PerSegment = field(init=False)
    _opens_line: PerSegment = field(init=False)
    _bodies: set[int] = field(default_factory=set)
    _fixed: Counter[Hashable] = field(default_factory=Counter)
    """Uses of an item at a place of a list, and with None for the item, of any."""
    _frame: set[int] = field(default_factory=set)
    _rough: Callable[[Ids], Ids] = field(default=lambda ids: ids)

    def __post_init__(self) -> None:
        self._styles = PerSegment(self.pool.texts, _style)
        self._opens_line = PerSegment(self.pool.texts, _opens)

    def learn(self, messages: Mapping[Message, int], spread: Sequence[int], rough: Callable[[Ids], Ids]) -> None:
        """Look through all messages first: for how items end, and for lists that belong to a template.

        Args:
            messages: The log's, each with the number of requests that have it.
            spread: How many requests have each segment.
            rough: Makes segments equal that differ in wording only.
        """
        self._learn_frame(messages, spread)
        self._rough = rough
        for message, uses in messages.items():
            if message.role not in (TOOLS, "assistant"):
                runs = self._found_runs[message] = tuple(self._runs(message))
                plain = rough(message.ids)
                for number, (style, starts, _) in enumerate(runs):
                    places = self._places(message, style, number, starts[0])
                    for place, (start, end) in enumerate(pairwise(starts)):
                        self._bodies.add(hash(plain[start + 1 : end].tobytes()))
                        item = hash(plain[start:end].tobytes())
                        for key in places:
                            self._fixed[key, place, item] += uses
                            self._fixed[key, place, None] += uses

    def lists(self, message: Message) -> tuple[ItemList, ...]:
        """The lists of a message, in the order in which they stand; none for tools and answers."""
        message = message.source
        lists = self._lists.get(message)
        if lists is None:
            found = () if message.role in (TOOLS, "assistant") else self._found(message)
            lists = self._lists[message] = tuple(sorted(found, key=lambda each: each.start))
        return lists

    def _places(self, message: Message, style: int, number: int, start: int) -> tuple[Hashable, ...]:
        """What a list is known by: its number in the message, the message's first words too, or the words in front."""
        first, front = self._rough(array("I", [message.ids[0], message.ids[max(start - 1, 0)]]))
        return (
            (message.role, style, number),
            (message.role, style, number, first),
            (message.role, style, "behind", front),
        )

    def _is_fixed(self, message: Message, style: int, number: int, starts: list[int]) -> bool:
        """Whether most items are always the same: rules, say, and not what was found for a request."""
        if style in (_COUNTED_STYLE, _BULLET_STYLE) and self._is_keyed(message, starts):
            return True
        plain = self._rough(message.ids)
        for key in self._places(message, style, number, starts[0]):
            same = 0
            for place, (start, end) in enumerate(pairwise(starts)):
                uses = self._fixed[key, place, hash(plain[start:end].tobytes())]
                total = self._fixed[key, place, None]
                same += total >= _FEW and uses >= _MOSTLY * total
            if same * 2 >= len(starts) - 1:
                return True
        return False

    def _is_keyed(self, message: Message, starts: list[int]) -> bool:
        """Whether the items are fields, each with a name of its own: ``- Plan: free``."""
        found = [_KEYED.match(self.pool.texts[message.ids[start]]) for start in starts]
        names = [match[1] for match in found if match]
        return len(names) == len(set(names)) and len(names) * 2 >= len(starts)

    def _found(self, message: Message) -> Iterator[ItemList]:
        runs = self._found_runs.pop(message, None)
        for number, (style, starts, limit) in enumerate(self._runs(message) if runs is None else runs):
            if self._is_fixed(message, style, number, starts):
                continue
            end = limit if style == _PARAGRAPHS else self._end_of_last(message, starts[-1], limit, style)
            items = tuple(Item(start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True))
            yield ItemList(style, items)

    def _runs(self, message: Message) -> Iterator[tuple[int, list[int], int]]:
        """Style, where each item starts, and where the last ends at the latest."""
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
                starts = self._apart(opens, places[bisect_left(places, low) : bisect_left(places, high)])
                at = low
                for run in self._broken(message, opens, starts) if style >= _COUNTED_STYLE else [starts]:
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
    def _apart(opens: bytearray, starts: list[int]) -> list[int]:
        """If blank lines part most items, a line without one in front opens none."""
        parted = [i for i in starts[1:] if opens[i] == 2]
        return [*starts[:1], *parted] if len(parted) * 2 >= len(starts) - 1 > 0 else starts

    def _rare_paragraphs(self, message: Message, opens: bytearray, end: int) -> int:
        """Count the paragraphs in front of a segment that are neither short nor in most requests."""
        ids = message.ids
        starts = [0, *_paragraph_starts(opens, 1, end), end]
        return sum(
            not self._is_common(ids[start]) and self.pool.count_tokens(ids[start:stop]) >= _SHORT_PARAGRAPH
            for start, stop in pairwise(starts)
        )

    def _learn_frame(self, messages: Mapping[Message, int], spread: Sequence[int]) -> None:
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

    def _is_common(self, segment: int) -> bool:
        """Whether it opens a paragraph that belongs to a template."""
        return segment in self._frame

    def _counts_up(self, message: Message, starts: list[int]) -> bool:
        """Whether these are numbered 1 to n, in any order."""
        found = [_NUMBER.match(self.pool.texts[message.ids[i]]) for i in starts]
        return len(starts) > 1 and sorted(int(match[1]) for match in found if match) == [*range(1, len(starts) + 1)]

    def _broken(self, message: Message, opens: bytearray, starts: list[int]) -> list[list[int]]:
        """Runs of bullets or counted lines: one ends where a line stands between that is neither indented nor one."""
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
        self, message: Message, opens: bytearray, within: tuple[int, int]
    ) -> Generator[tuple[int, list[int], int], None, list[tuple[int, int]]]:
        """Yield runs of long paragraphs that not every request has, and return what is left besides them."""
        ids, texts = message.ids, self.pool.texts
        low, high = within
        starts = _paragraph_starts(opens, low, high)
        if len(starts) < _FEWEST_PARAGRAPHS - 1:
            return [within]
        bounds = [*([] if starts[0] == low else [low]), *starts, high]
        left: list[tuple[int, int]] = []
        run: list[int] = []
        for start, end in [*pairwise(bounds), (high, high)]:
            first = ids[start] if start < high else 0
            if start < high and not self._is_common(first) and not _ASKS.match(texts[first]):
                if run and self.pool.count_tokens(ids[start:end]) < _SHORT_PARAGRAPH:
                    continue  # a part of the one before
                run.append(start)
                continue
            if len(run) >= _FEWEST_PARAGRAPHS:
                yield _PARAGRAPHS, run, start
                left.append((low, run[0]))
                low = start
            run = []
        return [*left, (low, high)]

    def _end_of_last(self, message: Message, start: int, limit: int, style: int) -> int:
        """Where the last item ends: with a text that is known, else before what asks something, or at a blank line."""
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
            closed = [i for i in range(start, limit) if "</" in self.pool.texts[ids[i]]]
            return closed[0] + 1 if closed else limit
        asks = [i for i in blank if _ASKS.match(self.pool.texts[ids[i]])]
        return asks[0] if asks else blank[-1] if blank else limit

    def _opens(self, message: Message, start: int = 0, end: int | None = None) -> bytearray:
        """Return for each segment of a part of a message what `_opens` says of it."""
        return bytearray(map(self._opens_line().__getitem__, message.ids[start:end]))

    def _is_indented(self, segment: int) -> bool:
        text = self.pool.texts[segment]
        space = text[: len(text) - len(text.lstrip())]
        return not space.endswith("\n") and "\n\n" not in space


def _paragraph_starts(opens: bytearray, low: int, high: int) -> list[int]:
    """Return the indices from `low` to `high` of segments that open a paragraph."""
    return [at for at in range(low, high) if opens[at] == 2]


def _style(segment: str) -> int:
    """Which style of item the segment could open, from 1; 0 for none."""
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


_OPENERS = frozenset("<[(#*-•–【=~0123456789")


def _opens(segment: str) -> int:
    """1 if the segment opens a line, 2 if it opens a paragraph."""
    space = segment[: len(segment) - len(segment.lstrip())]
    return min(space.replace("\r", "").count("\n"), 2) if space else 0
