"""SGLang's prefix cache: a radix tree of tokens that evicts the leaf with the lowest priority.

The rules are those of `UnifiedRadixCache` with `--radix-eviction-policy priority` and pages of one token:

- a prompt is matched up to its last token but one, and the tree is split where the match ends;
- a computed prompt, and later the prompt with its answer, is inserted with the request's priority, 0 without one;
- a node has the highest priority that was inserted through it. It never falls, and a match alone does not raise it;
- the prompt of an answered request has one more than its answer, so answers leave first;
- the leaf with the lowest priority is evicted, of equals the one that was used least recently, always as a whole; its
  parent may follow. What running requests use stays;
- a split counts as a use of the part behind it.

Nothing here waits, reads a clock or does I/O. Not thread-safe: one engine owns one cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt
from warmprefix_tools.caches.slots import common_prefix

__all__ = ["RadixTreeCache"]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens behind those of its parents."""

    tokens: Sequence[int]
    parent: _Node | None
    priority: int
    used_at: int
    children: dict[int, _Node] = field(default_factory=dict)
    holders: int = 0
    """Running requests that use it."""

    def path(self) -> Iterator[_Node]:
        """Yield the node and its parents but the root, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class _RadixAdmission:
    """A prompt whose request runs."""

    cache: RadixTreeCache
    prompt: MarkedPrompt
    use: CacheUse
    node: _Node
    room: int
    answer: list[int] = field(default_factory=list)

    def store(self, now: float) -> None:
        self.cache.store(self)

    def append(self, token_id: int) -> None:
        self.cache.append(self, token_id)

    def free(self) -> None:
        self.cache.free(self)


class RadixTreeCache:
    """The tree of one engine. An eviction is O(nodes), all else O(tokens).

    Raises:
        ValueError: `capacity_tokens` is below 1.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"capacity_tokens must be 1 or more, got {capacity_tokens}")
        self.capacity_tokens = capacity_tokens
        self._time = count()
        self._roots: dict[str | None, _Node] = {}
        self._held_tokens = 0
        """Tokens in the trees."""
        self._running_tokens = 0
        """Tokens that running requests have outside of the trees."""
        self._reserved = 0
        """Tokens that `append` may still need."""
        self._running: set[_RadixAdmission] = set()

    @property
    def usage(self) -> float:
        """Share of the capacity in use by running requests, 0 to 1."""
        return (self._running_tokens + self._pinned_tokens()) / self.capacity_tokens

    @property
    def num_sequences(self) -> int:
        """Number of running requests."""
        return len(self._running)

    def admit(self, prompt: MarkedPrompt, now: float = 0.0, *, room_for: int = 0) -> _RadixAdmission | None:
        """Look a prompt up and make room for the rest of it; None if running requests leave too little."""
        node, read = self._match(prompt)
        uncached = len(prompt.tokens) - read
        self._hold(node)
        taken = self._running_tokens + self._reserved + self._pinned_tokens(node)
        if uncached + room_for > self.capacity_tokens - taken:
            self._release(node)
            return None
        self._running_tokens += uncached
        self._reserved += room_for
        use = CacheUse(read, (0,), uncached)
        admission = _RadixAdmission(self, prompt, use, node, room_for)
        self._running.add(admission)
        self._evict()
        return admission

    def store(self, admission: _RadixAdmission) -> None:
        """Insert a computed prompt."""
        prompt = admission.prompt
        self._keep(admission, prompt.tokens, len(prompt.tokens) - admission.use.read)

    def append(self, admission: _RadixAdmission, token_id: int) -> None:
        """Record one generated token whose KV is computed."""
        admission.answer.append(token_id)
        admission.room -= 1
        self._running_tokens += 1
        self._reserved -= 1
        self._evict()

    def free(self, admission: _RadixAdmission) -> None:
        """Insert the prompt with its answer if the prompt was computed, and hold them no longer."""
        prompt, answer = admission.prompt, admission.answer
        is_stored = sum(len(node.tokens) for node in admission.node.path()) == len(prompt.tokens)
        if is_stored and answer:
            self._keep(admission, [*prompt.tokens, *answer], len(answer))
            self._insert(prompt.tokens, prompt.salt, (prompt.priority or 0) + 1)
        self._running.remove(admission)
        self._reserved -= admission.room
        self._running_tokens -= 0 if is_stored else admission.use.uncached
        self._release(admission.node)

    def reset(self) -> bool:
        """Forget everything; return False, and do nothing, if requests are running."""
        if self._running:
            return False
        self._roots.clear()
        self._held_tokens = 0
        return True

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _root(self, salt: str | None) -> _Node:
        return self._roots.setdefault(salt, _Node((), None, 0, 0))

    def _match(self, prompt: MarkedPrompt) -> tuple[_Node, int]:
        """Return the deepest node of a prompt, and its tokens up to there."""
        node, read = self._root(prompt.salt), 0
        tokens = prompt.tokens[:-1]
        while (child := node.children.get(tokens[read]) if read < len(tokens) else None) is not None:
            common = common_prefix(child.tokens, tokens[read : read + len(child.tokens)])
            read += common
            if common < len(child.tokens):
                node = self._split(child, common)
                break
            node = child
        path = [*node.path()]
        for each in reversed(path):  # the deepest counts as the newest
            each.used_at = next(self._time)
        return node, read

    def _insert(self, tokens: Sequence[int], salt: str | None, priority: int) -> _Node:
        node, place = self._root(salt), 0
        while (child := node.children.get(tokens[place]) if place < len(tokens) else None) is not None:
            child.used_at = next(self._time)
            common = common_prefix(child.tokens, tokens[place : place + len(child.tokens)])
            place += common
            node = child if common == len(child.tokens) else self._split(child, common)
            node.priority = max(node.priority, priority)
        if place < len(tokens):
            rest = tuple(tokens[place:])
            child = node.children[rest[0]] = _Node(rest, node, priority, next(self._time))
            self._held_tokens += len(rest)
            node = child
        return node

    def _split(self, child: _Node, length: int) -> _Node:
        """Put a node with the first tokens in front of a node; return it."""
        parent = child.parent
        assert parent is not None
        upper = _Node(child.tokens[:length], parent, child.priority, next(self._time), holders=child.holders)
        child.tokens = child.tokens[length:]
        child.parent, child.used_at = upper, next(self._time)
        upper.children[child.tokens[0]] = child
        parent.children[upper.tokens[0]] = upper
        return upper

    def _keep(self, admission: _RadixAdmission, tokens: Sequence[int], own: int) -> None:
        """Insert the tokens of a request, `own` of which it had outside of the tree, and hold them."""
        prompt = admission.prompt
        node = self._insert(tokens, prompt.salt, prompt.priority or 0)
        self._running_tokens -= own
        self._hold(node)
        self._release(admission.node)
        admission.node = node

    def _hold(self, node: _Node) -> None:
        for each in node.path():
            each.holders += 1

    def _release(self, node: _Node) -> None:
        for each in node.path():
            each.holders -= 1

    def _pinned_tokens(self, *more: _Node) -> int:
        """Return the tokens of the trees that running requests use, or would use with these nodes."""
        deepest = [*more, *(admission.node for admission in self._running)]
        return sum(len(node.tokens) for node in {node for last in deepest for node in last.path()})

    def _evict(self) -> None:
        """Evict leaves until all that is held and needed fits."""
        excess = self._held_tokens + self._running_tokens - self.capacity_tokens
        if excess <= 0:
            return
        leaves = [(node.priority, node.used_at, node) for node in self._leaves() if not node.holders]
        heapq.heapify(leaves)
        while excess > 0 and leaves:
            *_, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.tokens[0]]
            self._held_tokens -= len(leaf.tokens)
            excess -= len(leaf.tokens)
            if parent.parent is not None and not parent.children and not parent.holders:
                heapq.heappush(leaves, (parent.priority, parent.used_at, parent))

    def _leaves(self) -> Iterator[_Node]:
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        while nodes:
            node = nodes.pop()
            if node.children:
                nodes += node.children.values()
            else:
                yield node
