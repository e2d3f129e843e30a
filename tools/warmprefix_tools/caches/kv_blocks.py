"""vLLM's prefix cache as a data structure: KV blocks, chained block hashes, reference counts, a free queue.

The rules are those of vLLM's `BlockPool` and `KVCacheManager` (V1 engine, one full-attention group):

- the key of a full KV block is the hash of its parent's hash and its tokens; `cache_salt` enters the first one;
- a block without a sequence waits in the free queue and can still be hit until an allocation reaches it;
- a freed sequence puts its cached blocks at the back of that queue, last block first, so that the tails of the oldest
  prompts go first; its blocks that were never cached go to the front, because no request could hit them;
- two blocks with the same content are not merged; the older one is the hit;
- at least the last token of a prompt is always computed, so a hit never covers the whole prompt.

Nothing here waits, reads a clock or does I/O. Not thread-safe: one engine owns one cache.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt

__all__ = [
    "BlockPool",
    "KvBlock",
    "KvCache",
    "KvSequence",
    "PrefixCache",
    "RunningSequence",
    "block_hashes",
    "chained_hashes",
    "root_hash",
]


def block_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str | None = None) -> Iterator[bytes]:
    """Yield the chained hash of each full KV block; equal hashes mean equal prefixes and salts.

    >>> one, two = block_hashes([1, 2, 3, 4, 5], block_size=2)
    >>> [*block_hashes([1, 2, 9, 9], 2)][0] == one, [*block_hashes([3, 4], 2)] == [two]
    (True, False)
    """
    return chained_hashes(root_hash(cache_salt), token_ids, block_size)


@dataclass(slots=True, eq=False)
class KvBlock:
    """Room for the KV of `block_size` tokens; it can be hit by each of its keys."""

    index: int
    ref_count: int = 0
    keys: list[bytes] = field(default_factory=list)
    key_tokens: int = 0
    """Tokens of the prefix that the first key stands for."""

    @property
    def block_hash(self) -> bytes | None:
        """The first key, if the block can be hit."""
        return self.keys[0] if self.keys else None


class BlockPool:
    """All KV blocks of one engine but the null block, as in vLLM's `BlockPool`.

    A block without a holder waits in the free queue and keeps its keys until `take` reaches it. All methods are
    O(blocks touched).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be 2 or more (one is the null block), got {num_blocks}")
        self.blocks = [KvBlock(index) for index in range(1, num_blocks)]
        self.free_queue = OrderedDict((block.index, block) for block in self.blocks)
        self.resident: dict[bytes, dict[int, KvBlock]] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks with a holder, 0 to 1."""
        return 1 - len(self.free_queue) / len(self.blocks)

    def find(self, key: bytes) -> KvBlock | None:
        """Return the oldest block with this key."""
        holders = self.resident.get(key)
        return next(iter(holders.values())) if holders else None

    def take(self) -> KvBlock:
        """Return the block at the front of the free queue, without its keys and with one holder."""
        _, block = self.free_queue.popitem(last=False)
        self.drop_keys(block)
        block.ref_count = 1
        return block

    def hold(self, block: KvBlock) -> None:
        """Add a holder."""
        if block.ref_count == 0:
            del self.free_queue[block.index]
        block.ref_count += 1

    def release(self, blocks: Iterable[KvBlock]) -> None:
        """Remove one holder of each block.

        Blocks without holders go to the back of the queue in this order if they have keys. The others go to its front,
        the first of them foremost.
        """
        never_cached: list[KvBlock] = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.keys:
                self.free_queue[block.index] = block
            else:
                never_cached.append(block)
        for block in reversed(never_cached):
            self.free_queue[block.index] = block
            self.free_queue.move_to_end(block.index, last=False)

    def add_key(self, block: KvBlock, key: bytes, tokens: int) -> None:
        """Let a block be hit by this key, which stands for a prefix of `tokens` tokens."""
        if key in block.keys:
            return
        if not block.keys:
            block.key_tokens = tokens
        block.keys.append(key)
        self.resident.setdefault(key, {})[block.index] = block

    def drop_keys(self, block: KvBlock) -> None:
        """Let a block be hit no more."""
        for key in block.keys:
            holders = self.resident[key]
            del holders[block.index]
            if not holders:
                del self.resident[key]
        block.keys.clear()

    def forget(self) -> bool:
        """Drop all keys; return False, and do nothing, if a block has a holder."""
        if len(self.free_queue) < len(self.blocks):
            return False
        for block in self.blocks:
            block.keys.clear()
        self.resident.clear()
        return True


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One running request; only `allocate` of a cache creates it."""

    cached_tokens: int
    """Tokens of the prompt that were found in the cache. All other fields are for the cache."""
    stored: bool = field(default=False, kw_only=True)
    """True from `store` on."""


