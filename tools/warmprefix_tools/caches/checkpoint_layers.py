"""The groups of layers that share vLLM's KV blocks in a model with checkpoints, and how each uses its blocks.

`warmprefix_tools.caches.checkpoints` has the cache that is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from warmprefix.cache_profiles import Checkpoints
from warmprefix_tools.caches.kv_blocks import BlockPool, KvBlock, RunningSequence

__all__ = [
    "CheckpointLayout",
    "CheckpointSequence",
    "FullAttentionGroup",
    "HeldBlocks",
    "LayerGroup",
    "RecurrentGroup",
    "SparseGroup",
    "WindowGroup",
]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Layers of a model with checkpoints, and the engine's flags that matter to its cache.

    Raises:
        ValueError: A count is below 1, or `retention` is no multiple of the block.
    """

    checkpoints: Checkpoints
    """Where the engine keeps checkpoints."""
    window: int | None = None
    """Tokens that the sliding-window layers see; None for recurrent layers."""
    sparse_groups: int = 3
    """Groups of sliding-window or recurrent layers, next to one of full attention."""
    step_tokens: int = 8192
    """Most tokens of one prefill step: `--max-num-batched-tokens`."""
    retention: int | None = 0
    """`--prefix-cache-retention-interval`: 0 keeps prompt ends and junctions; a multiple of the block also the states
    in this distance; None those at each end of a step, as vLLM before 0.32."""

    def __post_init__(self) -> None:
        for name in ("sparse_groups", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.window is not None and self.window < 2:
            raise ValueError(f"window must be 2 or more, got {self.window}")
        if self.retention is not None and (self.retention < 0 or self.retention % self.block):
            raise ValueError(f"retention must be a multiple of {self.block}, got {self.retention}")

    @property
    def block(self) -> int:
        """Tokens per KV block, the same for all groups."""
        return self.checkpoints.block

    @property
    def hash_unit(self) -> int:
        """Tokens between hashes of the prefix."""
        return self.checkpoints.unit or self.block

    @property
    def ends_within_blocks(self) -> bool:
        """True if prompt ends within a block can be hit, which needs recurrent layers."""
        return self.window is None and self.hash_unit < self.block

    @property
    def window_blocks(self) -> int:
        """Number of blocks in front of a checkpoint that a sliding window needs."""
        return 0 if self.window is None else -(-(self.window - 1) // self.block)

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens, answer included, holds at one time."""
        full = -(-tokens // self.block) + 1
        if self.window is None:
            return full + 4 * self.sparse_groups
        in_window = -(-(self.window - 1 + self.step_tokens) // self.block) + 1
        return full + self.sparse_groups * min(full, in_window)

    def most_tokens(self, blocks: int) -> int:
        """Return the most tokens of a request, answer included, that always fit into `blocks` blocks."""
        fitting = (number for number in range(blocks, 0, -1) if self.most_blocks(number * self.block) <= blocks)
        return next(fitting, 0) * self.block


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks of one request in one group, in token order; None where the group needs none."""

    blocks: list[KvBlock | None] = field(default_factory=list)
    cached: int = 0
    """Blocks at the front whose keys are decided."""
    shared_tail: tuple[int, KvBlock] | None = None
    """Place of a block, and the block, whose content the cache needs and the request is about to change."""
    retired: int = 0
    """Blocks at the front that have been freed."""
    is_running: bool = False

    def present(self) -> Iterator[KvBlock]:
        """Yield the blocks that exist, last first."""
        return (block for block in reversed(self.blocks) if block is not None)


@dataclass(slots=True, eq=False)
class CheckpointSequence(RunningSequence):
    """One running request; only `CheckpointCache.allocate` creates it."""

    tokens: list[int]
    prompt_tokens: int
    junction: int
    """Tokens that full attention has in common with earlier prompts, if more than `cached_tokens`; else 0."""
    root: bytes
    hashes: list[bytes]
    held: list[HeldBlocks]
    promised: int
    """Blocks that the request may hold at one time."""
    computed: int = 0

    def only_checkpoint(self, block: int) -> int:
        """Return where a prompt leaves its checkpoint if it leaves one only, or 0 if it leaves none."""
        if self.prompt_tokens - self.cached_tokens < block:
            return 0
        return self.junction // block * block or self.prompt_tokens // block * block


class LayerGroup:
    """Layers that share KV blocks; number 0 is full attention."""

    def __init__(self, pool: BlockPool, layout: CheckpointLayout, number: int = 0) -> None:
        self.pool = pool
        self.layout = layout
        self._prefix = number.to_bytes(2, "big")

    def key_at(self, hashes: Sequence[bytes], end: int) -> bytes:
        """Return the key of this group for the first `end` tokens."""
        return self._prefix + hashes[end // self.layout.hash_unit - 1]

    def find_at(self, hashes: Sequence[bytes], end: int) -> KvBlock | None:
        """Return the block that holds the KV or the state at `end`."""
        return self.pool.find(self.key_at(hashes, end))

    def adopt(self, found: list[KvBlock | None], hit: int) -> HeldBlocks:
        """Return the blocks of a hit, held."""
        for block in found:
            if block is not None:
                self.pool.hold(block)
        held = HeldBlocks(found, cached=len(found))
        if found and hit % self.layout.block:
            tail = found[-1]
            assert tail is not None
            held.cached = hit // self.layout.block
            held.shared_tail = (held.cached, tail)
        return held

    def retire(self, held: HeldBlocks, computed: int) -> None:
        """Free the blocks that no token behind `computed` needs."""

    def grow(self, held: HeldBlocks, end: int) -> list[KvBlock]:
        """Take blocks for the tokens up to `end`; return those to release after the step."""
        copied: list[KvBlock] = []
        if held.shared_tail is not None:
            copied = self._copy_tail(held, self.pool.take())
        while len(held.blocks) * self.layout.block < end:
            held.blocks.append(self.pool.take())
        return copied

    def add_keys(self, held: HeldBlocks, sequence: CheckpointSequence, end: int) -> None:
        """Give keys to the full blocks up to `end` that a later request can use."""
        block_tokens = self.layout.block
        if self.layout.checkpoints.junction_only:
            end = min(end, sequence.only_checkpoint(block_tokens))
        for number in range(held.cached, end // block_tokens):
            block = held.blocks[number]
            if block is not None and self._is_kept(number, sequence):
                self.pool.drop_keys(block)  # of a part of this block
                self._add_key(block, sequence, (number + 1) * block_tokens)
            held.cached = number + 1

    def _is_kept(self, number: int, sequence: CheckpointSequence) -> bool:
        return True

    def _add_key(self, block: KvBlock, sequence: CheckpointSequence, end: int) -> None:
        self.pool.add_key(block, self.key_at(sequence.hashes, end), end)

    def _add_key_within(self, block: KvBlock, sequence: CheckpointSequence, end: int) -> None:
        """Let a block be hit at `end`, next to a key for more tokens, but in place of one for fewer."""
        if self.key_at(sequence.hashes, end) not in block.keys and block.keys and block.key_tokens < end:
            self.pool.drop_keys(block)
        self._add_key(block, sequence, end)

    def _copy_tail(self, held: HeldBlocks, copy: KvBlock) -> list[KvBlock]:
        """Let the request go on in a copy of the shared block."""
        assert held.shared_tail is not None
        place, source = held.shared_tail
        held.blocks[place] = copy
        copy.ref_count += 1
        held.shared_tail = None
        return [source, copy]


class FullAttentionGroup(LayerGroup):
    """Layers that need every block of the prefix."""

    def find(self, hashes: Sequence[bytes], limit: int) -> tuple[list[KvBlock], int]:
        """Return the blocks of the longest match up to `limit` tokens, and its length."""
        block, unit = self.layout.block, self.layout.hash_unit
        found: list[KvBlock] = []
        for end in range(block, limit + 1, block):
            match = self.find_at(hashes, end)
            if match is None:
                break
            found.append(match)
        hit = len(found) * block
        if self.layout.ends_within_blocks:
            last = min(hit + block - unit, limit // unit * unit)
            for end in range(last, hit, -unit):
                match = self.find_at(hashes, end)
                if match is not None:
                    return [*found, match], end
        return found, hit

    def add_keys(self, held: HeldBlocks, sequence: CheckpointSequence, end: int) -> None:
        super().add_keys(held, sequence, end)
        block, unit = self.layout.block, self.layout.hash_unit
        reached = end if self.layout.ends_within_blocks else end // block * block
        boundary = (sequence.prompt_tokens - 1) // unit * unit
        if 0 < boundary <= reached and boundary % block and boundary // block < len(held.blocks):
            tail = held.blocks[boundary // block]
            assert tail is not None
            self._add_key_within(tail, sequence, boundary)


class SparseGroup(LayerGroup):
    """Layers that keep what a prompt needs to go on only at some places."""

    def _boundaries(self, sequence: CheckpointSequence) -> Iterator[int]:
        """Yield the tokens in front of each place where a later prompt can go on."""
        if self.layout.checkpoints.junction_only:
            yield sequence.only_checkpoint(self.layout.block)
            return
        yield sequence.prompt_tokens - 1
        if sequence.junction:
            yield sequence.junction


class WindowGroup(SparseGroup):
    """Sliding-window layers, which need the blocks that the window covers."""

    def retire(self, held: HeldBlocks, computed: int) -> None:
        window, block = self.layout.window, self.layout.block
        assert window is not None
        behind = min(max(computed - window + 1, 0) // block, len(held.blocks))
        freed: list[KvBlock] = []
        for number in range(behind - 1, held.retired - 1, -1):
            retired = held.blocks[number]
            if retired is None:
                break
            freed.append(retired)
            held.blocks[number] = None
        held.retired = max(held.retired, behind)
        self.pool.release(freed)

    def _is_kept(self, number: int, sequence: CheckpointSequence) -> bool:
        block, needed, retention = self.layout.block, self.layout.window_blocks, self.layout.retention
        if retention is None:
            return True
        if retention:
            distance = retention // block
            if number % distance >= distance - needed:
                return True
        return any(end // block - needed <= number < end // block for end in self._boundaries(sequence))


class RecurrentGroup(SparseGroup):
    """Recurrent layers, which need one state; blocks between states do not exist."""

    def retire(self, held: HeldBlocks, computed: int) -> None:
        behind = min((computed - 1) // self.layout.block, len(held.blocks))
        freed: list[KvBlock] = []
        for number in range(behind - 1, held.retired - 1, -1):
            retired = held.blocks[number]
            if retired is not None:
                freed.append(retired)
                held.blocks[number] = None
        held.retired = max(held.retired, behind)
        self.pool.release(freed)

    def grow(self, held: HeldBlocks, end: int) -> list[KvBlock]:
        needed = -(-end // self.layout.block)
        copied: list[KvBlock] = []
        was_running, held.is_running = held.is_running, True
        if needed <= len(held.blocks) and held.shared_tail is None:
            return copied
        held.blocks += [None] * (needed - 1 - len(held.blocks))
        missing = max(needed - len(held.blocks), 0) + (held.shared_tail is not None)
        taken = [self.pool.take() for _ in range(missing)]
        if held.shared_tail is not None:
            copy = taken.pop(0)
            copied = self._move_keys(held, copy) if was_running else self._copy_tail(held, copy)
        held.blocks += taken
        return copied

    def add_keys(self, held: HeldBlocks, sequence: CheckpointSequence, end: int) -> None:
        super().add_keys(held, sequence, end)
        block, unit = self.layout.block, self.layout.hash_unit
        # The next step overwrites the state at the prompt's last boundary within a block, so it has to be copied.
        if self.layout.ends_within_blocks and end == (sequence.prompt_tokens - 1) // unit * unit and end % block:
            place = end // block
            state = held.blocks[place]
            if state is not None:
                self._add_key_within(state, sequence, end)
                held.shared_tail = (place, state)
                held.cached = place

    def _is_kept(self, number: int, sequence: CheckpointSequence) -> bool:
        block, retention = self.layout.block, self.layout.retention
        if retention is None or (retention and (number + 1) % (retention // block) == 0):
            return True
        return any(end // block == number + 1 for end in self._boundaries(sequence))

    def _move_keys(self, held: HeldBlocks, copy: KvBlock) -> list[KvBlock]:
        """Let the request go on in the same block, and the cache keep its state in a copy."""
        assert held.shared_tail is not None
        _, source = held.shared_tail
        keys, tokens = list(source.keys), source.key_tokens
        self.pool.drop_keys(source)
        for key in keys:
            self.pool.add_key(copy, key, tokens)
        source.ref_count += 1
        held.shared_tail = None
        return [source, copy]
