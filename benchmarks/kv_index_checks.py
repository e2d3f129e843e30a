"""The invariants of an index of KV blocks, and the length of a resident prefix in it."""
# ruff: noqa: SLF001 - the invariants are about private state

from __future__ import annotations

from typing import TYPE_CHECKING

from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import PromptTree, chain, root_key

if TYPE_CHECKING:
    from warmprefix_kv_events.prompt_tree import _KvNode

__all__ = ["check_index", "resident_tokens"]


def check_index(index: KvIndex) -> None:
    """Raise AssertionError unless all invariants hold. O(all)."""
    holders: dict[bytes, int] = {}
    entries = 0
    for source in index._sources.values():
        names: dict[bytes, int] = {}
        for medium in source.media.values():
            assert all(copies > 0 for copies in medium.copies.values())
            assert medium.copies.keys() <= medium.held.keys()
            entries += len(medium.held)
            for key in medium.held.values():
                names[key] = names.get(key, 0) + 1
        assert source.extra_names == {key: count - 1 for key, count in names.items() if count > 1}
        for cache in source.sparse.values():
            assert all(copies > 0 for copies in cache.copies.values())
            assert cache.copies.keys() <= cache.held.keys()
            entries += len(cache.held)
            assert cache.keys == set(cache.held.values())
        for key in names:
            holders[key] = holders.get(key, 0) | source.bit
    assert holders == index._holders
    assert entries == index._entries <= index.max_kv_blocks
    index._flush_touched()
    _check_prompts(index._prompts)


def _check_prompts(tree: PromptTree) -> None:
    prompts = tree._prompts
    assert len(prompts) <= tree.max_prompts
    assert len(tree.nodes) <= tree.max_blocks or not prompts
    needed: set[bytes] = set()
    for name, prompt in prompts.items():
        assert name == (prompt.scope, prompt.cache_salt, prompt.keys)
        for boundary in prompt.all_boundaries():
            assert boundary.ends is not None
            assert prompt in boundary.ends
            node: _KvNode | None = boundary
            while node is not None:
                assert tree.nodes[node.key] is node
                needed.add(node.key)
                node = node.parent
    assert needed == set(tree.nodes), "a KV block without a prompt"
    for key, node in tree.nodes.items():
        assert node.key == key
        expected = tree._holders(key)
        if node.parent is not None:
            assert node.parent.children is not None
            assert node.parent.children[key] is node
            expected &= node.parent.reach
        assert node.reach == expected, "residency is out of date"
        assert all(prompt in prompts.values() for prompt in node.ends or ())
    assert all(prompt in prompts.values() for prompt in tree._changed)


def resident_tokens(index: KvIndex, tokens: bytes, salt: str | None = None, model: str | None = None) -> int:
    """Return the length of the longest prefix behind which one source continues, in tokens of full KV blocks.

    Args:
        index: The index.
        tokens: The prompt, as returned by `pack_tokens`.
        salt: The request's `cache_salt`.
        model: The requested model, which may be the name of a LoRA adapter.
    """
    root = root_key(salt, model if model in index._adapters else None)
    most = 0
    for layout in index._layouts:
        path = [*chain(tokens, layout, root)]
        for source in index._sources.values():
            most = max(most, layout.block_size * max(source.stops(index._held_part(source, path)), default=0))
    return most
