"""The KV blocks that one engine, or one of its ranks, holds by its own names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from warmprefix_kv_events.kv_events import BlockStored, KvHash
from warmprefix_kv_events.prompt_tree import KvLayout, root_key

__all__ = ["DEFAULT_MEDIUM", "KvMedium", "KvSource", "SparseCache", "count_down"]

_Key = TypeVar("_Key")

DEFAULT_MEDIUM = "GPU"
_MAX_MEDIA, _MAX_ROOTS, _MAX_GROUPS = 16, 1_024, 64
_CHAIN_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
_WINDOW_KINDS = ("sliding_window", "sliding_window_mla")


def count_down(counts: dict[_Key, int], key: _Key) -> bool:
    """Subtract 1, and drop a count of 0; return False without a count."""
    left = counts.get(key)
    if left is None:
        return False
    if left > 1:
        counts[key] = left - 1
    else:
        del counts[key]
    return True


class KvSource:
    """The state of one publisher of events."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.complete = False
        """True if no event was lost since it was last empty."""
        self.sends_salts = False
        self.layout: KvLayout | None = None
        """The layout of its KV blocks; None before the first event."""
        self.media: dict[str, KvMedium] = {}
        self.extra_names: dict[bytes, int] = {}
        """For keys with several names, on one medium or several: the number of names beyond the first."""
        self.chain_group: int | None = None
        """Index of the cache that holds whole prefixes: the first one of its kind."""
        self.sparse: dict[int, SparseCache] = {}
        """The other caches of a hybrid model, by index."""
        self._roots: dict[tuple[str | None, str | None], bytes] = {}

    def medium(self, name: str | None) -> KvMedium | None:
        medium = self.media.get(name or DEFAULT_MEDIUM)
        if medium is None and len(self.media) < _MAX_MEDIA:
            self.media[name or DEFAULT_MEDIUM] = medium = KvMedium()
        return medium

    def cache_of(self, event: BlockStored) -> SparseCache | int | None:
        """Return the sparse cache that stored these blocks, or the index of another; None for an unknown kind."""
        index, kind = event.group_idx or 0, event.kv_cache_spec_kind
        if kind in _CHAIN_KINDS:
            if self.chain_group is None and (index == 0 or kind is not None):
                self.chain_group = index
            return index
        cache = self.sparse.get(index)
        if cache is None and len(self.sparse) < _MAX_GROUPS:
            window = event.kv_cache_spec_sliding_window
            if kind == "mamba":
                self.sparse[index] = cache = SparseCache(1)
            elif kind in _WINDOW_KINDS and isinstance(window, int) and window > 1 and event.block_size > 0:
                self.sparse[index] = cache = SparseCache(-(-(window - 1) // event.block_size))
        return cache

    def stops(self, path: Sequence[bytes]) -> set[int]:
        """Return the numbers of blocks of this held path behind which every sparse cache allows to continue."""
        stops = set(range(1, len(path) + 1))
        for cache in self.sparse.values():
            run = 0
            for position, key in enumerate(path, 1):
                run = run + 1 if key in cache.keys else 0
                if run < min(cache.blocks, position):
                    stops.discard(position)
        return stops

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
        return sum(len(medium.held) for medium in (*self.media.values(), *self.sparse.values()))


class KvMedium:
    """The names of the blocks on one medium."""

    __slots__ = ("copies", "held")

    def __init__(self) -> None:
        self.held: dict[KvHash, bytes] = {}
        """Our key for each of the source's names."""
        self.copies: dict[KvHash, int] = {}
        """For names with several copies: the number of copies beyond the first."""


class SparseCache(KvMedium):
    """One of the caches of a hybrid model that keep only some blocks of a prefix."""

    __slots__ = ("blocks", "keys")

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        """Number of blocks that its layers look back at; all of them, at the beginning of a prompt."""
        self.keys: set[bytes] = set()
        """The values of `held`."""
