"""The KV blocks that each engine holds, and the remembered prompts that they make resident. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

from warmprefix.residency.kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvHash
from warmprefix.residency.kv.prompt_tree import (
    KEY_BYTES,
    TOKEN_BYTES,
    MappedPrompt,
    PromptTree,
    ResidencyChange,
    chain,
    pack_tokens,
    root_key,
)

__all__ = ["KvIndex"]

_Key = TypeVar("_Key")

_DEFAULT_MEDIUM = "GPU"
_MAX_MEDIA, _MAX_SIZES, _MAX_ADAPTERS, _MAX_ROOTS, _MAX_WAITING = 16, 8, 1_024, 1_024, 256
_DROPPED_SHARE = 16
"""A medium drops one in this many of its blocks at once."""


class KvIndex:
    """The KV blocks of every source (an engine or one of its ranks), and the prompts to find among them.

    The keys of `prompt_tree` identify KV blocks; the sources' hashes are only names for them. A block is held while
    any copy is, on any medium of any source. The prefix of a prompt is resident if one source holds all of it. Not
    thread-safe.

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
        self._sources: dict[Hashable, _Source] = {}
        self._holders: dict[bytes, int] = {}
        """Sources that hold each block, as bits."""
        self._entries = 0
        self._touched: dict[bytes, None] = {}
        """Blocks of remembered prompts whose holders may have changed."""
        self._was_certain: tuple[bool, bool] = (False, False)
        self._adapters: set[str] = set()
        self._sizes: list[int] = []
        """Tokens per KV block: all values in use."""
        self._waiting: deque[MappedPrompt] = deque()
        """Prompts remembered before the first event with a block size."""
        self._prompts = PromptTree(max_prompts, max_prompt_blocks, lambda key: self._holders.get(key, 0))

    # -- events ------------------------------------------------------------------------------------------------

    def apply(self, name: Hashable, batch: EventBatch) -> None:
        """Apply events of a source, whose state counts as incomplete until `wipe` or a clearing."""
        source = self._source(name)
        if source is None:
            self._dropped += sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
            return
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._empty(source)
                source.complete = True
            elif event.group_idx:
                continue  # of several caches of a hybrid model the first one decides about reuse
            elif isinstance(event, BlockRemoved):
                self._remove(source, event)
            else:
                self._store(source, event, batch.positional)
        if self._entries > self.max_kv_blocks:
            self._drop_oldest()

    def wipe(self, name: Hashable, *, complete: bool) -> None:
        """Discard the state of a source, which is `complete` if its cache is empty, as after a restart."""
        source = self._source(name)
        if source is None:
            return
        self._flush_touched()
        self._empty(source)
        source.block_size = 0
        source.complete = complete
        if not complete:
            self._withdraw_touched()

    def _source(self, name: Hashable) -> _Source | None:
        source = self._sources.get(name)
        if source is None and len(self._sources) < self.max_sources:
            self._sources[name] = source = _Source(1 << len(self._sources))
        return source

    def _store(self, source: _Source, event: BlockStored, positional: bool) -> None:
        hashes, size, parent = event.block_hashes, event.block_size, event.parent_block_hash
        medium = source.medium(event.medium)
        if medium is None:
            self._miss(source, len(hashes))
            return
        if not event.token_ids:
            self._store_copies(source, medium, hashes)
            return
        extras = event.extra_keys
        sharing = event.sharing_key() if (extras and any(extras)) or event.cache_salt or event.lora_name else None
        adapter = None if sharing is None else sharing.adapter
        if (
            size < 1
            or len(event.token_ids) != size * len(hashes)
            or not self._accept_block_size(source, size)
            or (event.lora_id is not None and adapter is None)
        ):
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
        except (OverflowError, TypeError):
            first, tokens = None, b""
        if first is None:
            self._miss(source, len(hashes))
            return
        block_extras = None if sharing is None else sharing.extras
        held, holders, bit, step = medium.held, self._holders, source.bit, size * TOKEN_BYTES
        key, nodes, start = first, self._prompts.nodes, 0
        for position, name in enumerate(hashes):
            block = tokens[start : start + step]
            start += step
            data = key + block if block_extras is None else key + block + block_extras[position]
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

    def _store_copies(self, source: _Source, medium: _Medium, hashes: Sequence[KvHash]) -> None:
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

    def _remove(self, source: _Source, event: BlockRemoved) -> None:
        medium = source.medium(event.medium)
        if medium is None:
            return
        held, copies = medium.held, medium.copies
        for name in event.block_hashes:
            if copies and _count_down(copies, name):
                continue
            key = held.pop(name, None)
            if key is not None:
                self._entries -= 1
                self._release(source, key)

    def _release(self, source: _Source, key: bytes) -> None:
        """Remove one of the source's names for this key."""
        if source.extra_names and _count_down(source.extra_names, key):
            return
        mask = self._holders[key] & ~source.bit
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]
        if key in self._prompts.nodes:
            self._touched[key] = None

    def _empty(self, source: _Source) -> None:
        for medium in source.media.values():
            self._entries -= len(medium.held)
            for key in medium.held.values():
                self._release(source, key)
        source.media.clear()

    def _miss(self, source: _Source, blocks: int) -> None:
        self.unknown += blocks
        source.complete = False

    def _drop_oldest(self) -> None:
        """Drop the oldest blocks of the largest medium until the bound holds."""
        self._flush_touched()
        while self._entries > self.max_kv_blocks:
            source = max(self._sources.values(), key=_Source.size)
            medium = max(source.media.values(), key=lambda medium: len(medium.held))
            for name in list(islice(medium.held, max(len(medium.held) // _DROPPED_SHARE, 1))):
                key = medium.held.pop(name)
                medium.copies.pop(name, None)
                self._entries -= 1
                self._dropped += 1
                self._release(source, key)
            source.complete = False
        self._withdraw_touched()

    def _accept_block_size(self, source: _Source, size: int) -> bool:
        """Return True if this is the source's block size; its first event sets it."""
        if source.block_size:
            return source.block_size == size
        if size not in self._sizes:
            if len(self._sizes) >= _MAX_SIZES:
                return False
            self._sizes = sorted([*self._sizes, size])
            self._prompts.clear()  # their tokens are gone, so their blocks of this size cannot be computed
            while self._waiting:
                self.remember(self._waiting.popleft())
        source.block_size = size
        return True

    # -- prompts -----------------------------------------------------------------------------------------------

    def remember(self, prompt: MappedPrompt) -> None:
        """Include this prompt in `changes` from now on, beginning with its current residency."""
        if not self._sizes:
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(prompt)
            return
        self._flush_touched()
        model = prompt.scope.model
        root = root_key(prompt.cache_salt, model if model in self._adapters else None)
        self._prompts.remember(prompt, [(size, chain(prompt.tokens, size, root)) for size in self._sizes])

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
        return self._prompts.changes(lambda salt: certain[salt is not None])

    def _flush_touched(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            self._prompts.refresh(touched)

    def _withdraw_touched(self) -> None:
        touched, self._touched = self._touched, {}
        self._prompts.withdraw(touched)

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


def _count_down(counts: dict[_Key, int], key: _Key) -> bool:
    """Subtract 1, and drop a count of 0; return False without a count."""
    left = counts.get(key)
    if left is None:
        return False
    if left > 1:
        counts[key] = left - 1
    else:
        del counts[key]
    return True


class _Source:
    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.complete = False
        """True if no event was lost since it was last empty."""
        self.sends_salts = False
        self.block_size = 0
        """Tokens per KV block; 0 before the first event."""
        self.media: dict[str, _Medium] = {}
        self.extra_names: dict[bytes, int] = {}
        """For keys with several names, on one medium or several: the number of names beyond the first."""
        self._roots: dict[tuple[str | None, str | None], bytes] = {}

    def medium(self, name: str | None) -> _Medium | None:
        medium = self.media.get(name or _DEFAULT_MEDIUM)
        if medium is None and len(self.media) < _MAX_MEDIA:
            self.media[name or _DEFAULT_MEDIUM] = medium = _Medium()
        return medium

    def find(self, name: KvHash) -> bytes | None:
        for medium in self.media.values():
            key = medium.held.get(name)
            if key is not None:
                return key
        return None

    def root(self, salt: str | None, adapter: str | None) -> bytes:
        root = self._roots.get((salt, adapter))
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            self._roots[salt, adapter] = root = root_key(salt, adapter)
        return root

    def size(self) -> int:
        return sum(len(medium.held) for medium in self.media.values())


class _Medium:
    __slots__ = ("copies", "held")

    def __init__(self) -> None:
        self.held: dict[KvHash, bytes] = {}
        """Our key for each of the source's names."""
        self.copies: dict[KvHash, int] = {}
        """For names with several copies: the number of copies beyond the first."""
