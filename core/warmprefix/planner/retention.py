"""What one scope's paths deserve beyond the engine's LRU: chosen by ghosts, kept by touches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.ghosts import Ghosts, GhostSample
from warmprefix.order_sharing import LearnedOrder
from warmprefix.plan import Retention, Scope, Touch
from warmprefix.prefix.eviction import TreeNode, path_to
from warmprefix.prefix.tree import PrefixTree
from warmprefix.residency.usage import EngineReport

__all__ = ["ScopeRetention", "can_touch"]

_LRU = (None, 0)
_PRIORITIES = (None, 30, 200)
"""Requests of age that each hit of a path counts as, for an engine that takes priorities; None for no touches."""
_TOUCH_TOKENS = 18
"""Tokens that a touch costs: the rest of a KV block, and an answer."""
_LEAST_LEARNED = 16
"""Requests before there are ghosts."""
_MOST_NODES = 4_096
"""Of each ghost."""
_KV_BLOCK = 64
"""Tokens that may be missing of a path that an engine holds, at most."""
_MOST_NAMED = 256
_MOST_AT_RISK = 256
"""Nodes that are examined for touches."""
_AHEAD = 2
"""Mean requests before whose tokens would evict a path it is named."""
_UNSEEN = 0.06
"""Share of the cache that other text takes, such as questions and answers."""
_MOST_TURNS = 16
"""Most times that requests fill the cache anew while a hit counts."""
_NEW_DECAY = 0.9
_TRUST_DECAY = 0.75
_LEAST_TRUST = 0.5
_RECOVERY = 1 / 256
"""Lost trust that a request restores: the capacity may be known better by now."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4_096
"""Requests without a touch after too many paths were gone."""


def can_touch(profile: CacheProfile) -> bool:
    """Return True if touches keep a path in such a cache."""
    others = (profile.checkpoints, profile.marks, profile.slots, profile.lifetime)
    return all(other is None for other in others) and not profile.read_price


def at_risk(tree: PrefixTree[bytes], tokens: int, capacity: int, unseen: int = 0) -> list[TreeNode[bytes]]:
    """Return the nodes with hits that `tokens` more would evict, the first one first; of a path only the last.

    Those are gone already for which the `unseen` tokens in the cache leave no room.
    """
    tokens += unseen
    ahead = tree.resident_tokens + tokens - capacity
    found: list[TreeNode[bytes]] = []
    passed: set[TreeNode[bytes]] = set()
    for node in islice(tree.order, _MOST_AT_RISK):
        if ahead <= 0:
            break
        if (
            node not in passed
            and ahead <= tokens - unseen
            and node.hits
            and node.resident
            and node.used < tree.order.now
        ):
            found.append(node)
            above = node.parent
            while above is not None and above not in passed:
                passed.add(above)
                above = above.parent
        if node.resident:
            ahead -= sum(node.tokens)
    return found


class _Named(NamedTuple):
    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]
    age: int


