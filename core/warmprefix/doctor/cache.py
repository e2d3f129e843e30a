"""How much of each prompt a prefix cache would find, worked out on segments.

The result is that of the emulator's `PrefixCache`, one request after another and without the answers, but a prompt of
8,000 tokens costs some microseconds: prompts are walked along a radix tree of segments, and only where one leaves the
tree are tokens compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from warmprefix.doctor.prompts import PLAIN, Draft
from warmprefix.doctor.segments import EMPTY, SegmentPool
from warmprefix.errors import MissingExtraError

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError as exc:
    raise MissingExtraError("doctor", "numpy") from exc

__all__ = ["Outcome", "seen_tokens", "simulate"]

_WIDTH = 4
"""Bytes of a segment's number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cache found in one version of a log, request by request."""

    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    donors: list[int | None]
    """The first request that had what this one found, or the most of it."""

    def gains(self, before: Outcome) -> NDArray[np.int64]:
        """Tokens that no longer are computed, by request; what a mend adds to a prompt and then finds is none."""
        longer = np.maximum(self.prompt_tokens - before.prompt_tokens, 0)
        gains: NDArray[np.int64] = self.hit_tokens - before.hit_tokens - longer
        return gains


def simulate(
    draft: Draft, models: Sequence[str | None], pool: SegmentPool, block_size: int, capacity_tokens: int | None = None
) -> Outcome:
    """Run a version of the log through a cache of KV blocks; unbounded, or evicting the least recently used."""
    ids, starts = _flat(draft, pool)
    counts = pool.token_counts[ids]
    before = np.concatenate(([0], np.cumsum(counts)))
    scopes = list(zip(models, draft.salts, strict=True))
    tree = _Tree(ids.tobytes(), pool, block_size, capacity_tokens, len(scopes))
    totals = np.diff(before[starts])
    bounds = starts.tolist()
    hits, donors = [], []
    for request, scope in enumerate(scopes):
        total = int(totals[request])
        granule = 1 if request in draft.token_granular else block_size
        walk = tree.serve(request, scope, bounds[request], bounds[request + 1], before)
        found = walk.tokens if capacity_tokens is None or granule == 1 else walk.resident_tokens
        hits.append(max(min(found, total - 1), 0) // granule * granule)
        donors.append(walk.donor)
    return Outcome(totals, np.array(hits, np.int64), donors)


def _flat(draft: Draft, pool: SegmentPool) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All prompts as the chat template renders them, one after another, and where each begins."""
    parts: list[NDArray[np.uint32]] = []
    lengths: list[int] = []
    end = np.array([pool.message_end], np.uint32)
    heads: dict[str, NDArray[np.uint32]] = {}

    def head(role: str) -> NDArray[np.uint32]:
        found = heads.get(role)
        if found is None:
            found = heads[role] = np.array([pool.message_head(role)], np.uint32)
        return found

    for prompt in draft.prompts:
        first = len(parts)
        plain = False
        for message in prompt:
            plain = message.role == PLAIN
            if plain:
                parts.append(message.ids)
            else:
                parts += (head(message.role), message.ids, end)
        if not plain:
            parts.append(head("assistant"))
        lengths.append(sum(map(len, parts[first:])))
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    starts = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64))))
    kept = ids != EMPTY
    if kept.all():
        return ids, starts
    return ids[kept], np.concatenate(([0], np.cumsum(kept)))[starts]


def seen_tokens(draft: Draft, models: Sequence[str | None], pool: SegmentPool) -> NDArray[np.int64]:
    """For each request, tokens of segments that some earlier request of its cache scope had, wherever they stood."""
    ids, starts = _flat(draft, pool)
    scopes = list(zip(models, draft.salts, strict=True))
    numbers: dict[Hashable, int] = {}
    scope_of = np.array([numbers.setdefault(scope, len(numbers)) for scope in scopes], np.int64)
    owners = np.repeat(np.arange(len(scopes)), np.diff(starts))
    keys = scope_of[owners] << 32 | ids
    order = np.argsort(keys, kind="stable")
    opens = np.concatenate(([True], keys[order][1:] != keys[order][:-1]))[: len(order)]
    first = np.empty(len(order), np.int64)
    first[order] = owners[order][np.maximum.accumulate(np.where(opens, np.arange(len(order)), 0))]
    seen = first < owners
    counts = pool.token_counts[ids]
    return np.bincount(owners[seen], weights=counts[seen], minlength=len(scopes)).astype(np.int64)


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

    def serve(self, request: int, scope: Hashable, start: int, end: int, before: NDArray[np.int64]) -> _Walk:
        """Find how much of one prompt the tree holds, then add the prompt."""
        data = self._data
        position, stop, base = start * _WIDTH, end * _WIDTH, int(before[start])
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = _Node(0, 0, request)
        path = [node]
        while position < stop:
            key = data[position : position + _WIDTH]
            child = node.children.get(key)
            if child is None:
                break
            length = min(child.end - child.start, stop - position)
            if data[position : position + length] != data[child.start : child.start + length]:
                length = _common(data, position, child.start, length)
            if length < child.end - child.start:
                child = self._split(node, child, length, int(before[(position + length) // _WIDTH]) - base)
            position += length
            node = child
            path.append(node)
            if position < stop and data[position : position + _WIDTH] not in node.children:
                break
        tokens = int(before[position // _WIDTH]) - base
        donor = node.donor if node.donor != request else None
        leaf = None
        if position < stop:
            key = data[position : position + _WIDTH]
            first = self._pool.packed_tokens(int.from_bytes(key, "little"))
            common, way = self._nearest(node, first)
            if way is not None:
                tokens += common
            leaf = _Node(
                position, stop, request, int(before[position // _WIDTH]) - base, int(before[end]) - base, request
            )
            node.children[key] = leaf
            if node.ways is not None:
                insort(node.ways, first)
        resident = tokens
        if self._recency is not None and self._capacity is not None:
            resident = self._recency.touch(path, leaf, tokens, request, self._capacity, self._block_size)
        return _Walk(tokens, donor, resident)

    def _split(self, parent: _Node, child: _Node, length: int, tokens: int) -> _Node:
        upper = _Node(child.start, child.start + length, child.donor, child.first_token, tokens, child.last_use)
        parent.children[self._data[child.start : child.start + _WIDTH]] = upper
        child.start += length
        child.first_token = tokens
        upper.children[self._data[child.start : child.start + _WIDTH]] = child
        return upper

    def _nearest(self, node: _Node, first: bytes) -> tuple[int, bytes | None]:
        """How many tokens of a segment some child shares."""
        if node.ways is None:
            keys = (int.from_bytes(key, "little") for key in node.children)
            node.ways = sorted(map(self._pool.packed_tokens, keys))
        at = bisect_left(node.ways, first)
        best, way = 0, None
        for other in node.ways[max(at - 1, 0) : at + 1]:
            common = _common(first + other, 0, len(first), min(len(first), len(other))) // _WIDTH
            if way is None or common > best:
                best, way = common, other
        return best, way


def _common(data: bytes, one: int, other: int, length: int) -> int:
    """How many bytes two runs share at their start, in whole numbers."""
    if data[one : one + length] == data[other : other + length]:
        return length
    count = length // _WIDTH
    differ = np.frombuffer(data, "<u4", count, one) != np.frombuffer(data, "<u4", count, other)
    return int(differ.argmax()) * _WIDTH


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
