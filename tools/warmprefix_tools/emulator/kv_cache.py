"""vLLM's prefix cache as a data structure: KV blocks, chained block hashes, reference counts, a free queue.

The rules are those of vLLM's `BlockPool` and `KVCacheManager` (V1 engine, one full-attention group):

- a full KV block is known by the hash of its parent's hash and its tokens; `cache_salt` enters the first one;
- a block that no sequence holds waits in the free queue and can still be hit until an allocation reaches it;
- a freed sequence puts its cached blocks at the back of that queue, last block first, so the tails of the
  oldest prompts go first; its blocks that were never cached go to the front, as nobody could want them;
- two blocks with one content are not merged; the older one is the hit;
- at least the last token of a prompt is computed anew, so a hit never covers the whole prompt.

Nothing here waits, reads a clock or does I/O. Not thread-safe: one engine owns one cache.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["KvBlock", "KvSequence", "PrefixCache", "block_hashes"]


def block_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str | None = None) -> Iterator[bytes]:
    """Give the chained hash of each full KV block of `token_ids`: equal hashes mean equal prefixes and salts.

    >>> one, two = block_hashes([1, 2, 3, 4, 5], block_size=2)
    >>> [*block_hashes([1, 2, 9, 9], 2)][0] == one, [*block_hashes([3, 4], 2)] == [two]
    (True, False)
    """
    return _chain(_root(cache_salt), token_ids, block_size)


@dataclass(slots=True, eq=False)
class KvBlock:
    """Room for the KV of `block_size` tokens; `block_hash` is set while the block is full and can be hit."""

    index: int
    ref_count: int = 0
    block_hash: bytes | None = None


@dataclass(slots=True, eq=False)
class KvSequence:
    """The blocks that one running request holds, in token order; made by `PrefixCache.allocate`.

    Callers read `cached_tokens`, how much of the prompt was found in the cache; the rest is the cache's own
    account.
    """

    cached_tokens: int
    blocks: list[KvBlock]
    tail: list[int]
    """Tokens not in a hashed block yet: the uncached prompt before `store`, less than a block after it."""
    parent_hash: bytes
    """Hash of the last hashed block, or the root."""
    reserved: int
    """Blocks that `append` may still take from the pool."""
    stored: bool = False


class PrefixCache:
    """A pool of `num_blocks` KV blocks, of which one is vLLM's null block and holds nothing.

    A request goes through `allocate`, `store` when its prompt has been computed, `append` for each generated
    token that is computed, and `free`, which may come at any time. All are O(blocks touched).
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2: one is the null block")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = [KvBlock(index) for index in range(1, num_blocks)]
        self._free_queue = OrderedDict((block.index, block) for block in self._pool)
        self._resident: dict[bytes, dict[int, KvBlock]] = {}
        self._sequences: set[KvSequence] = set()
        self._reserved = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests hold, 0 to 1; merely cached blocks count as free."""
        return 1 - len(self._free_queue) / len(self._pool)

    @property
    def num_sequences(self) -> int:
        """Requests that hold blocks now."""
        return len(self._sequences)

    def match_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Count the tokens of this prompt that `allocate` would find; a look only, which renews nothing."""
        return len(self._hits(token_ids, cache_salt)) * self.block_size

    def allocate(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, room_for: int = 0
    ) -> KvSequence | None:
        """Give a prompt its blocks, evicting the least recently used, or return None and change nothing.

        None means that running requests hold too much. `room_for` tokens can be appended later: their blocks
        are set aside, not taken, so `append` never fails and evicts no earlier than vLLM would.
        """
        if not token_ids:
            raise ValueError("token_ids is empty; a prompt must have at least one token")
        hits = self._hits(token_ids, cache_salt)
        now = self._blocks_for(len(token_ids)) - len(hits)
        later = self._blocks_for(len(token_ids) + room_for) - self._blocks_for(len(token_ids))
        revived = sum(block.ref_count == 0 for block in hits)
        if revived + now + later > len(self._free_queue) - self._reserved:
            return None

        for block in hits:
            self._hold(block)
        cached_tokens = len(hits) * self.block_size
        sequence = KvSequence(
            cached_tokens,
            blocks=[*hits, *(self._take() for _ in range(now))],
            tail=list(token_ids[cached_tokens:]),
            parent_hash=(hits[-1].block_hash if hits else None) or _root(cache_salt),
            reserved=later,
        )
        self._reserved += later
        self._sequences.add(sequence)
        return sequence

    def store(self, sequence: KvSequence) -> None:
        """Note that the prompt has been computed: its full blocks are hits from here on."""
        if sequence.stored:
            raise ValueError("this sequence was stored before")
        self._require_live(sequence)
        sequence.stored = True
        self._hash_full_blocks(sequence)

    def append(self, sequence: KvSequence, token_id: int) -> None:
        """Note that the KV of one generated token has been computed; a block that it fills becomes a hit."""
        self._require_live(sequence)
        if not sequence.stored:
            raise ValueError("store the prompt before appending to it")
        if not sequence.tail:
            if not sequence.reserved:
                raise ValueError("no room left: allocate was called with a smaller room_for")
            sequence.reserved -= 1
            self._reserved -= 1
            sequence.blocks.append(self._take())
        sequence.tail.append(token_id)
        self._hash_full_blocks(sequence)

    def free(self, sequence: KvSequence) -> None:
        """Let go of all blocks; what is cached stays a possible hit until it is evicted."""
        self._require_live(sequence)
        self._sequences.remove(sequence)
        self._reserved -= sequence.reserved
        never_cached: list[KvBlock] = []
        for block in reversed(sequence.blocks):
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                never_cached.append(block)
            else:
                self._free_queue[block.index] = block
        for block in reversed(never_cached):
            self._free_queue[block.index] = block
            self._free_queue.move_to_end(block.index, last=False)

    def reset(self) -> bool:
        """Forget every cached block; False, and nothing done, while a request holds blocks, as in vLLM."""
        if self._sequences:
            return False
        for block in self._pool:
            block.block_hash = None
        self._resident.clear()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when the parts contradict each other; O(num_blocks), for tests."""
        held = Counter(block.index for sequence in self._sequences for block in sequence.blocks)
        for block in self._pool:
            _check(block.ref_count == held[block.index], f"block {block.index}: wrong reference count")
            _check(
                (block.ref_count == 0) == (block.index in self._free_queue),
                f"block {block.index}: wrongly free",
            )
            holders = {} if block.block_hash is None else self._resident.get(block.block_hash, {})
            _check(
                (block.block_hash is None) == (block.index not in holders),
                f"block {block.index}: hash not indexed",
            )
        hashed = sum(block.block_hash is not None for block in self._pool)
        _check(hashed == sum(map(len, self._resident.values())), "the index holds blocks that have no hash")
        _check(all(self._resident.values()), "the index holds an empty entry")
        reserved = sum(sequence.reserved for sequence in self._sequences)
        _check(0 <= self._reserved == reserved <= len(self._free_queue), "more is set aside than is free")
        for sequence in self._sequences:
            in_tail = self._blocks_for(len(sequence.tail))
            hashed = sum(block.block_hash is not None for block in sequence.blocks)
            _check(hashed + in_tail == len(sequence.blocks), "a sequence has the wrong number of blocks")

    def _hits(self, token_ids: Sequence[int], cache_salt: str | None) -> list[KvBlock]:
        whole_blocks = (len(token_ids) - 1) // self.block_size * self.block_size
        hits: list[KvBlock] = []
        for block_hash in block_hashes(token_ids[:whole_blocks], self.block_size, cache_salt):
            holders = self._resident.get(block_hash)
            if holders is None:
                break
            hits.append(next(iter(holders.values())))
        return hits

    def _hold(self, block: KvBlock) -> None:
        if block.ref_count == 0:
            del self._free_queue[block.index]
        block.ref_count += 1

    def _take(self) -> KvBlock:
        _, block = self._free_queue.popitem(last=False)
        if block.block_hash is not None:
            holders = self._resident[block.block_hash]
            del holders[block.index]
            if not holders:
                del self._resident[block.block_hash]
            block.block_hash = None
        block.ref_count = 1
        return block

    def _hash_full_blocks(self, sequence: KvSequence) -> None:
        unhashed = sequence.blocks[len(sequence.blocks) - self._blocks_for(len(sequence.tail)) :]
        full = len(sequence.tail) // self.block_size
        hashes = _chain(sequence.parent_hash, sequence.tail, self.block_size)
        for block, block_hash in zip(unhashed[:full], hashes, strict=True):
            block.block_hash = sequence.parent_hash = block_hash
            self._resident.setdefault(block_hash, {})[block.index] = block
        del sequence.tail[: full * self.block_size]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _require_live(self, sequence: KvSequence) -> None:
        if sequence not in self._sequences:
            raise ValueError("this sequence was freed before, or belongs to another cache")


def _root(cache_salt: str | None) -> bytes:
    salt = b"" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=16).digest()


def _chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    stride = 4 * block_size
    for end in range(stride, len(packed) + 1, stride):
        parent = blake2b(parent + packed[end - stride : end], digest_size=16).digest()
        yield parent


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