class ScopeRetention:
    """Which paths of one scope are touched. Not thread-safe: callers hold the planner's lock.

    Each hit of a path pays for one touch when the path is about to be evicted. The ghosts show what touches would save,
    and what each hit should count as.
    """

    __slots__ = (
        "_bonuses",
        "_ghosts",
        "_learned",
        "_named",
        "_new_tokens",
        "_pause",
        "_paused_until",
        "_tokens",
        "_trust",
        "choice",
        "eviction",
        "sample",
    )

    def __init__(self, profile: CacheProfile) -> None:
        self.eviction = profile.eviction
        self._bonuses = _PRIORITIES if profile.eviction == "priority" else _LRU
        self.choice: Ghosts[int | None] = Ghosts(self._bonuses)
        self.sample = GhostSample()
        self._learned = 0
        self._ghosts: list[PrefixTree[bytes]] = []
        self._named: OrderedDict[tuple[str, int], _Named] = OrderedDict()
        self._new_tokens = 0.0
        """Tokens that a request adds to the cache, about."""
        self._tokens = 0.0
        """Tokens of a request, about."""
        self._trust = 1.0
        """Share of the touched paths that were still there."""
        self._pause, self._paused_until = _FIRST_PAUSE, 0

    def learn(self, order: LearnedOrder, held: int, tree: PrefixTree[bytes], capacity: int | None) -> None:
        """Serve an order from each ghost, if they see it; its mirror found `held` tokens. O(ghosts * blocks)."""
        keys, tokens, ranks = order
        total = sum(tokens)
        self._new_tokens = _NEW_DECAY * self._new_tokens + (1 - _NEW_DECAY) * (total - held)
        self._tokens = _NEW_DECAY * self._tokens + (1 - _NEW_DECAY) * total
        self._learned += 1
        self._trust += (1 - self._trust) * _RECOVERY
        if capacity is None or not total:
            return
        if not self._ghosts:
            # Nothing has been evicted before.
            if self._learned < _LEAST_LEARNED or tree.resident_tokens + total < capacity:
                return
            is_small = tree.nodes <= _MOST_NODES
            self._ghosts = [tree.copy() if is_small else PrefixTree(capacity) for _ in self._bonuses]
        part = self.sample.fit(capacity, self._tokens)
        if not self.sample.sees(keys[0]):
            return
        relevance = sorted(range(len(keys)), key=ranks.__getitem__)
        by_rank = [keys[i] for i in relevance]
        saved = []
        for bonus, ghost in zip(self._bonuses, self._ghosts, strict=True):
            ghost.capacity_tokens, ghost.max_nodes = part, _MOST_NODES
            ghost.order.now = max(ghost.order.now, tree.order.now - 1)
            path = [relevance[i] for i in ghost.deepest_path(by_rank)]
            placed = set(path)
            path += [i for i in range(len(keys)) if i not in placed]
            hit: float = ghost.insert([keys[i] for i in path], [tokens[i] for i in path]).tokens
            if bonus is not None:
                age = self._age(bonus, capacity)
                for node in at_risk(ghost, round(_AHEAD * self._new_tokens), part):
                    ghost.touch_node(node, age * node.hits)
                    hit -= _TOUCH_TOKENS + (1 - self._trust) * sum(path_to(node)[1])
            saved.append(hit / total)
        self.choice.score(saved)

    def of_order(self, tree: PrefixTree[bytes], keys: Sequence[bytes]) -> Retention | None:
        """Return what the first blocks of an order deserve; None as long as touches do not pay."""
        bonus = self.choice.best
        if bonus is None:
            return None
        blocks, hits = tree.match_hits(keys)
        return Retention(blocks, self._age(bonus, tree.capacity_tokens) * hits)

    def touches(
        self,
        scope: Scope,
        tree: PrefixTree[bytes],
        capacity: int | None,
        most: int,
        is_awaited: Callable[[Sequence[bytes]], bool],
    ) -> list[Touch]:
        """Return the paths to touch now, in a mirror that has this part of the engine's cache.

        Not those that `is_awaited` finds in a waiting request, whose own use keeps them.
        """
        bonus = self.choice.best
        if bonus is None or capacity is None or tree.order.now < self._paused_until:
            return []
        found: list[Touch] = []
        age = self._age(bonus, capacity)
        for node in at_risk(tree, round(_AHEAD * self._new_tokens), capacity, round(_UNSEEN * capacity)):
            if len(found) == most:
                break
            if node.served_by is not None:
                keys, tokens = path_to(node)
                touch = Touch(scope, node.served_by, len(keys), sum(tokens), age * node.hits)
                if touch[1:3] not in self._named and not is_awaited(keys):
                    self._named[touch.plan_id, touch.blocks] = _Named(keys, tokens, touch.priority)
                    found.append(touch)
                    if len(self._named) > _MOST_NAMED:
                        self._named.popitem(last=False)
        if self._trust < _LEAST_TRUST and found:
            # Only to see whether paths are found again.
            del found[1:]
            self._paused_until = tree.order.now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return found

    def _age(self, bonus: int, capacity: int | None) -> int:
        """Return the requests of age that a hit counts as: no more than the cache's turns, in powers of two."""
        turns = int(_MOST_TURNS * (capacity or 0) / max(self._new_tokens, 1))
        return min(bonus, 1 << max(turns.bit_length() - 1, 0))

    def answered(self, touch: Touch, report: EngineReport) -> _Named | None:
        """Return the path of a touch that the engine has answered; None for one that was answered before.

        Without reports, the planner stops touching.
        """
        named = self._named.pop((touch.plan_id, touch.blocks), None)
        if named is not None:
            # An engine that reports nothing has not said that it held the path.
            cached = report.cached_tokens or 0
            found = (report.prompt_tokens or touch.tokens) - cached <= touch.tokens / 2 + _KV_BLOCK and cached > 0
            self._trust = _TRUST_DECAY * self._trust + (1 - _TRUST_DECAY) * found
            if self._trust >= _LEAST_TRUST:
                self._pause, self._paused_until = _FIRST_PAUSE, 0
        return named
