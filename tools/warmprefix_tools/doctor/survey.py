"""What is known of a log before anything is mended: lists, conversations, what is widespread and what is not."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from warmprefix_tools.doctor.checks.base import MessageCheck, TextCheck
from warmprefix_tools.doctor.conversations import Thread, threads
from warmprefix_tools.doctor.layout import ItemList, Layout
from warmprefix_tools.doctor.prompts import TOOLS, Log, Message
from warmprefix_tools.doctor.segments import EMPTY, WIDTH, packed
from warmprefix_tools.doctor.slots import Slots
from warmprefix_tools.doctor.wording import Wording

__all__ = ["Survey"]

_MEMORY = re.compile(r"(?i)memor(?:y|ies)|remember|recall|known facts|facts about|know(?:n)? about|preferences|profile")
_MEMORY_LABEL = re.compile(r"(?i)[\s<\[(#*-]*(?:memor(?:y|ies)|facts?)\b")
_SHORT_ITEM = 48
"""Tokens."""
_MOSTLY = 0.6


@dataclass(slots=True)
class _Cells:
    """Memo of one survey."""

    plain: dict[Message, Message] = field(default_factory=dict)
    keys: dict[Message, bytes] = field(default_factory=dict)
    braces: dict[Message, bool] = field(default_factory=dict)
    mended: dict[str, dict[Message, Message]] = field(default_factory=dict)
    list_keys: dict[ItemList, Hashable] = field(default_factory=dict)
    lists: dict[Message, tuple[tuple[ItemList, ...], tuple[ItemList, ...]]] = field(default_factory=dict)
    memories: dict[Hashable, bool] = field(default_factory=dict)
    bare: dict[int, int] = field(default_factory=dict)
    line_feeds: dict[int, int] = field(default_factory=dict)
    spaced: dict[tuple[int, int], int] = field(default_factory=dict)


class Survey:
    """One log, looked at from all sides; everything here is about the log as it stands."""

    short_requests: frozenset[int] = frozenset()
    """Requests whose prompt is no longer than one KV block."""

    def __init__(self, log: Log, text_checks: Sequence[TextCheck]) -> None:
        self.log = log
        self.pool = log.pool
        self._memo = _Cells()
        self.arrangements: dict[Hashable, dict[Hashable, Any]] = {}
        """Memo of the checks that order lists."""
        self.uses: Counter[Message] = Counter()
        for request in log.requests:
            self.uses.update(dict.fromkeys(request.messages, 1))
        self.wording = wording = Wording(log.pool, text_checks)
        self.layout = Layout(log.pool)
        self.layout.learn(
            self.uses,
            self._spread({message: message for message in self.uses}),
            lambda ids: wording.mended(ids, wording.all_kinds),
        )
        wording.learn({message: self.layout.lists(message) for message in self.uses})
        self._memo.plain.update(self.all_mended(wording.all_kinds))

    def plain(self, message: Message) -> Message:
        """The message with every defect of wording mended."""
        plain = self._memo.plain.get(message)
        if plain is None:
            ids = self.wording.mended(message.ids, self.wording.all_kinds)
            plain = self._memo.plain[message] = message.made_into(ids)
        return plain

    def key(self, message: Message) -> bytes:
        """Equal for messages that say the same, whatever their wording."""
        key = self._memo.keys.get(message)
        if key is None:
            key = self._memo.keys[message] = message.role.encode() + b"\n" + packed(self.plain(message).ids)
        return key

    def all_mended(self, kinds: frozenset[str]) -> dict[Message, Message]:
        """Return every message of the log without these defects of wording."""
        return {message: message.made_into(self.wording.mended(message.ids, kinds)) for message in self.uses}

    def mended(self, check: MessageCheck) -> dict[Message, Message]:
        """Every message of the log without that defect."""
        made = self._memo.mended.get(check.kind)
        if made is None:
            made = self._memo.mended[check.kind] = {message: check.mend(self, message) for message in self.uses}
        return made

    def has_json(self, message: Message) -> bool:
        """Whether a JSON object may be written out in it."""
        found = self._memo.braces.get(message)
        if found is None:
            found = self._memo.braces[message] = bool(self.wording.braces(message.ids))
        return found

    def lists(self, message: Message) -> tuple[ItemList, ...]:
        """The lists in a message, or in the one that it was made from."""
        return self.layout.lists(message)

    def list_key(self, each: ItemList, message: Message) -> Hashable:
        """Equal for lists that stand in the same place of a prompt: of one style, behind one heading."""
        key = self._memo.list_keys.get(each)
        if key is None:
            heading = None
            if each.start:
                heading = self.plain(message.source).ids[each.start - 1]
                if heading >= len(self.plain_spread) or self.plain_spread[heading] < 2:
                    heading = None
            key = self._memo.list_keys[each] = (message.role, each.style, heading)
        return key

    def item_keys(self, each: ItemList, message: Message) -> list[bytes]:
        """What each item of a list says, wording apart."""
        ids = self.plain(message.source).ids
        keys = []
        for item in each.items:
            bare = self.without_space(ids[item.start])
            keys.append(bare.to_bytes(WIDTH, "little") + packed(ids[item.start + 1 : item.end]))
        return keys

    def memories(self, message: Message) -> tuple[ItemList, ...]:
        """The lists of memories in a message."""
        return self._sorted_lists(message)[0]

    def passages(self, message: Message) -> tuple[ItemList, ...]:
        """All other lists in it."""
        return self._sorted_lists(message)[1]

    def _sorted_lists(self, message: Message) -> tuple[tuple[ItemList, ...], tuple[ItemList, ...]]:
        found = self._memo.lists.get(message.source)
        if found is None:
            lists = self.lists(message)
            memories = tuple(each for each in lists if self._is_memory(each, message))
            found = self._memo.lists[message.source] = memories, tuple(each for each in lists if each not in memories)
        return found

    def _is_memory(self, each: ItemList, message: Message) -> bool:
        """Whether a list is one of memories: by its heading or labels, or because it stays with its conversation."""
        key = self.list_key(each, message)
        known = self._memo.memories.get(key)
        if known is None:
            source = message.source
            texts = [self.pool.texts[i] for i in source.ids[max(each.start - 1, 0) : each.start + 1]]
            named = _MEMORY_LABEL.match(texts[-1]) or (each.start > 0 and _MEMORY.search(texts[0]))
            known = bool(named) or key in self._short_and_kept
            self._memo.memories[key] = known
        return known

    @cached_property
    def _short_and_kept(self) -> set[Hashable]:
        """Lists of short items most of which come back in the next request of the conversation."""
        shares: dict[Hashable, list[float]] = {}
        for index, thread in enumerate(self.threads):
            if thread is None:
                continue
            old = {}
            for message in self.log.requests[thread.earlier].messages[:2]:
                for each in self.lists(message):
                    old[self.list_key(each, message)] = set(self.item_keys(each, message))
            for message in self.log.requests[index].messages[:2]:
                for each in self.lists(message):
                    key = self.list_key(each, message)
                    size = self.pool.count_tokens(message.ids[each.start : each.end]) / len(each.items)
                    if key in old and size <= _SHORT_ITEM and message.role in ("system", "developer"):
                        keys = self.item_keys(each, message)
                        shares.setdefault(key, []).append(sum(k in old[key] for k in keys) / len(keys))
        return {key for key, found in shares.items() if sum(found) / len(found) >= _MOSTLY}

    def without_space(self, segment: int) -> int:
        """The segment without the white space in front of it."""
        made = self._memo.bare.get(segment)
        if made is None:
            made = self._memo.bare[segment] = self.pool.intern(self.pool.texts[segment].lstrip())
        return made

    def with_space_of(self, other: int, segment: int) -> int:
        """Return the segment with the line feeds in front of another in place of its own white space."""
        feeds = self._line_feeds(other)
        if feeds >= 0 and feeds == self._line_feeds(segment):
            return segment
        made = self._memo.spaced.get((other, segment))
        if made is None:
            text = self.pool.texts[other]
            space = text[: len(text) - len(text.lstrip())]
            made = self.pool.intern(space.lstrip(" \t") + self.pool.texts[segment].lstrip())
            self._memo.spaced[other, segment] = made
        return made

    def _line_feeds(self, segment: int) -> int:
        found = self._memo.line_feeds.get(segment)
        if found is None:
            found = self._memo.line_feeds[segment] = _line_feeds(self.pool.texts[segment])
        return found

    def tools_message(self, request: int) -> Message | None:
        """The tools of a request."""
        first = self.log.requests[request].messages[0]
        return first if first.role == TOOLS else None

    @cached_property
    def slots(self) -> Slots:
        """Places of templates where each request has something else."""
        return Slots(self)

    @cached_property
    def threads(self) -> list[Thread | None]:
        """For each request, how it follows an earlier one of its conversation."""
        return threads(self.log.requests, self.key, self._alike)

    def _alike(self, old: Message, new: Message) -> float:
        """How much of the shorter message the longer one has."""
        if old.role != new.role:
            return 0.0
        one, other = (set(self.plain(message).ids) - {EMPTY} for message in (old, new))
        return len(one & other) / max(min(len(one), len(other)), 1)

    @cached_property
    def roots(self) -> list[int]:
        """For each request, the first one of its conversation."""
        roots: list[int] = []
        for request, thread in enumerate(self.threads):
            roots.append(request if thread is None else roots[thread.earlier])
        return roots

    @cached_property
    def owners(self) -> list[str | None]:
        """For each request, whom it is for, as well as can be told: a user, a session, a conversation."""
        sizes = Counter(self.roots)
        return [
            request.user or request.session or (f"#{root}" if sizes[root] > 1 else None)
            for request, root in zip(self.log.requests, self.roots, strict=True)
        ]

    @cached_property
    def plain_spread(self) -> Sequence[int]:
        """The number of requests that have each segment, wording apart."""
        return self._spread({message: self.plain(message) for message in self.uses})

    def _spread(self, versions: Mapping[Message, Message]) -> Sequence[int]:
        """Count the requests that have each segment, given a version of each message of the log."""
        spread = array("I", bytes(WIDTH * len(self.pool)))
        for message, version in versions.items():
            uses = self.uses[message]
            for segment in set(version.ids):
                spread[segment] += uses
        spread[EMPTY] = 0
        return spread


def _line_feeds(segment: str) -> int:
    """How many line feeds, and nothing else, a segment begins with; -1 if it begins with other white space."""
    text = segment.lstrip()
    space = segment[: len(segment) - len(text)]
    return -1 if space.strip("\n") else len(space)
