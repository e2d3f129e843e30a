"""vLLM's prefix cache for models with sliding-window or recurrent layers, as a data structure.

One pool of KV blocks serves a group of full-attention layers and several groups of sparse ones. A prefix can be reused
only where all groups have what they need to go on: full attention every block of it, a sliding window the blocks that
the window covers, a recurrent layer the one state behind the last token. The sparse groups keep that only where a
checkpoint arises, see `warmprefix.cache_profiles.Checkpoints`. The rules are those of vLLM 0.32:

- a lookup takes full attention's longest match, then the deepest checkpoint within it (`HybridKVCacheCoordinator`);
- a longer match of full attention is remembered as the request's junction, and leaves a checkpoint too;
- a prefill ends its steps where a recurrent state has to be kept (`Scheduler._mamba_block_aligned_split`);
- a hit within a block is copied to a block of its own before the request writes there;
- blocks that left the window, and old states, are freed after each step; cached ones can be hit until evicted.

Nothing here waits, reads a clock or does I/O. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix_tools.caches.checkpoint_layers import (
    CheckpointLayout,
    CheckpointSequence,
    FullAttentionGroup,
    LayerGroup,
    RecurrentGroup,
    WindowGroup,
)
from warmprefix_tools.caches.kv_blocks import KvBlock, KvCache, chained_hashes, root_hash

__all__ = ["CheckpointCache", "CheckpointLayout", "CheckpointSequence"]


class CheckpointCache(KvCache[CheckpointSequence]):
    """The cache of a model with checkpoints: one pool for all groups of layers."""

    def __init__(self, num_blocks: int, layout: CheckpointLayout) -> None:
        super().__init__(num_blocks)
        self.layout = layout
        """The layers of the model."""
        self._full = FullAttentionGroup(self._pool, layout)
        kind = RecurrentGroup if layout.window is None else WindowGroup
        self._sparse = [kind(self._pool, layout, 1 + number) for number in range(layout.sparse_groups)]
        self._groups: list[LayerGroup] = [self._full, *self._sparse]
        self._promised = 0

    def _allocate(self, token_ids: Sequence[int], cache_salt: str | None, room_for: int) -> CheckpointSequence | None:
        promised = self.layout.most_blocks(len(token_ids) + room_for)
        if self._promised + promised > self.num_blocks - 1:
            return None
        root = root_hash(cache_salt)
        hashes = list(chained_hashes(root, token_ids, self.layout.hash_unit))
        hit, junction, found = self._find(hashes, len(token_ids) - 1)
        held = [group.adopt(blocks, hit) for group, blocks in zip(self._groups, found, strict=True)]
        self._promised += promised
        return CheckpointSequence(
            hit, list(token_ids), len(token_ids), junction, root, hashes, held, promised, computed=hit
        )

    def _store(self, sequence: CheckpointSequence) -> None:
        # In the steps that vLLM's scheduler takes.
        while sequence.computed < sequence.prompt_tokens:
            self._advance(sequence, self._step_end(sequence))

    def _append(self, sequence: CheckpointSequence, token_id: int) -> None:
        sequence.tokens.append(token_id)
        unit = self.layout.hash_unit
        if len(sequence.tokens) % unit == 0:
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            sequence.hashes += chained_hashes(parent, sequence.tokens[-unit:], unit)
        self._advance(sequence, len(sequence.tokens))

    def _free(self, sequence: CheckpointSequence) -> None:
        self._promised -= sequence.promised
        for held in sequence.held:
            self._pool.release(held.present())

    def _find(self, hashes: Sequence[bytes], limit: int) -> tuple[int, int, list[list[KvBlock | None]]]:
        """Return the hit in tokens, the junction or 0, and the blocks of the hit by group."""
        full, full_hit = self._full.find(hashes, limit)
        block = self.layout.block
        if self.layout.window is None:
            hit, found = self._find_state(hashes, full_hit)
        else:
            hit, found = self._find_window(hashes, full_hit)
        kept: list[list[KvBlock | None]] = [list(full[: -(-hit // block)]), *found]
        return hit, full_hit if full_hit > hit else 0, kept

    def _find_state(self, hashes: Sequence[bytes], limit: int) -> tuple[int, list[list[KvBlock | None]]]:
        step = self.layout.hash_unit if self.layout.ends_within_blocks else self.layout.block
        for end in range(limit // step * step, 0, -step):
            states = [group.find_at(hashes, end) for group in self._sparse]
            if None not in states:
                before: list[KvBlock | None] = [None] * (-(-end // self.layout.block) - 1)
                return end, [[*before, state] for state in states]
        return 0, [[] for _ in self._sparse]

    def _find_window(self, hashes: Sequence[bytes], limit: int) -> tuple[int, list[list[KvBlock | None]]]:
        """Search from the right for enough blocks in a row; a run from the first block may be shorter."""
        block, needed = self.layout.block, self.layout.window_blocks
        rows: list[list[KvBlock | None]] = []
        first = limit // block
        while first and len(rows) < needed:
            row = [group.find_at(hashes, first * block) for group in self._sparse]
            first -= 1
            if None in row:
                rows.clear()
            else:
                rows.append(row)
        if not rows:
            return 0, [[] for _ in self._sparse]
        rows.reverse()
        before: list[KvBlock | None] = [None] * first
        return (first + len(rows)) * block, [[*before, *column] for column in zip(*rows, strict=True)]

    def _step_end(self, sequence: CheckpointSequence) -> int:
        """Return where the next prefill step ends, as vLLM's scheduler decides it."""
        layout, start, prompt = self.layout, sequence.computed, sequence.prompt_tokens
        end = min(prompt, start + layout.step_tokens)
        if layout.window is not None:
            return end
        block, unit, junction = layout.block, layout.hash_unit, sequence.junction
        if end < prompt:
            aligned = end // block * block
            if aligned > start or block <= layout.step_tokens:
                end = aligned
        last_boundary = (prompt - 1) // block * block
        stops = [last_boundary]
        if start % block:
            stops.append((start // block + 1) * block)
        if layout.ends_within_blocks:
            tail = (prompt - 1) // unit * unit
            if last_boundary < tail:
                stops.append(tail)
        if start < junction < end:
            stops.append(start + (junction - start) // block * block)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _advance(self, sequence: CheckpointSequence, end: int) -> None:
        """Compute up to `end`: free what is behind, take blocks, and give keys to those that can be hit."""
        for group, held in zip(self._groups, sequence.held, strict=True):
            group.retire(held, sequence.computed)
        copied: list[KvBlock] = []
        for group, held in zip(self._groups, sequence.held, strict=True):
            copied += group.grow(held, end)
        for group, held in zip(self._groups, sequence.held, strict=True):
            group.add_keys(held, sequence, end)
        self._pool.release(copied)  # both ends of a copy are held until the step runs
        sequence.computed = end
