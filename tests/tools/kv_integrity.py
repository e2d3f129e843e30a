"""Checks of the parts of a cache of KV blocks against each other."""

from __future__ import annotations

from collections import Counter

from warmprefix_tools.caches import CheckpointCache, PrefixCache


def check_blocks(cache: PrefixCache | CheckpointCache) -> None:
    """Raise AssertionError if the parts contradict each other; O(num_blocks)."""
    if isinstance(cache, CheckpointCache):
        held = Counter(
            block.index for sequence in cache._sequences for group in sequence.held for block in group.present()
        )
    else:
        held = Counter(block.index for sequence in cache._sequences for block in sequence.blocks)
        reserved = sum(sequence.reserved for sequence in cache._sequences)
        assert 0 <= cache._reserved == reserved <= len(cache._pool.free_queue), "more blocks are reserved than free"
        for sequence in cache._sequences:
            in_tail = -(-len(sequence.tail) // cache.block_size)
            hashed = sum(block.block_hash is not None for block in sequence.blocks)
            assert hashed + in_tail == len(sequence.blocks), "a sequence has the wrong number of blocks"
    pool = cache._pool
    for block in pool.blocks:
        assert block.ref_count == held[block.index], f"block {block.index}: wrong reference count"
        assert (block.ref_count == 0) == (block.index in pool.free_queue), f"block {block.index}: wrongly free"
        for key in block.keys:
            assert block.index in pool.resident.get(key, {}), f"block {block.index}: key not indexed"
    keys = sum(len(block.keys) for block in pool.blocks)
    assert keys == sum(map(len, pool.resident.values())), "the index contains blocks without a key"
    assert all(pool.resident.values()), "the index contains an empty entry"