SequenceT = TypeVar("SequenceT", bound=RunningSequence)


@dataclass(slots=True, eq=False)
class _BlockAdmission(Generic[SequenceT]):
    """A prompt that holds KV blocks."""

    cache: KvCache[SequenceT]
    sequence: SequenceT
    use: CacheUse

    def store(self, now: float) -> None:
        self.cache.store(self.sequence)

    def append(self, token_id: int) -> None:
        self.cache.append(self.sequence, token_id)

    def free(self) -> None:
        self.cache.free(self.sequence)


class KvCache(ABC, Generic[SequenceT]):
    """A pool of `num_blocks` KV blocks, one of them vLLM's null block, which stores nothing.

    A request goes through `allocate`, `store` when its prompt has been computed, `append` for each generated token
    whose KV is computed, and `free`, which may come at any time. All are O(blocks touched), but for the hashes of
    `allocate`. `admit` does the same for `SimulatedCache`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """Number of KV blocks, the null block included."""
        self._pool = BlockPool(num_blocks)
        self._sequences: set[SequenceT] = set()

    @property
    def usage(self) -> float:
        """Share of the blocks in use by running requests, 0 to 1; blocks that are only cached count as free."""
        return self._pool.usage

    @property
    def num_sequences(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._sequences)

    def admit(self, prompt: MarkedPrompt, now: float = 0.0, *, room_for: int = 0) -> _BlockAdmission[SequenceT] | None:
        """Return the prompt's blocks, or None if running requests leave too few."""
        sequence = self.allocate(prompt.tokens, prompt.salt, room_for=room_for)
        if sequence is None:
            return None
        read = sequence.cached_tokens
        return _BlockAdmission(self, sequence, CacheUse(read, (0,), len(prompt.tokens) - read))

    def allocate(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, room_for: int = 0
    ) -> SequenceT | None:
        """Return a sequence that holds what the cache has of a prompt.

        Return None, and change nothing, if running requests leave too few blocks. `room_for` tokens can be appended
        later, and `append` never fails.

        Raises:
            ValueError: The prompt is empty.
        """
        if not token_ids:
            raise ValueError("token_ids must have 1 token or more, got none")
        sequence = self._allocate(token_ids, cache_salt, room_for)
        if sequence is not None:
            self._sequences.add(sequence)
        return sequence

    def store(self, sequence: SequenceT) -> None:
        """Record that the prompt has been computed: it can be hit from now on."""
        if sequence.stored:
            raise ValueError("sequence must be stored once, got one that is stored already")
        self._require_live(sequence)
        sequence.stored = True
        self._store(sequence)

    def append(self, sequence: SequenceT, token_id: int) -> None:
        """Record the computed KV of one generated token."""
        self._require_live(sequence)
        if not sequence.stored:
            raise ValueError("sequence must be stored before tokens are appended, got one that is not stored")
        self._append(sequence, token_id)

    def free(self, sequence: SequenceT) -> None:
        """Release all blocks; cached ones can be hit until they are evicted."""
        self._require_live(sequence)
        self._sequences.remove(sequence)
        self._free(sequence)

    def reset(self) -> bool:
        """Forget every cached block; return False, and do nothing, if requests hold blocks, as in vLLM."""
        return not self._sequences and self._pool.forget()

    def _require_live(self, sequence: SequenceT) -> None:
        if sequence not in self._sequences:
            raise ValueError("sequence must be a running one of this cache, got one of another cache or a freed one")

    @abstractmethod
    def _allocate(self, token_ids: Sequence[int], cache_salt: str | None, room_for: int) -> SequenceT | None: ...

    @abstractmethod
    def _store(self, sequence: SequenceT) -> None: ...

    @abstractmethod
    def _append(self, sequence: SequenceT, token_id: int) -> None: ...

    @abstractmethod
    def _free(self, sequence: SequenceT) -> None: ...


