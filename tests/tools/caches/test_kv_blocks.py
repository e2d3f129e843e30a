"""The rules of vLLM's prefix cache, one by one."""

from __future__ import annotations

import pytest
from tests.tools.kv_integrity import check_blocks

from warmprefix_tools.caches.kv_blocks import KvSequence, PrefixCache

A, B, C = ([letter * 100 + number for number in range(12)] for letter in (1, 2, 3))  # three blocks of four each


def serve(cache: PrefixCache, prompt: list[int], generated: list[int] | None = None, salt: str | None = None) -> int:
    """Run one request to its end, and return the number of cached tokens."""
    sequence = running(cache, prompt, generated, salt)
    cache.free(sequence)
    check_blocks(cache)
    return sequence.cached_tokens


def running(
    cache: PrefixCache, prompt: list[int], generated: list[int] | None = None, salt: str | None = None
) -> KvSequence:
    sequence = cache.allocate(prompt, salt, room_for=len(generated or []))
    assert sequence is not None
    cache.store(sequence)
    for token in generated or []:
        cache.append(sequence, token)
    check_blocks(cache)
    return sequence


def test_eviction_takes_the_oldest_prompt_tail_first() -> None:
    cache = PrefixCache(1 + 6, block_size=4)
    serve(cache, A)
    serve(cache, B)
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [12, 12]
    serve(cache, C[:4])
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [8, 12]
    serve(cache, C[:8])
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [4, 12]


def test_blocks_that_were_never_full_are_used_before_anything_is_evicted() -> None:
    cache = PrefixCache(1 + 4, block_size=4)
    serve(cache, [*A, 1])
    for _ in range(5):
        serve(cache, [7])
    assert cache.match_prefix([*A, 1]) == 12


def test_running_requests_keep_their_blocks_and_share_them() -> None:
    cache = PrefixCache(1 + 4, block_size=4)
    first = running(cache, [*A, 1])
    assert cache.usage == 1
    assert cache.allocate([1]) is None
    assert not cache.reset()
    cache.free(first)
    second = running(cache, [*A[:8], 1])
    third = running(cache, [*A[:8], 2])
    assert (second.cached_tokens, third.cached_tokens, cache.usage) == (8, 8, 1)
    cache.free(second)
    assert cache.usage == 0.75
    cache.free(third)
    assert cache.usage == 0


def test_equal_blocks_computed_at_the_same_time_are_not_merged() -> None:
    cache = PrefixCache(1 + 6, block_size=4)
    first, second = cache.allocate(A), cache.allocate(A)
    assert first is not None
    assert second is not None
    cache.store(first)
    cache.store(second)
    check_blocks(cache)
    assert cache.usage == 1
    cache.free(second)
    cache.free(first)
    serve(cache, B)
    assert cache.match_prefix([*A, 1]) == 12


def test_room_is_reserved_so_that_decoding_never_fails() -> None:
    cache = PrefixCache(1 + 4, block_size=4)
    first = cache.allocate([1], room_for=11)
    assert first is not None
    assert cache.usage == 0.25
    assert cache.allocate([2, 2, 2, 2, 2]) is None
    second = cache.allocate([2, 2, 2])
    assert second is not None
    cache.store(first)
    for token in range(11):
        cache.append(first, token)
    with pytest.raises(ValueError, match="sequence must have room left"):
        cache.append(first, 12)
    check_blocks(cache)


def test_misuse_is_refused() -> None:
    cache = PrefixCache(10, block_size=4)
    with pytest.raises(ValueError, match=r"num_blocks must be 2 or more .*, got 1"):
        PrefixCache(1)
    with pytest.raises(ValueError, match="block_size must be 1 or more, got 0"):
        PrefixCache(10, block_size=0)
    with pytest.raises(ValueError, match="token_ids must have 1 token or more, got none"):
        cache.allocate([])
    sequence = cache.allocate([1])
    assert sequence is not None
    with pytest.raises(ValueError, match="sequence must be stored before"):
        cache.append(sequence, 1)
    cache.store(sequence)
    with pytest.raises(ValueError, match="stored already"):
        cache.store(sequence)
    with pytest.raises(ValueError, match="another cache"):
        PrefixCache(10).free(sequence)
    cache.free(sequence)
    with pytest.raises(ValueError, match="freed one"):
        cache.free(sequence)
    check_blocks(cache)
