"""A path-compressed radix tree of blocks, which predicts the engine's cache.

Each path from the root is an order in which blocks were served. A node holds the run of blocks on the edge that
leads to it, so a request that shares nothing costs one node, whatever its length.

The tree mirrors the engine's eviction: blocks leave from the tail of the least recently served path, as in vLLM, or
from the tail of the path with the lowest priority. A feed from the engine corrects its predictions through
`mark_resident` and `mark_stale`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from warmprefix.errors import check_count
from warmprefix.prefix.eviction import MOST_HITS, EvictionOrder, TreeNode, path_to, unlink

__all__ = ["SEARCH_BUDGET", "PrefixMatch", "PrefixTree", "may_stand", "ranks_of_children"]

K = TypeVar("K", bound=Hashable)

SEARCH_BUDGET = 128
"""Most edges that `PrefixTree.deepest_path` walks by default."""


Places = Collection[int]
"""Indices of blocks."""


Trail = tuple["Trail", list[int]] | None
"""A path as a linked list of runs of indices, last run first, so that siblings share their beginning."""


class PrefixMatch(NamedTuple):
    """The resident part of a sequence, from its first block on."""

    blocks: int
    """Number of resident blocks."""
    tokens: int
    """Tokens of these blocks."""


class PrefixTree(Generic[K]):
    """Served orders of blocks and their resident parts, bounded in tokens and nodes.

    Keys are any hashable, in practice fingerprints; a path holds each key once. Not thread-safe: the planner calls it
    under its lock.

    >>> tree = PrefixTree[str]()
    >>> tree.insert(["A", "B", "C"], [100, 50, 50])
    PrefixMatch(blocks=0, tokens=0)
    >>> tree.match_prefix(["A", "B", "X"])
    PrefixMatch(blocks=2, tokens=150)
    >>> tree.deepest_path(["X", "B", "A"])
    [2, 1]
    """

    def __init__(self, capacity_tokens: int | None = None, max_nodes: int = 65_536) -> None:
        """Start empty.

        Args:
            capacity_tokens: Tokens of context that the engine's cache can hold; None for no bound.
            max_nodes: Most nodes, without the root. One `insert` adds at most two.
        """
        check_count("capacity_tokens", capacity_tokens, optional=True)
        check_count("max_nodes", max_nodes)
        self.capacity_tokens = capacity_tokens
        self.max_nodes = max_nodes
        self.clear()

    def clear(self) -> None:
        """Remove all paths, as an engine does that clears all its KV blocks."""
        self._root: TreeNode[K] = TreeNode([], [], None, resident=True)
        self.order: EvictionOrder[K] = EvictionOrder(self._root)
        self._nodes = 0
        self._blocks = 0
        self._resident_tokens = 0

    @property
    def nodes(self) -> int:
        """Number of nodes, without the root."""
        return self._nodes

    @property
    def blocks(self) -> int:
        """Number of blocks on all edges, resident or not."""
        return self._blocks

    @property
    def resident_tokens(self) -> int:
        """Tokens of all resident blocks."""
        return self._resident_tokens

    def match_prefix(self, keys: Sequence[K]) -> PrefixMatch:
        """Return the longest resident prefix of `keys`, unchanged. O(blocks matched)."""
        matched = tokens = 0
        for node, shared in self._walk(keys):
            if not node.resident:
                break
            matched += shared
            tokens += sum(node.tokens[:shared])
        return PrefixMatch(matched, tokens)

    def match_hits(self, keys: Sequence[K]) -> tuple[int, int]:
        """Return the number of resident blocks that `keys` begins with, and the hits of the last with this request."""
        matched = hits = 0
        for node, shared in self._walk(keys):
            if not node.resident:
                break
            matched, hits = matched + shared, min(node.hits + 1, MOST_HITS)
        return matched, hits

    def match_junction(self, keys: Sequence[K]) -> PrefixMatch:
        """Return the longest resident prefix of `keys` whose end two requests had in common. O(blocks matched).

        There an engine that keeps checkpoints has one, perhaps rounded down; see `warmprefix.cache_profiles`.

        >>> tree = PrefixTree[str]()
        >>> _ = tree.insert("AB", [100, 50]), tree.insert("AC", [100, 50])
        >>> tree.match_prefix("ABD"), tree.match_junction("ABD")
        (PrefixMatch(blocks=2, tokens=150), PrefixMatch(blocks=1, tokens=100))
        """
        matched = tokens = 0
        found = PrefixMatch(0, 0)
        for node, shared in self._walk(keys):
            if not node.resident or shared < len(node.keys):
                break
            matched += shared
            tokens += sum(node.tokens)
            if node.is_junction:
                found = PrefixMatch(matched, tokens)
        return found

    def deepest_path(
        self, keys: Sequence[K], after: Sequence[K] = (), budget: int | None = SEARCH_BUDGET, joined: Places = ()
    ) -> list[int]:
        """Return the resident path of most tokens behind `after`, as indices of `keys`.

        Depth-first, children in the order of `keys`. A subtree is skipped if its reach cannot beat the best path so
        far, and the search ends with a path that holds all `keys`.

        Args:
            keys: Distinct blocks in relevance order; of two paths with equal tokens the more relevant wins.
            after: Blocks already placed in front. The path is empty unless they are resident.
            budget: Most edges walked; after that, the best path so far is returned. None for an exact result, at a cost
                that grows with the nodes of the tree.
            joined: The `keys` that stay directly behind the one before them. The path may end in front of one.
        """
        if (start := self.locate(after) if after else (self._root, 0)) is None:
            return []
        root, begin = start
        index = {key: i for i, key in enumerate(keys)}
        best: Trail = None
        best_tokens = 0
        edges_left = -1 if budget is None else budget
        # Edges to walk: node, offset into its edge, blocks placed and tokens matched before it, and their trail.
        stack: list[tuple[TreeNode[K], int, int, int, Trail]] = [(root, begin, 0, 0, None)]
        while stack and edges_left:
            node, offset, placed, matched, trail = stack.pop()
            if matched + node.reach <= best_tokens:
                continue
            edges_left -= 1
            run: list[int] = []
            last = -1 if trail is None else trail[1][-1]
            for key in node.keys[offset:] if offset else node.keys:
                i = index.get(key)
                if i is None or (joined and not may_stand(i, last, joined)):
                    break
                run.append(last := i)
            if run:
                placed += len(run)
                matched += sum(node.tokens[offset : offset + len(run)])
                trail = (trail, run)
                if matched > best_tokens:
                    best, best_tokens = trail, matched
                if placed == len(keys):
                    break
            if offset + len(run) == len(node.keys) and node.children:
                ranks = ranks_of_children(node, index)
                for i in reversed([i for i in ranks if may_stand(i, last, joined)] if joined else ranks):
                    child = node.children[keys[i]]
                    if matched + child.reach > best_tokens:
                        stack.append((child, 0, placed, matched, trail))
        return unwind(best)

    def resident_paths(self) -> Iterator[tuple[list[K], list[int]]]:
        """Yield the resident paths and their blocks' lengths, least recently served first.

        These are the maximal paths, each followed by its parts that were served again later. Inserting them in this
        order into an empty tree makes a tree that evicts the same blocks in the same order.
        """
        older = self._root
        for node in self.order:
            if node.resident:
                older, before = node, older
                if before.parent is node:
                    continue  # as old as that path
                keys, lengths = path_to(node)
                yield [*keys], [*lengths]

    def copy(self) -> PrefixTree[K]:
        """Return a tree of the resident blocks with the same eviction order. O(blocks)."""
        other = PrefixTree[K](self.capacity_tokens, self.max_nodes)
        other.order.now = self.order.now
        other._root.reach = self._root.reach
        copies = {self._root: other._root}
        for node in reversed([*self.order]):  # so each comes after its parent
            if node.resident and node.parent is not None:
                above = copies[node.parent]
                copies[node] = twin = TreeNode(node.keys[:], node.tokens[:], above, resident=True)
                twin.reach, twin.is_junction = node.reach, node.is_junction
                above.children[twin.keys[0]] = twin
                other.order.add_copy(node, twin)
        other._nodes = len(copies) - 1
        other._blocks = sum([len(node.keys) for node in copies])
        other._resident_tokens = self._resident_tokens
        return other

    def insert(self, keys: Sequence[K], tokens: Sequence[int], served_by: str | None = None) -> PrefixMatch:
        """Record that the engine holds `keys` in this order, and evict down to the bounds.

        A block that is already on the path keeps its first length. O(len(keys)), amortised over the evicted blocks.

        Args:
            keys: The blocks that a request has served.
            tokens: Their lengths.
            served_by: Name of the request.

        Returns:
            The part of `keys` that was resident before.

        Raises:
            ValueError: `keys` holds a block twice, or differs in length from `tokens`.
        """
        distinct = len(set(keys))
        if not distinct == len(keys) == len(tokens):
            got = f"{len(keys)} keys ({distinct} distinct) and {len(tokens)} lengths"
            raise ValueError(f"keys must be distinct and have one length each in tokens, got {got}")
        last, held, match = self._find_or_add(keys, tokens)
        held.is_junction = match.blocks > 0
        self._count_request()
        self._use(last)
        while last.parent is not None:
            last.served_by = served_by
            last = last.parent
        while held.parent is not None:
            held.hits = min(held.hits + 1, MOST_HITS)
            held = held.parent
        self._fit()
        return match

    def touch(self, keys: Sequence[K], tokens: Sequence[int], age: int = 0) -> None:
        """Record that the engine was asked for these blocks only to keep them, for the price of one of their hits.

        It keeps them `age` requests longer than its LRU would. O(len(keys)), amortised over the evicted blocks.
        """
        last, _, _ = self._find_or_add(keys, tokens)
        self._count_request()
        self.touch_node(last, age)
        self._fit()

    def touch_node(self, node: TreeNode[K], age: int) -> None:
        """Touch the path to a node; see `touch`."""
        node.hits = max(node.hits - 1, 0)
        self._use(node, age)

    def _find_or_add(self, keys: Sequence[K], tokens: Sequence[int]) -> tuple[TreeNode[K], TreeNode[K], PrefixMatch]:
        """Make a path resident; return its last node, and the last one that was resident before with what it ends."""
        node, position = self._root, 0
        held, held_blocks, held_tokens = self._root, 0, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                child = self._add_leaf(node, list(keys[position:]), list(tokens[position:]))
                position = len(keys)
            else:
                shared = shared_prefix(child.keys, keys, position)
                if shared < len(child.keys):
                    child = self._split(child, shared)
                position += shared
                if child.resident:
                    held, held_blocks, held_tokens = child, position, held_tokens + sum(child.tokens)
                else:
                    child.hits = 0
                    self._set_resident(child, True)
            node = child
        return node, held, PrefixMatch(held_blocks, held_tokens)

    def mark_resident(self, keys: Sequence[K]) -> int:
        """Mark this prefix as resident, as far as the tree has it; its age stays.

        Returns:
            The number of `keys` that are marked.
        """
        marked = 0
        for found, shared in list(self._walk(keys)):  # all found before any is split
            node = self._split(found, shared) if shared < len(found.keys) and not found.resident else found
            self._set_resident(node, True)
            marked += shared
        self._fit()
        return marked

    def set_path(self, keys: Sequence[K], resident_blocks: int, checkpoints: Sequence[int] | None = None) -> None:
        """Mark the first `resident_blocks` of this path as resident, and all behind them as not.

        With `checkpoints`, the ascending numbers of blocks behind which the engine continues, exactly these count as
        ends that requests have in common. O(len(keys) + nodes below them).
        """
        self.mark_resident(keys[:resident_blocks])
        self.mark_stale(keys, resident_blocks)
        if checkpoints is not None:
            self._set_junctions(keys[:resident_blocks], checkpoints)

    def _set_junctions(self, keys: Sequence[K], ends: Sequence[int]) -> None:
        depth = 0
        for node, shared in list(self._walk(keys)):  # all found before any is split
            start, depth = depth, depth + shared
            if shared == len(node.keys):
                node.is_junction = depth in ends
            for end in ends:
                if start < end < depth or (end == depth and not node.is_junction):
                    self._split(node, end - start).is_junction = True
                    start = end
        self._fit()

    def mark_stale(self, keys: Sequence[K], resident_blocks: int = 0) -> None:
        """Mark all but the first `resident_blocks` of this path as not resident.

        This includes all paths below them. The nodes stay and can be marked resident again. O(nodes below that point).
        """
        depth = 0
        for node, shared in self._walk(keys):
            if depth + shared > resident_blocks:
                if depth < resident_blocks:
                    self._split(node, resident_blocks - depth)
                stack = [node]
                while stack:
                    node = stack.pop()
                    if node.resident:
                        self._set_resident(node, False)
                        stack.extend(node.children.values())
                break
            depth += shared
        self._fit()

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` tokens, least recent tails first; return those freed."""
        before = self._resident_tokens
        target = max(before - tokens, 0)
        while self._resident_tokens > target:
            leaf = self.order.next_leaf()
            while leaf.keys and self._resident_tokens > target:
                self._pop_last_block(leaf)
        return before - self._resident_tokens

    def _fit(self) -> None:
        if self.capacity_tokens is not None and self._resident_tokens > self.capacity_tokens:
            self.evict(self._resident_tokens - self.capacity_tokens)
        while self._nodes > self.max_nodes:
            self._pop_last_block(self.order.next_leaf())

    def _pop_last_block(self, leaf: TreeNode[K]) -> None:
        key, tokens = leaf.keys.pop(), leaf.tokens.pop()
        leaf.is_junction = False
        self._blocks -= 1
        if leaf.resident:
            self._resident_tokens -= tokens
        if not leaf.keys:
            assert leaf.parent is not None
            del leaf.parent.children[key]
            unlink(leaf)
            self._nodes -= 1

    def _add_leaf(self, parent: TreeNode[K], keys: list[K], tokens: list[int]) -> TreeNode[K]:
        leaf = TreeNode(keys, tokens, parent, resident=True)
        parent.children[keys[0]] = leaf
        self._nodes += 1
        self._blocks += len(keys)
        self._resident_tokens += leaf.reach
        ancestor: TreeNode[K] | None = parent
        reach = leaf.reach
        while ancestor is not None:
            reach += sum(ancestor.tokens)
            ancestor.reach = max(ancestor.reach, reach)
            ancestor = ancestor.parent
        return leaf

    def _split(self, node: TreeNode[K], at: int) -> TreeNode[K]:
        """Split the edge to `node`; return the new node with the first `at` blocks."""
        parent = node.parent
        assert parent is not None
        upper = TreeNode(node.keys[:at], node.tokens[:at], parent, node.resident)
        node.keys, node.tokens, node.parent = node.keys[at:], node.tokens[at:], upper
        upper.reach, node.reach = node.reach, node.reach - upper.reach
        upper.children[node.keys[0]] = node
        parent.children[upper.keys[0]] = upper
        self.order.add_upper(node, upper)
        self._nodes += 1
        return upper

    def _count_request(self) -> None:
        self.order.now += 1

    def _use(self, node: TreeNode[K], age: int = 0) -> None:
        self.order.use(node, age)

    def _set_resident(self, node: TreeNode[K], resident: bool) -> None:
        if node.resident != resident:
            node.resident = resident
            self._resident_tokens += sum(node.tokens) if resident else -sum(node.tokens)

    def _walk(self, keys: Sequence[K]) -> Iterator[tuple[TreeNode[K], int]]:
        """Yield the nodes along `keys`, each with its number of matching blocks."""
        node, position = self._root, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                return
            shared = shared_prefix(child.keys, keys, position)
            yield child, shared
            if shared < len(child.keys):
                return
            node = child
            position += shared

    def locate(self, keys: Sequence[K]) -> tuple[TreeNode[K], int] | None:
        """Return a resident path's end: a node and an offset into its edge; else None."""
        node, offset, matched = self._root, 0, 0
        for node, offset in self._walk(keys):
            if not node.resident:
                return None
            matched += offset
        return (node, offset) if matched == len(keys) else None


def shared_prefix(edge: Sequence[K], keys: Sequence[K], start: int) -> int:
    """Return the length of the common prefix of `edge` and `keys[start:]`."""
    limit = min(len(edge), len(keys) - start)
    for i in range(limit):
        if edge[i] != keys[start + i]:
            return i
    return limit


def ranks_of_children(node: TreeNode[K], index: dict[K, int]) -> list[int]:
    """Return the places in `index`, ascending, of the resident children of `node`."""
    children = node.children
    shared = children.keys() & index.keys()
    return sorted([index[key] for key in shared if children[key].resident]) if shared else []


def may_stand(i: int, last: int, joined: Places) -> bool:
    """Return True if block `i` may follow block `last` where the `joined` ones stay behind the block before them."""
    return i == last + 1 if last + 1 in joined else i not in joined


def unwind(trail: Trail) -> list[int]:
    """Return the path as one list of indices."""
    runs: list[list[int]] = []
    while trail is not None:
        trail, run = trail
        runs.append(run)
    return [i for run in reversed(runs) for i in run]
