"""The rules of vLLM's prefix cache, one by one."""

from __future__ import annotations

import pytest

from warmprefix_tools.caches.kv_blocks import KvSequence, PrefixCache, block_hashes

A, B, C = ([letter * 100 + number for number in range(12)] for letter in (1, 2, 3))  # three blocks of four each


def serve(cache: PrefixCache, prompt: list[int], generated: list[int] | None = None, salt: str | None = None) -> int:
    """Run one request to its end, and return the number of cached tokens."""
    sequence = running(cache, prompt, generated, salt)
    cache.free(sequence)
    cache.check_integrity()
    return sequence.cached_tokens


def running(
    cache: PrefixCache, prompt: list[int], generated: list[int] | None = None, salt: str | None = None
) -> KvSequence:
    sequence = cache.allocate(prompt, salt, room_for=len(generated or []))
    assert sequence is not None
    cache.store(sequence)
    for token in generated or []:
        cache.append(sequence, token)
    cache.check_integrity()
    return sequence


def test_a_repeated_prefix_is_a_hit_in_whole_blocks() -> None:
    cache = PrefixCache(100, block_size=4)
    assert serve(cache, [*A, 1, 2]) == 0
    assert serve(cache, [*A, 1, 2]) == 12
    assert serve(cache, [*A[:7], 9, 9, 9]) == 4
    assert serve(cache, [9, *A]) == 0


def test_the_last_token_is_always_computed_so_a_full_hit_loses_its_last_block() -> None:
    cache = PrefixCache(100, block_size=4)
    serve(cache, A)
    assert serve(cache, A) == 8
    assert cache.match_prefix([*A, 1]) == 12


def test_generated_tokens_extend_the_prefix() -> None:
    cache = PrefixCache(100, block_size=4)
    serve(cache, A[:6], generated=A[6:])
    assert serve(cache, [*A, 1]) == 12


def test_a_salt_separates_caches_from_the_first_block_on() -> None:
    cache = PrefixCache(100, block_size=4)
    assert [serve(cache, A, salt=salt) for salt in (None, "x", "y", "", None, "x", "y", "")] == [0] * 4 + [8] * 4
    assert next(block_hashes(A, 4, "x")) != next(block_hashes(A, 4))


def test_a_block_is_hit_only_behind_the_same_prefix() -> None:
    cache = PrefixCache(100, block_size=4)
    serve(cache, [*A, *B])
    assert serve(cache, [*B, *A]) == 0


def test_eviction_takes_the_oldest_prompt_tail_first() -> None:
    cache = PrefixCache(1 + 6, block_size=4)
    serve(cache, A)
    serve(cache, B)
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [12, 12]
    serve(cache, C[:4])
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [8, 12]
    serve(cache, C[:8])
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [4, 12]


def test_a_hit_renews_the_blocks_it_covers() -> None:
    cache = PrefixCache(1 + 6, block_size=4)
    serve(cache, A)
    serve(cache, B)
    serve(cache, [*A[:8], 1])
    serve(cache, C[:8])
    assert [cache.match_prefix([*A, 1]), cache.match_prefix([*B, 1])] == [8, 8]


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
    cache.check_integrity()
    assert cache.usage == 1
    cache.free(second)
    cache.free(first)
    serve(cache, B)
    assert cache.match_prefix([*A, 1]) == 12


def test_hit_without_a_running_request_takes_room_too() -> None:
    cache = PrefixCache(1 + 3, block_size=4)
    serve(cache, A)
    assert cache.allocate([*A, 1]) is None
    assert serve(cache, [*A[:8], 1]) == 8


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
    cache.check_integrity()


def test_prompt_that_was_not_stored_is_no_hit() -> None:
    cache = PrefixCache(100, block_size=4)
    sequence = cache.allocate(A)
    assert sequence is not None
    cache.free(sequence)
    cache.check_integrity()
    assert serve(cache, A) == 0


def test_reset_forgets_everything() -> None:
    cache = PrefixCache(100, block_size=4)
    serve(cache, A)
    assert cache.reset()
    cache.check_integrity()
    assert serve(cache, A) == 0


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
    cache.check_integrity()
