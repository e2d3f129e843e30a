"""Hits of a prefix cache, computed on segments.

The result is that of the emulator's `PrefixCache`, one request after another and without the answers, but a prompt of
8,000 tokens takes microseconds: prompts follow a radix tree of segments, and tokens are compared only where a prompt
leaves the tree.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from warmprefix_tools.doctor.request_log import (
    PLAIN,
    WIDTH,
    Ids,
    LogMessage,
    LogVersion,
    Memo,
    Prompt,
    SegmentPool,
    packed,
)

__all__ = ["CacheOutcome", "seen_tokens", "shared_tokens", "simulate"]


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """Hits of one version of a log, request by request."""

    prompt_tokens: list[int]
    hit_tokens: list[int]
    donors: list[int | None]
    """First request that had what this one found, or the most of it."""

    def gains(self, before: CacheOutcome) -> list[int]:
        """Return the tokens per request that are no longer computed. Tokens added to a prompt do not count as gains."""
        sizes = zip(self.hit_tokens, before.hit_tokens, self.prompt_tokens, before.prompt_tokens, strict=True)
        return [hits - old_hits - max(tokens - old_tokens, 0) for hits, old_hits, tokens, old_tokens in sizes]


def simulate(
    version: LogVersion, pool: SegmentPool, block_size: int, capacity_tokens: int | None = None
) -> CacheOutcome:
    """Run a version of the log through a cache of KV blocks; unbounded, or evicting the least recently used."""
    data, bounds, totals = _flat(version.prompts, pool)
    tree = _Tree(data, pool, block_size, capacity_tokens, len(totals))
    scopes = zip(version.models, version.salts, strict=True)  # requests of different scopes share nothing
    hits, donors = [], []
    for request, (scope, (start, end), total) in enumerate(zip(scopes, pairwise(bounds), totals, strict=True)):
        granule = 1 if request in version.token_granular else block_size
        tokens, resident_tokens, donor = tree.serve(request, scope, start, end, total)
        found = tokens if granule == 1 else resident_tokens
        hits.append(max(min(found, total - 1), 0) // granule * granule)  # an engine always computes the last token
        donors.append(donor)
    return CacheOutcome(totals, hits, donors)


def seen_tokens(version: LogVersion, pool: SegmentPool) -> list[int]:
    """Count per request the tokens of segments that an earlier request of its cache scope had, at any place."""
    data, bounds, totals = _flat(version.prompts, pool)
    seen_by_scope: dict[Hashable, set[int]] = {}
    tokens = []
    for scope, (start, end), total in zip(
        zip(version.models, version.salts, strict=True), pairwise(bounds), totals, strict=True
    ):
        seen = seen_by_scope.setdefault(scope, set())
        ids = array("I", data[start:end])
        new = set(ids) - seen
        tokens.append(total - pool.count_tokens(filter(new.__contains__, ids)))
        seen |= new
    return tokens


def shared_tokens(version: LogVersion, pool: SegmentPool, one: int, other: int) -> int:
    """Return how many tokens two prompts of one version share at their start, chat template included."""
    if version.salts[one] != version.salts[other]:
        return 0
    data, (_, middle, _), _ = _flat([version.prompts[one], version.prompts[other]], pool, with_answer=False)
    first, second = data[:middle], data[middle:]
    at = _common_bytes(data, 0, middle, min(len(first), len(second)))
    tokens = pool.count_tokens(array("I", first[:at]))
    if at < min(len(first), len(second)):
        one_left, other_left = (
            pool.packed_tokens(int.from_bytes(ids[at : at + WIDTH], sys.byteorder)) for ids in (first, second)
        )
        tokens += _common_tokens(one_left, other_left)
    return tokens


def _flat(
    prompts: Sequence[Prompt], pool: SegmentPool, *, with_answer: bool = True
) -> tuple[bytes, list[int], list[int]]:
    """Render all prompts with the chat template, one after another.

    Returns:
        The segments' numbers; the byte at which each prompt begins, and the last one ends; the tokens of each prompt.
    """

    def part(ids: Ids) -> tuple[bytes, int]:
        return packed(ids), pool.count_tokens(ids)

    bodies = Memo[LogMessage, tuple[bytes, int]](lambda message: part(message.ids))
    heads = Memo[str, tuple[bytes, int]](lambda role: part(array("I", [pool.message_head(role)])))
    end, end_tokens = part(array("I", [pool.message_end]))
    parts: list[bytes] = []
    bounds, totals = [0], []
    for prompt in prompts:
        first, total = len(parts), 0
        for message in prompt:
            body, tokens = bodies[message]
            total += tokens
            if message.role == PLAIN:
                parts.append(body)
            else:
                head, head_tokens = heads[message.role]
                parts += (head, body, end)
                total += head_tokens + end_tokens
        if with_answer and prompt[-1].role != PLAIN:
            head, head_tokens = heads["assistant"]
            parts.append(head)
            total += head_tokens
        bounds.append(bounds[-1] + sum(map(len, parts[first:])))
        totals.append(total)
    return b"".join(parts), bounds, totals


@dataclass(slots=True, eq=False)
class _SegmentNode:
    """An edge of the tree, which is a run of segments, and the edges behind it."""

    start: int
    """First byte of the edge in the flat prompts."""
    end: int
    donor: int
    """First request that had the edge."""
    first_token: int = 0
    """Tokens in front of the edge."""
    last_token: int = 0
    """Tokens up to its end."""
    last_use: int = 0
    children: dict[bytes, _SegmentNode] = field(default_factory=dict)
    ways: list[bytes] | None = None
    """Tokens of each child's first segment, sorted; computed at the first need."""

    def blocks(self, block_size: int) -> int:
        """Return the number of KV blocks that end within the edge."""
        return self.last_token // block_size - self.first_token // block_size


