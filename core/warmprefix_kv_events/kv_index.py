"""The KV blocks that each engine holds, and the remembered prompts that they make resident. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import islice, takewhile

from warmprefix_kv_events.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvHash
from warmprefix_kv_events.prompt_tree import (
    KEY_BYTES,
    TOKEN_BYTES,
    KvLayout,
    MappedPrompt,
    PromptTree,
    ResidencyChange,
    chain,
    pack_tokens,
    root_key,
)
from warmprefix_kv_events.sources import DEFAULT_MEDIUM, KvMedium, KvSource, SparseCache, count_down

__all__ = ["KvIndex"]

_MAX_LAYOUTS, _MAX_ADAPTERS, _MAX_WAITING = 8, 1_024, 256
_DROPPED_SHARE = 16
"""A medium drops one in this many of its blocks at once."""


class KvIndex:
    """The KV blocks of every source (an engine or one of its ranks), and the prompts to find among them.

    The keys of `prompt_tree` identify KV blocks; the sources' hashes are only names for them. A block is held while
    any copy is, on any medium of any source. The prefix of a prompt is resident if one source holds all of it. Not
    thread-safe.

    A hybrid model has several caches. One holds whole prefixes, for its layers with full attention. The sparse ones
    hold single blocks: the last ones of a sliding window, or the states of recurrent layers. The engine continues only
    behind a block where each sparse cache holds what its layers look back at: a *checkpoint*. Only sparse caches in
    blocks of the same size as the whole prefixes' are followed; with another one the source stays incomplete.

    The bounds and `count_copies` are those of `KvEventFeed`; events of sources beyond `max_sources` are dropped.
    """

    def __init__(
        self,
        *,
        max_kv_blocks: int = 1_048_576,
        max_prompts: int = 4_096,
        max_prompt_blocks: int = 131_072,
        max_sources: int = 256,
        count_copies: bool = True,
    ) -> None:
        bounds = {"max_kv_blocks": max_kv_blocks, "max_prompts": max_prompts, "max_prompt_blocks": max_prompt_blocks}
        for name, value in {**bounds, "max_sources": max_sources}.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        self.max_kv_blocks = max_kv_blocks
        self.max_sources = max_sources
        self.unknown = 0
        """Number of stored blocks that were skipped because of an unknown parent or unusable tokens."""
        self._dropped = 0
        self._count_copies = count_copies
        self._sources: dict[Hashable, KvSource] = {}
        self._holders: dict[bytes, int] = {}
        """Sources that hold each block, as bits."""
        self._entries = 0
        self._touched: dict[bytes, None] = {}
        """Blocks of remembered prompts whose holders may have changed."""
        self._touched_sparse: dict[bytes, None] = {}
        """Blocks that a sparse cache stored or dropped."""
        self._was_certain: tuple[bool, bool] = (False, False)
        self._adapters: set[str] = set()
        self._layouts: list[KvLayout] = []
        """All layouts of KV blocks in use."""
        self._waiting: deque[MappedPrompt] = deque()
        """Prompts remembered before the first event with a layout."""
        self._prompts = PromptTree(max_prompts, max_prompt_blocks, lambda key: self._holders.get(key, 0))

    # -- events ------------------------------------------------------------------------------------------------

    def apply(self, name: Hashable, batch: EventBatch) -> None:
        """Apply events of a source, whose state counts as incomplete until `wipe` or a clearing."""
        source = self._source(name)
        if source is None:
            self._dropped += sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
            return
        sparse: list[tuple[SparseCache, BlockStored]] = []
        for event in batch.events:
            if isinstance(event, BlockStored):
                cache = source.cache_of(event)
                if isinstance(cache, SparseCache):
                    sparse.append((cache, event))
                elif cache is None:
                    self._miss(source, len(event.block_hashes))
                elif cache == source.chain_group:
                    self._store(source, event, batch.positional)
                continue
            self._store_sparse(source, sparse)
            if isinstance(event, AllBlocksCleared):
                self._empty(source)
                source.complete = True
            elif (event.group_idx or 0) in source.sparse:
                self._remove_sparse(source.sparse[event.group_idx or 0], event)
            elif (event.group_idx or 0) == source.chain_group:
                self._remove(source, event)
        self._store_sparse(source, sparse)
        if self._entries > self.max_kv_blocks:
            self._drop_oldest()

    def wipe(self, name: Hashable, *, complete: bool) -> None:
        """Discard the state of a source, which is `complete` if its cache is empty, as after a restart."""
        source = self._source(name)
        if source is None:
            return
        self._flush_touched()
        self._empty(source)
        source.layout = None
        source.chain_group = None
        source.sparse.clear()
        source.complete = complete
        if not complete:
            self._withdraw_touched()

    def _source(self, name: Hashable) -> KvSource | None:
        source = self._sources.get(name)
        if source is None and len(self._sources) < self.max_sources:
            self._sources[name] = source = KvSource(1 << len(self._sources))
        return source

    def _store(self, source: KvSource, event: BlockStored, positional: bool) -> None:
        hashes, size, parent = event.block_hashes, event.block_size, event.parent_block_hash
        medium = source.medium(event.medium)
        if medium is None:
            self._miss(source, len(hashes))
            return
        if not event.token_ids:
            self._store_copies(source, medium, hashes)
            return
        extras, behind = event.extra_keys, event.lookahead_token_ids or []
        sharing = event.sharing_key() if (extras and any(extras)) or event.cache_salt or event.lora_name else None
        adapter = None if sharing is None else sharing.adapter
        if not self._accept_layout(source, event) or (event.lora_id is not None and adapter is None):
            self._miss(source, len(hashes))
            return
        if not source.sends_salts:
            source.sends_salts = not positional or bool(extras) or (sharing is not None and sharing.salt is not None)
        if parent is None:
            if adapter is not None and adapter not in self._adapters and len(self._adapters) < _MAX_ADAPTERS:
                self._adapters.add(adapter)
                self._prompts.forget_model(adapter)  # their keys were computed without the adapter
            first: bytes | None = source.root(None if sharing is None else sharing.salt, adapter)
        else:
            first = medium.held.get(parent) or source.find(parent)
        try:
            tokens = pack_tokens(event.token_ids)
            ahead = [*map(pack_tokens, behind)]
        except (OverflowError, TypeError):
            first, tokens, ahead = None, b"", []
        if first is None:
            self._miss(source, len(hashes))
            return
        block_extras = None if sharing is None else sharing.extras
        held, holders, bit, step = medium.held, self._holders, source.bit, size * TOKEN_BYTES
        key, nodes, start = first, self._prompts.nodes, 0
        for position, name in enumerate(hashes):
            block = tokens[start : start + step]
            start += step
            data = key + ahead[position] + block if ahead else key + block
            data = data if block_extras is None else data + block_extras[position]
            key = blake2b(data, digest_size=KEY_BYTES).digest()
            earlier = held.get(name)
            if earlier == key:
                if self._count_copies:
                    medium.copies[name] = medium.copies.get(name, 0) + 1
                continue
            if earlier is not None:  # two blocks with one hash: the engine's hashes are too short, or not chained
                self._miss(source, 1)
                medium.copies.pop(name, None)
                self._release(source, earlier)
            else:
                self._entries += 1
            held[name] = key
            mask = holders.get(key, 0)
            if mask & bit:
                source.extra_names[key] = source.extra_names.get(key, 0) + 1
            else:
                holders[key] = mask | bit
                if key in nodes:
                    self._touched[key] = None

    def _store_copies(self, source: KvSource, medium: KvMedium, hashes: Sequence[KvHash]) -> None:
        """Store copies of blocks whose tokens came when another medium stored them."""
        for name in hashes:
            key = source.find(name)
            if key is None:
                self._miss(source, 1)
            elif name not in medium.held:
                medium.held[name] = key
                self._entries += 1
                source.extra_names[key] = source.extra_names.get(key, 0) + 1
            elif self._count_copies:
                medium.copies[name] = medium.copies.get(name, 0) + 1

    def _store_sparse(self, source: KvSource, stored: list[tuple[SparseCache, BlockStored]]) -> None:
        """Store these blocks of sparse caches, whose names came with the whole prefix after them in the same batch."""
        for cache, event in stored:
            if (event.medium or DEFAULT_MEDIUM) != DEFAULT_MEDIUM:
                continue  # a checkpoint more is no loss; a wrong one would be
            for name in event.block_hashes:
                key = source.find(name)
                if key is None or source.layout is None or event.block_size != source.layout.block_size:
                    self._miss(source, 1)
                elif name in cache.held:
                    if self._count_copies:
                        cache.copies[name] = cache.copies.get(name, 0) + 1
                else:
                    cache.held[name] = key
                    cache.keys.add(key)
                    self._entries += 1
                    self._touched_sparse[key] = None
        stored.clear()

    def _remove_sparse(self, cache: SparseCache, event: BlockRemoved) -> None:
        if (event.medium or DEFAULT_MEDIUM) != DEFAULT_MEDIUM:
            return
        for name in event.block_hashes:
            if not (cache.copies and count_down(cache.copies, name)) and name in cache.held:
                self._release_sparse(cache, name)

    def _release_sparse(self, cache: SparseCache, name: KvHash) -> None:
        key = cache.held.pop(name)
        cache.keys.discard(key)
        self._entries -= 1
        self._touched_sparse[key] = None

    def _remove(self, source: KvSource, event: BlockRemoved) -> None:
        medium = source.medium(event.medium)
        if medium is None:
            return
        held, copies = medium.held, medium.copies
        for name in event.block_hashes:
            if copies and count_down(copies, name):
                continue
            key = held.pop(name, None)
            if key is not None:
                self._entries -= 1
                self._release(source, key)

    def _release(self, source: KvSource, key: bytes) -> None:
        """Remove one of the source's names for this key."""
        if source.extra_names and count_down(source.extra_names, key):
            return
        mask = self._holders[key] & ~source.bit
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]
        if key in self._prompts.nodes:
            self._touched[key] = None

    def _empty(self, source: KvSource) -> None:
        for medium in source.media.values():
            self._entries -= len(medium.held)
            for key in medium.held.values():
                self._release(source, key)
        source.media.clear()
        for cache in source.sparse.values():
            cache.copies.clear()
            for sparse_name in list(cache.held):
                self._release_sparse(cache, sparse_name)

    def _miss(self, source: KvSource, blocks: int) -> None:
        self.unknown += blocks
        source.complete = False

    def _drop_oldest(self) -> None:
        """Drop the oldest blocks of the largest medium until the bound holds."""
        self._flush_touched()
        while self._entries > self.max_kv_blocks:
            source = max(self._sources.values(), key=KvSource.size)
            medium = max((*source.media.values(), *source.sparse.values()), key=lambda medium: len(medium.held))
            for name in list(islice(medium.held, max(len(medium.held) // _DROPPED_SHARE, 1))):
                medium.copies.pop(name, None)
                self._dropped += 1
                if isinstance(medium, SparseCache):
                    self._release_sparse(medium, name)
                else:
                    key = medium.held.pop(name)
                    self._entries -= 1
                    self._release(source, key)
            source.complete = False
        self._withdraw_touched()

    def _accept_layout(self, source: KvSource, event: BlockStored) -> bool:
        """Return True if the event has the layout of the source's KV blocks; its first event sets it."""
        blocks, behind = len(event.block_hashes), event.lookahead_token_ids or []
        layout = KvLayout(event.block_size, len(behind[0]) if behind else 0)
        if layout.block_size < 1 or len(event.token_ids) != layout.block_size * blocks:
            return False
        if behind and [*map(len, behind)] != [layout.lookahead] * blocks:
            return False
        if source.layout is not None:
            return source.layout == layout
        if layout not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                return False
            self._layouts = sorted([*self._layouts, layout])
            self._prompts.clear()  # their tokens are gone, so their blocks of this layout cannot be computed
            while self._waiting:
                self.remember(self._waiting.popleft())
        source.layout = layout
        return True

    # -- prompts -----------------------------------------------------------------------------------------------

    def remember(self, prompt: MappedPrompt) -> None:
        """Include this prompt in `changes` from now on, beginning with its current residency."""
        if not self._layouts:
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(prompt)
            return
        self._flush_touched()
        model = prompt.scope.model
        root = root_key(prompt.cache_salt, model if model in self._adapters else None)
        self._prompts.remember(prompt, [(layout, chain(prompt.tokens, layout, root)) for layout in self._layouts])

    def changes(self, *, all_connected: bool = True) -> list[ResidencyChange]:
        """Return the paths whose residency changed since the last call.

        Unless `all_connected` (every engine is, and has reported), no missing block is certain.
        """
        certain = (all_connected and self.certain(salted=False), all_connected and self.certain(salted=True))
        for salted in (False, True):
            if certain[salted] and not self._was_certain[salted]:
                self._prompts.review(salted)
        self._was_certain = certain
        self._flush_touched()
        return self._prompts.changes(lambda salt: certain[salt is not None], self._stops if self._is_hybrid else None)

    def _flush_touched(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            changed = self._prompts.refresh(touched)
            if self._is_hybrid:
                self._touched_sparse.update(changed)
        if self._touched_sparse:
            touched, self._touched_sparse = self._touched_sparse, {}
            span = max(
                [cache.blocks for source in self._sources.values() for cache in source.sparse.values()], default=1
            )
            self._prompts.recheck(touched, span)

    def _withdraw_touched(self) -> None:
        touched, self._touched = self._touched, {}
        self._prompts.withdraw(touched)

    @property
    def _is_hybrid(self) -> bool:
        return any(source.sparse for source in self._sources.values())

    def _stops(self, path: Sequence[bytes]) -> set[int] | None:
        """Return the numbers of blocks of this prefix behind which a source continues.

        None if one that holds some of it has no sparse caches, or lost events. O(sources * blocks).
        """
        stops: set[int] = set()
        for source in self._sources.values():
            held = self._held_part(source, path)
            if held and (not source.sparse or not source.complete):
                return None
            stops |= source.stops(held)
        return stops

    def _held_part(self, source: KvSource, path: Sequence[bytes]) -> list[bytes]:
        """Return the part of this prefix that a source holds."""
        return [*takewhile(lambda key: self._holders.get(key, 0) & source.bit, path)]

    def certain(self, *, salted: bool = False) -> bool:
        """Return True if a block missing here is missing from every source, because no event was lost.

        Never True for salted prompts while a source does not send salts. Only this method may be called from any
        thread.
        """
        sources = list(self._sources.values())  # a copy: another thread may add a source
        return bool(sources) and all(source.complete and (source.sends_salts or not salted) for source in sources)

    @property
    def sources(self) -> int:
        """Number of sources that sent an event."""
        return len(self._sources)

    @property
    def kv_blocks(self) -> int:
        """Number of KV blocks that any source holds."""
        return len(self._holders)

    @property
    def prompts(self) -> int:
        """Number of remembered prompts."""
        return len(self._prompts) + len(self._waiting)

    @property
    def dropped(self) -> int:
        """Number of KV blocks and prompts dropped to stay within the bounds."""
        return self._dropped + self._prompts.dropped