@dataclass(slots=True, eq=False)
class KvSequence(RunningSequence):
    """The blocks of one running request, in token order; only `PrefixCache.allocate` creates it."""

    blocks: list[KvBlock]
    """The KV blocks, in token order."""
    tail: list[int]
    """Tokens not in a hashed block yet: the uncached prompt before `store`, less than a block after it."""
    parent_hash: bytes
    """Hash of the last hashed block, or the root."""
    reserved: int
    """Blocks that `append` may still take from the pool."""


class PrefixCache(KvCache[KvSequence]):
    """The cache of a model with full attention."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks)
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size}")
        self.block_size = block_size
        """Tokens per KV block."""
        self._reserved = 0

    def match_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Return the number of tokens that `allocate` would find for this prompt; changes nothing."""
        return len(self._hits(token_ids, cache_salt)) * self.block_size

    def _allocate(self, token_ids: Sequence[int], cache_salt: str | None, room_for: int) -> KvSequence | None:
        # The blocks of later tokens are reserved but not taken, so that `append` evicts no earlier than vLLM.
        hits = self._hits(token_ids, cache_salt)
        now = self._blocks_for(len(token_ids)) - len(hits)
        later = self._blocks_for(len(token_ids) + room_for) - self._blocks_for(len(token_ids))
        revived = sum(block.ref_count == 0 for block in hits)
        if revived + now + later > len(self._pool.free_queue) - self._reserved:
            return None

        for block in hits:
            self._pool.hold(block)
        cached_tokens = len(hits) * self.block_size
        self._reserved += later
        return KvSequence(
            cached_tokens,
            blocks=[*hits, *(self._pool.take() for _ in range(now))],
            tail=list(token_ids[cached_tokens:]),
            parent_hash=(hits[-1].block_hash if hits else None) or root_hash(cache_salt),
            reserved=later,
        )

    def _store(self, sequence: KvSequence) -> None:
        unhashed = sequence.blocks[len(sequence.blocks) - self._blocks_for(len(sequence.tail)) :]
        full = len(sequence.tail) // self.block_size
        hashes = chained_hashes(sequence.parent_hash, sequence.tail, self.block_size)
        for block, block_hash in zip(unhashed[:full], hashes, strict=True):
            self._pool.add_key(block, block_hash, self.block_size)
            sequence.parent_hash = block_hash
        del sequence.tail[: full * self.block_size]

    def _append(self, sequence: KvSequence, token_id: int) -> None:
        if not sequence.tail:
            if not sequence.reserved:
                raise ValueError("sequence must have room left, got one whose room_for of allocate is used up")
            sequence.reserved -= 1
            self._reserved -= 1
            sequence.blocks.append(self._pool.take())
        sequence.tail.append(token_id)
        self._store(sequence)

    def _free(self, sequence: KvSequence) -> None:
        self._reserved -= sequence.reserved
        self._pool.release(reversed(sequence.blocks))

    def _hits(self, token_ids: Sequence[int], cache_salt: str | None) -> list[KvBlock]:
        whole_blocks = (len(token_ids) - 1) // self.block_size * self.block_size
        hits: list[KvBlock] = []
        for block_hash in block_hashes(token_ids[:whole_blocks], self.block_size, cache_salt):
            block = self._pool.find(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def root_hash(cache_salt: str | None) -> bytes:
    """Return the parent of the first block's hash."""
    salt = b"" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=16).digest()


def chained_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the hash of each full block that follows the block with hash `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    stride = 4 * block_size
    for end in range(stride, len(packed) + 1, stride):
        parent = blake2b(parent + packed[end - stride : end], digest_size=16).digest()
        yield parent
