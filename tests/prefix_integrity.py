"""The structural invariants of a prefix tree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from warmprefix.prefix.eviction import TreeNode
from warmprefix.prefix.tree import PrefixTree

K = TypeVar("K", bound=Hashable)


def check_integrity(tree: PrefixTree[K]) -> None:
    """Raise AssertionError unless all structural invariants hold. O(nodes)."""
    age = {id(node): position for position, node in enumerate(tree.order)}
    nodes = blocks = resident_tokens = 0
    stack: list[tuple[TreeNode[K], frozenset[K]]] = [(tree._root, frozenset())]
    while stack:
        node, path = stack.pop()
        assert len(node.keys) == len(node.tokens)
        deepest_child = max((child.reach for child in node.children.values()), default=0)
        assert node.reach >= sum(node.tokens) + deepest_child, "reach is no upper bound"
        for key, child in node.children.items():
            nodes += 1
            blocks += len(child.keys)
            resident_tokens += sum(child.tokens) if child.resident else 0
            child_path = path | set(child.keys)
            assert child.parent is node
            assert child.keys[0] == key, "child under another key"
            assert len(child_path) == len(path) + len(child.keys), "a block twice on one path"
            assert node.resident or not child.resident, "resident below a block that is not"
            assert node is tree._root or age[id(child)] < age[id(node)], "a node older than one below it"
            stack.append((child, child_path))
    assert nodes == tree._nodes == len(age)
    assert nodes <= tree.max_nodes
    assert blocks == tree._blocks
    assert resident_tokens == tree._resident_tokens
    assert tree.capacity_tokens is None or resident_tokens <= tree.capacity_tokens
