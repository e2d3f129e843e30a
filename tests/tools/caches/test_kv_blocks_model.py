"""`PrefixCache` against a cache too simple to be wrong, over random histories."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from tests.tools.kv_integrity import check_blocks

from warmprefix_tools.caches.kv_blocks import KvSequence, PrefixCache

BLOCK = 2


class NaiveRequest:
    def __init__(self, salt: str | None, tokens: list[int], blocks: list[int], spare: int) -> None:
        self.salt = salt
        self.tokens = tokens
        self.blocks = blocks
        self.spare = spare


class NaiveCache:
    """Lists only. A block's content is its whole prefix written out, so there is no hash to chain."""

    def __init__(self, num_blocks: int) -> None:
        self.free_queue = list(range(1, num_blocks))
        self.content: dict[int, tuple[object, ...]] = {}  # oldest entry first
        self.requests: list[NaiveRequest] = []

    def admit(self, tokens: list[int], salt: str | None, room_for: int) -> NaiveRequest | None:
        hits: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            found = [block for block, content in self.content.items() if content == (salt, *tokens[:end])]
            if not found:
                break
            hits.append(found[0])
        needed = blocks_for(len(tokens)) - len(hits)
        spare = blocks_for(len(tokens) + room_for) - blocks_for(len(tokens))
        available = [block for block in self.free_queue if block not in hits]
        if needed + spare > len(available) - sum(request.spare for request in self.requests):
            return None
        self.free_queue = available
        request = NaiveRequest(salt, list(tokens), hits, spare)
        self.requests.append(request)
        for _ in range(needed):
            self.grow(request)
        return request

    def grow(self, request: NaiveRequest) -> None:
        block = self.free_queue.pop(0)
        self.content.pop(block, None)
        request.blocks.append(block)

    def remember(self, request: NaiveRequest) -> None:
        for position, block in enumerate(request.blocks):
            end = (position + 1) * BLOCK
            if end <= len(request.tokens) and block not in self.content:
                self.content[block] = (request.salt, *request.tokens[:end])

    def append(self, request: NaiveRequest, token: int) -> None:
        request.tokens.append(token)
        if blocks_for(len(request.tokens)) > len(request.blocks):
            request.spare -= 1
            self.grow(request)
        self.remember(request)

    def free(self, request: NaiveRequest) -> None:
        self.requests.remove(request)
        held = [block for other in self.requests for block in other.blocks]
        released = [block for block in reversed(request.blocks) if block not in held]
        cached = [block for block in released if block in self.content]
        uncached = [block for block in released if block not in self.content]
        self.free_queue = uncached + self.free_queue + cached


def blocks_for(tokens: int) -> int:
    return (tokens + BLOCK - 1) // BLOCK


prompts = st.builds(
    lambda text, length: text[:length],
    st.sampled_from([[0] * 11, [0] * 6 + [1] * 5, [0] * 3 + [1] * 8, [1] * 11]),  # few, so that they share prefixes
    st.integers(1, 11),
)

Pair = tuple[KvSequence, NaiveRequest]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests come, are computed, grow and go, in any interleaving."""

    prefilling: Bundle[Pair] = Bundle("prefilling")
    decoding: Bundle[Pair] = Bundle("decoding")

    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK)
        self.naive = NaiveCache(num_blocks)
        self.room: dict[NaiveRequest, int] = {}

    @rule(
        target=prefilling,
        tokens=prompts,
        salt=st.sampled_from([None, None, "x"]),
        room_for=st.integers(0, 5),
    )
    def allocate(self, tokens: list[int], salt: str | None, room_for: int) -> Pair | MultipleResults[Pair]:
        expected_hit = self.cache.match_prefix(tokens, salt)
        sequence = self.cache.allocate(tokens, salt, room_for=room_for)
        request = self.naive.admit(tokens, salt, room_for)
        assert (sequence is None) == (request is None)
        if sequence is None or request is None:
            return multiple()
        assert sequence.cached_tokens == expected_hit
        assert [block.index for block in sequence.blocks] == request.blocks
        self.room[request] = room_for
        return sequence, request

    @rule(target=decoding, pair=consumes(prefilling))
    def store(self, pair: Pair) -> Pair:
        self.cache.store(pair[0])
        self.naive.remember(pair[1])
        return pair

    @rule(pair=decoding, tokens=st.lists(st.integers(0, 1), max_size=3))
    def append(self, pair: Pair, tokens: list[int]) -> None:
        sequence, request = pair
        for token in tokens[: self.room[request]]:
            self.room[request] -= 1
            self.cache.append(sequence, token)
            self.naive.append(request, token)

    @rule(pair=consumes(decoding) | consumes(prefilling))
    def free(self, pair: Pair) -> None:
        self.cache.free(pair[0])
        self.naive.free(pair[1])

    @rule()
    def reset(self) -> None:
        if self.cache.reset():
            assert not self.naive.requests
            self.naive.content.clear()
        else:
            assert self.naive.requests

    @invariant()
    def agree(self) -> None:
        check_blocks(self.cache)
        assert list(self.cache._pool.free_queue) == self.naive.free_queue
        assert {block.index for block in self.cache._pool.blocks if block.block_hash} == set(self.naive.content)
        assert self.cache.num_sequences == len(self.naive.requests)


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings()
