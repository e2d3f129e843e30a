"""`AgentCache` against a simple model, after every random step."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from warmprefix_routing.agent_cache import AgentCache

KEYS = st.integers(0, 9).map(lambda number: bytes([number]))


class CacheMachine(RuleBasedStateMachine):
    """The model is a list of blocks, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity: int | None = None
        self.most = 6
        self.cache = AgentCache(None, self.most)
        self.blocks: list[tuple[bytes, int, int]] = []
        self.number = 0

    @precondition(lambda self: self.number == 0)
    @rule(capacity=st.none() | st.integers(1, 60), most=st.integers(1, 8))
    def bound(self, capacity: int | None, most: int) -> None:
        self.capacity, self.most = capacity, most
        self.cache = AgentCache(capacity, most)

    @rule(key=KEYS, tokens=st.integers(0, 30))
    def use(self, key: bytes, tokens: int) -> None:
        self.number += 1
        before = self.cache.blocks.get(key)
        block, left = self.cache.use(key, tokens)
        earlier = [length for other, length, _ in self.blocks if other == key]
        self.blocks = [entry for entry in self.blocks if entry[0] != key]
        self.blocks.append((key, earlier[0] if earlier else tokens, self.number))
        gone = []
        while len(self.blocks) > self.most or (
            self.capacity is not None and sum(length for _, length, _ in self.blocks) > self.capacity
        ):
            gone.append(self.blocks.pop(0)[0])
        assert list(left) == gone
        assert block.used == self.number
        assert before is None or block is before

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        held = any(other == key for other, _, _ in self.blocks)
        assert self.cache.drop(key) == held
        self.blocks = [entry for entry in self.blocks if entry[0] != key]

    @rule(back=st.integers(0, 10))
    def drop_before(self, back: int) -> None:
        number = self.number - back
        gone = [key for key, _, used in self.blocks if used < number]
        assert self.cache.drop_before(number) == gone
        self.blocks = [entry for entry in self.blocks if entry[2] >= number]

    @invariant()
    def check(self) -> None:
        assert list(self.cache.blocks) == [key for key, _, _ in self.blocks]
        assert len(self.cache.blocks) == len(self.blocks) <= self.most
        assert self.cache.tokens == sum(length for _, length, _ in self.blocks)
        for key, length, used in self.blocks:
            block = self.cache.blocks.get(key)
            assert key in self.cache.blocks
            assert block is not None
            assert (block.tokens, block.used) == (length, used)


TestCache = CacheMachine.TestCase


def test_a_block_longer_than_the_cache_flushes_it_and_itself() -> None:
    cache = AgentCache(100)
    cache.use(b"a", 40)
    block, left = cache.use(b"b", 101)
    assert left == [b"a", b"b"]
    assert cache.blocks.get(b"b") is None
    assert (len(cache.blocks), cache.tokens) == (0, 0)
    again, _ = cache.use(b"b", 1)
    assert again is not block