class _Tree:
    def __init__(
        self, data: bytes, pool: SegmentPool, block_size: int, capacity_tokens: int | None, requests: int
    ) -> None:
        self._data = data
        self._pool = pool
        self._roots: dict[Hashable, _SegmentNode] = {}
        self._recency = None if capacity_tokens is None else _Recency(requests, capacity_tokens, block_size)

    def serve(self, request: int, scope: Hashable, at: int, stop: int, total: int) -> tuple[int, int, int | None]:
        """Find the part of one prompt that the tree holds, then add the prompt.

        Args:
            request: Index of the prompt.
            scope: Prompts of different scopes share nothing.
            at: Byte at which the prompt begins in the flat prompts.
            stop: Byte at which it ends.
            total: Tokens of the prompt.

        Returns:
            The tokens that an earlier prompt had, those of them that the cache still holds, and the earlier request.
        """
        data = self._data
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = _SegmentNode(0, 0, request)
        path = [node]
        while at < stop:
            child = node.children.get(data[at : at + WIDTH])
            if child is None:
                break
            length = min(child.end - child.start, stop - at)
            if data[at : at + length] != data[child.start : child.start + length]:
                length = _common_bytes(data, at, child.start, length)
            if length < child.end - child.start:
                child = self._split(node, child, length)
            at += length
            node = child
            path.append(node)
            if at < stop and data[at : at + WIDTH] not in node.children:
                break
        tokens = node.last_token
        donor = node.donor if node.donor != request else None
        leaf = None
        if at < stop:
            key = data[at : at + WIDTH]
            first = self._pool.packed_tokens(int.from_bytes(key, sys.byteorder))
            tokens += self._shared_with_nearest(node, first)
            leaf = node.children[key] = _SegmentNode(at, stop, request, node.last_token, total, request)
            if node.ways is not None:
                insort(node.ways, first)
        resident = tokens if self._recency is None else self._recency.touch(path, leaf, tokens, request)
        return tokens, resident, donor

    def _split(self, parent: _SegmentNode, child: _SegmentNode, length: int) -> _SegmentNode:
        """Split an edge after `length` bytes, and return the node in between."""
        middle = child.start + length
        tokens = child.first_token + self._pool.count_tokens(array("I", self._data[child.start : middle]))
        upper = _SegmentNode(child.start, middle, child.donor, child.first_token, tokens, child.last_use)
        parent.children[self._data[child.start : child.start + WIDTH]] = upper
        child.start = middle
        child.first_token = tokens
        upper.children[self._data[middle : middle + WIDTH]] = child
        return upper

    def _shared_with_nearest(self, node: _SegmentNode, first: bytes) -> int:
        """Return the most tokens that a segment shares with the first one of any child."""
        if node.ways is None:
            keys = (int.from_bytes(key, sys.byteorder) for key in node.children)
            node.ways = sorted(map(self._pool.packed_tokens, keys))
        at = bisect_left(node.ways, first)  # in sorted order, the nearest is a neighbour
        return max((_common_tokens(first, other) for other in node.ways[max(at - 1, 0) : at + 1]), default=0)


def _common_tokens(one: bytes, other: bytes) -> int:
    return _common_bytes(one + other, 0, len(one), min(len(one), len(other))) // WIDTH


def _common_bytes(data: bytes, one: int, other: int, length: int) -> int:
    """Return how many bytes two runs of `data` share at their start, in whole numbers."""
    first, second = (int.from_bytes(data[start : start + length], "little") for start in (one, other))
    differ = first ^ second
    if not differ:
        return length
    lowest_bit = (differ & -differ).bit_length() - 1  # in the first byte that differs, because of "little"
    return lowest_bit // (8 * WIDTH) * WIDTH


class _Recency:
    """LRU by stack distance: residency follows from the KV blocks used since.

    An engine frees a prompt's KV blocks last block first, so the deeper blocks of one prompt go first. A KV block is
    then resident if it, those used after it, and those of its own last request in front of it fit. A Fenwick tree over
    the requests counts the KV blocks by their last use in O(log requests).
    """

    def __init__(self, requests: int, capacity_tokens: int, block_size: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0
        self._capacity = capacity_tokens // block_size
        self._block_size = block_size

    def touch(self, path: list[_SegmentNode], leaf: _SegmentNode | None, tokens: int, request: int) -> int:
        """Return the path's resident tokens; then all of it counts as used by `request`."""
        resident = 0
        gone = False
        section_use, section = -1, 0
        for node in path:
            blocks = node.blocks(self._block_size)
            if node.last_use != section_use:
                section_use, section = node.last_use, 0
            if not gone:
                room = self._capacity - self._used_after(node.last_use) - section
                gone = room < blocks
                resident += max(min(room, blocks), 0)
            section += blocks
        for node in path:
            self._add(node.last_use, -node.blocks(self._block_size))
            node.last_use = request
            self._add(request, node.blocks(self._block_size))
        if leaf is not None:
            self._add(request, leaf.blocks(self._block_size))
        return tokens if not gone else resident * self._block_size

    def _used_after(self, use: int) -> int:
        """Return the number of KV blocks last used after that request."""
        up_to, index = 0, use + 1
        while index > 0:
            up_to += self._sums[index]
            index &= index - 1
        return self._total - up_to

    def _add(self, use: int, blocks: int) -> None:
        self._total += blocks
        index = use + 1
        while index < len(self._sums):
            self._sums[index] += blocks
            index += index & -index
