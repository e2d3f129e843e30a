"""How much of each prompt a prefix cache would find, worked out on segments.

The result is that of the emulator's `PrefixCache`, one request after another and without the answers, but a prompt of
8,000 tokens costs some microseconds: prompts are walked along a radix tree of segments, and only where one leaves the
tree are tokens compared.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from warmprefix_tools.doctor.prompts import PLAIN, Draft, Message
from warmprefix_tools.doctor.segments import WIDTH, SegmentPool, packed

__all__ = ["Outcome", "seen_tokens", "simulate"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cache found in one version of a log, request by request."""

    prompt_tokens: list[int]
    hit_tokens: list[int]
    donors: list[int | None]
    """The first request that had what this one found, or the most of it."""

    def gains(self, before: Outcome) -> list[int]:
        """Return the tokens per request that are no longer computed. Tokens added to a prompt do not count as gains."""
        sizes = zip(self.hit_tokens, before.hit_tokens, self.prompt_tokens, before.prompt_tokens, strict=True)
        return [hits - old_hits - max(tokens - old_tokens, 0) for hits, old_hits, tokens, old_tokens in sizes]


def simulate(
    draft: Draft, models: Sequence[str | None], pool: SegmentPool, block_size: int, capacity_tokens: int | None = None
) -> Outcome:
    """Run a version of the log through a cache of KV blocks; unbounded, or evicting the least recently used."""
    data, bounds, totals = _flat(draft, pool)
    scopes = list(zip(models, draft.salts, strict=True))
    tree = _Tree(data, pool, block_size, capacity_tokens, len(scopes))
    hits, donors = [], []
    for request, (scope, (start, end), total) in enumerate(zip(scopes, pairwise(bounds), totals, strict=True)):
        granule = 1 if request in draft.token_granular else block_size
        walk = tree.serve(request, scope, start, end, total)
        found = walk.tokens if capacity_tokens is None or granule == 1 else walk.resident_tokens
        hits.append(max(min(found, total - 1), 0) // granule * granule)
        donors.append(walk.donor)
    return Outcome(totals, hits, donors)


def _flat(draft: Draft, pool: SegmentPool) -> tuple[bytes, list[int], list[int]]:
    """Render all prompts with the chat template, one after another.

    Returns:
        The segments' numbers; the byte at which each prompt begins, and the last one ends; the tokens of each prompt.
    """
    parts: list[bytes] = []
    bounds, totals = [0], []
    known: dict[Message, tuple[bytes, int]] = {}
    heads: dict[str, tuple[bytes, int]] = {}
    end, end_tokens = _number(pool.message_end), pool.token_counts[pool.message_end]

    def head(role: str) -> tuple[bytes, int]:
        found = heads.get(role)
        if found is None:
            number = pool.message_head(role)
            found = heads[role] = _number(number), pool.token_counts[number]
        return found

    for prompt in draft.prompts:
        first, total = len(parts), 0
        plain = False
        for message in prompt:
            body = known.get(message)
            if body is None:
                body = known[message] = packed(message.ids), pool.count_tokens(message.ids)
            plain = message.role == PLAIN
            if plain:
                parts.append(body[0])
                total += body[1]
            else:
                opening, tokens = head(message.role)
                parts += (opening, body[0], end)
                total += tokens + body[1] + end_tokens
        if not plain:
            opening, tokens = head("assistant")
            parts.append(opening)
            total += tokens
        bounds.append(bounds[-1] + sum(map(len, parts[first:])))
        totals.append(total)
    return b"".join(parts), bounds, totals


def _number(segment: int) -> bytes:
    return segment.to_bytes(WIDTH, sys.byteorder)


def seen_tokens(draft: Draft, models: Sequence[str | None], pool: SegmentPool) -> list[int]:
    """Count per request the tokens of segments that an earlier request of its cache scope had, at any place."""
    data, bounds, totals = _flat(draft, pool)
    seen_by_scope: dict[Hashable, set[int]] = {}
    tokens = []
    for scope, (start, end), total in zip(zip(models, draft.salts, strict=True), pairwise(bounds), totals, strict=True):
        seen = seen_by_scope.setdefault(scope, set())
        ids = array("I", data[start:end])
        new = set(ids) - seen
        tokens.append(total - pool.count_tokens(filter(new.__contains__, ids)))
        seen |= new
    return tokens


@dataclass(slots=True, eq=False)
class _Node:
    """An edge of the tree, a run of segments, and what follows it."""

    start: int
    """Of the edge, in bytes of the flat prompts."""
    end: int
    donor: int
    first_token: int = 0
    """Tokens in front of the edge."""
    last_token: int = 0
    """Tokens up to its end."""
    last_use: int = 0
    children: dict[bytes, _Node] = field(default_factory=dict)
    ways: list[bytes] | None = None
    """The tokens of each child's first segment, sorted."""


@dataclass(slots=True)
class _Walk:
    tokens: int
    donor: int | None
    resident_tokens: int


class _Tree:
    def __init__(
        self, data: bytes, pool: SegmentPool, block_size: int, capacity_tokens: int | None, requests: int
    ) -> None:
        self._data = data
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[Hashable, _Node] = {}
        self._capacity = capacity_tokens
        self._recency = None if capacity_tokens is None else _Recency(requests)

    def serve(self, request: int, scope: Hashable, position: int, stop: int, total: int) -> _Walk:
        """Find the part of one prompt that the tree holds, then add the prompt.

        Args:
            request: The prompt's index.
            scope: Prompts of different scopes share nothing.
            position: The byte at which the prompt begins in the flat prompts.
            stop: The byte at which it ends.
            total: Its tokens.
        """
        data = self._data
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = _Node(0, 0, request)
        path = [node]
        while position < stop:
            key = data[position : position + WIDTH]
            child = node.children.get(key)
            if child is None:
                break
            length = min(child.end - child.start, stop - position)
            if data[position : position + length] != data[child.start : child.start + length]:
                length = _common(data, position, child.start, length)
            if length < child.end - child.start:
                child = self._split(node, child, length)
            position += length
            node = child
            path.append(node)
            if position < stop and data[position : position + WIDTH] not in node.children:
                break
        tokens = node.last_token
        donor = node.donor if node.donor != request else None
        leaf = None
        if position < stop:
            key = data[position : position + WIDTH]
            first = self._pool.packed_tokens(int.from_bytes(key, sys.byteorder))
            common, way = self._nearest(node, first)
            if way is not None:
                tokens += common
            leaf = _Node(position, stop, request, node.last_token, total, request)
            node.children[key] = leaf
            if node.ways is not None:
                insort(node.ways, first)
        resident = tokens
        if self._recency is not None and self._capacity is not None:
            resident = self._recency.touch(path, leaf, tokens, request, self._capacity, self._block_size)
        return _Walk(tokens, donor, resident)

    def _split(self, parent: _Node, child: _Node, length: int) -> _Node:
        """Split an edge after `length` bytes, and return the node in between."""
        middle = child.start + length
        tokens = child.first_token + self._pool.count_tokens(array("I", self._data[child.start : middle]))
        upper = _Node(child.start, middle, child.donor, child.first_token, tokens, child.last_use)
        parent.children[self._data[child.start : child.start + WIDTH]] = upper
        child.start = middle
        child.first_token = tokens
        upper.children[self._data[middle : middle + WIDTH]] = child
        return upper

    def _nearest(self, node: _Node, first: bytes) -> tuple[int, bytes | None]:
        """How many tokens of a segment some child shares."""
        if node.ways is None:
            keys = (int.from_bytes(key, sys.byteorder) for key in node.children)
            node.ways = sorted(map(self._pool.packed_tokens, keys))
        at = bisect_left(node.ways, first)
        best, way = 0, None
        for other in node.ways[max(at - 1, 0) : at + 1]:
            common = _common(first + other, 0, len(first), min(len(first), len(other))) // WIDTH
            if way is None or common > best:
                best, way = common, other
        return best, way


def _common(data: bytes, one: int, other: int, length: int) -> int:
    """Return how many bytes two runs share at their start, in whole numbers."""
    first, second = (int.from_bytes(data[start : start + length], "little") for start in (one, other))
    differ = first ^ second
    if not differ:
        return length
    lowest_bit = (differ & -differ).bit_length() - 1  # in the first byte that differs, because of "little"
    return lowest_bit // (8 * WIDTH) * WIDTH


class _Recency:
    """LRU by stack distance: what is resident, from how much was used since.

    An engine frees a prompt's KV blocks last block first, so of one prompt's blocks the deeper ones go first. Then a
    KV block is resident if it, those used after it, and those of its own last request in front of it fit.
    """

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0

    def touch(
        self, path: list[_Node], leaf: _Node | None, tokens: int, request: int, capacity: int, block_size: int
    ) -> int:
        """Resident tokens of the path; then all of it counts as used by `request`."""
        resident = 0
        gone = False
        section_use, section = -1, 0
        for node in path:
            blocks = _blocks(node, block_size)
            if node.last_use != section_use:
                section_use, section = node.last_use, 0
            if not gone:
                room = capacity // block_size - self._after(node.last_use) - section
                gone = room < blocks
                resident += max(min(room, blocks), 0)
            section += blocks
        for node in path:
            blocks = _blocks(node, block_size)
            self._add(node.last_use, -blocks)
            self._add(request, blocks)
            node.last_use = request
        if leaf is not None:
            self._add(request, _blocks(leaf, block_size))
        return tokens if not gone else resident * block_size

    def _after(self, use: int) -> int:
        """KV blocks last used after that request."""
        upto, index = 0, use + 1
        while index > 0:
            upto += self._sums[index]
            index &= index - 1
        return self._total - upto

    def _add(self, use: int, blocks: int) -> None:
        self._total += blocks
        index = use + 1
        while index < len(self._sums):
            self._sums[index] += blocks
            index += index & -index


def _blocks(node: _Node, block_size: int) -> int:
    """KV blocks that end within the edge."""
    return node.last_token // block_size - node.first_token // block_size
