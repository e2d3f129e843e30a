"""What each engine's prefix cache holds, by its own account, and what of prompts that makes resident. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import islice

from warmprefix.residency.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvHash
from warmprefix.residency.kv_keys import KEY_BYTES, TOKEN_BYTES, chain, pack_tokens, root_key
from warmprefix.residency.kv_prompts import Change, MappedPrompt, PromptTree

__all__ = ["KvIndex"]

_MAIN = "GPU"
"""The medium that is meant where none is told."""
_MOST_MEDIA, _MOST_SIZES, _MOST_ADAPTERS, _MOST_ROOTS, _MOST_WAITING = 16, 8, 1_024, 1_024, 256
_SHARE_DROPPED = 16
"""Of what a medium holds, one part in so many is dropped at once."""


class KvIndex:
    """What every source, an engine or one of its ranks, holds; and the prompts that are to be found there.

    A KV block is known by a key of this index's own making (`kv_keys`), to which each source's hashes are but names.
    It is held as long as any copy is: on any medium, by any source. A prompt's prefix is resident if one source holds
    all of it. Not safe for threads.

    Args:
        max_kv_blocks: Most KV blocks of which it is known that they are held; beyond it the longest known are dropped.
        max_prompts: Most prompts remembered.
        max_prompt_blocks: Most KV blocks of which those may consist, shared ones counted once.
        max_sources: Most sources; what others tell is not heard.
        count_copies: Whether a source that stores a block twice has to remove it twice. So it is with vLLM, unless
            clients ask it to report reused blocks as well (`kv_cache_report_mode`).
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
        for name, value in (
            ("max_kv_blocks", max_kv_blocks),
            ("max_prompts", max_prompts),
            ("max_prompt_blocks", max_prompt_blocks),
            ("max_sources", max_sources),
        ):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        self.max_kv_blocks = max_kv_blocks
        self.max_sources = max_sources
        self.unknown = 0
        """Stored blocks that could not be taken up, because nothing is known of their parent or their tokens."""
        self._dropped = 0
        self._count_copies = count_copies
        self._sources: dict[Hashable, _Source] = {}
        self._holders: dict[bytes, int] = {}
        """For each block that is held, by which sources: bits."""
        self._entries = 0
        self._touched: dict[bytes, None] = {}
        """Blocks of remembered prompts that may be held by other sources than before."""
        self._was_certain: tuple[bool, bool] = (False, False)
        self._adapters: set[str] = set()
        self._sizes: list[int] = []
        """Tokens a KV block, of all kinds of source."""
        self._waiting: deque[MappedPrompt] = deque()
        """Prompts remembered before anybody told how many tokens a KV block has."""
        self._prompts = PromptTree(max_prompts, max_prompt_blocks, lambda key: self._holders.get(key, 0))

    # -- what sources tell -------------------------------------------------------------------------------------

    def apply(self, name: Hashable, batch: EventBatch) -> None:
        """Take up what this source told. Its history counts as incomplete until `wipe` or a clearing says otherwise."""
        source = self._source(name)
        if source is None:
            self._dropped += sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
            return
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._empty(source)
                source.complete = True
            elif event.group_idx:
                continue  # another of several caches, of which the first decides what is reused
            elif isinstance(event, BlockRemoved):
                self._remove(source, event)
            else:
                self._store(source, event, batch.positional)
        if self._entries > self.max_kv_blocks:
            self._drop_oldest()

    def wipe(self, name: Hashable, *, known: bool) -> None:
        """This source holds nothing: because that is so, or because nothing is known of it any more."""
        source = self._source(name)
        if source is None:
            return
        self._flush_touched()
        self._empty(source)
        source.block_size = 0
        source.complete = known
        if not known:
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
        sharing = event.sharing() if (extras and any(extras)) or event.cache_salt or event.lora_name else None
        adapter = None if sharing is None else sharing.adapter
        if (
            size < 1
            or len(event.token_ids) != size * len(hashes)
            or not self._learn_block_size(source, size)
            or (event.lora_id is not None and adapter is None)
        ):
            self._miss(source, len(hashes))
            return
        if not source.tells_salts:
            source.tells_salts = not positional or bool(extras) or (sharing is not None and sharing.salt is not None)
        if parent is None:
            if adapter is not None and adapter not in self._adapters:
                self._learn_adapter(adapter)
            key = source.root(None if sharing is None else sharing.salt, adapter)
        else:
            named = medium.held.get(parent) or source.find(parent)
            if named is None:
                self._miss(source, len(hashes))
                return
            key = named
        try:
            tokens = pack_tokens(event.token_ids)
        except (OverflowError, TypeError):
            self._miss(source, len(hashes))
            return
        others = None if sharing is None else sharing.others
        held, holders, bit, step = medium.held, self._holders, source.bit, size * TOKEN_BYTES
        nodes, start = self._prompts.nodes, 0
        for position, name in enumerate(hashes):
            block = tokens[start : start + step]
            start += step
            data = key + block if others is None else key + block + others[position]
            key = blake2b(data, digest_size=KEY_BYTES).digest()
            known = held.get(name)
            if known == key:
                if self._count_copies:
                    medium.copies[name] = medium.copies.get(name, 0) + 1
                continue
            if known is not None:  # two blocks under one name: the engine's hashes are too short, or not chained
                self._miss(source, 1)
                medium.copies.pop(name, None)
                self._release(source, known)
            else:
                self._entries += 1
            held[name] = key
            mask = holders.get(key, 0)
            if mask & bit:
                source.again[key] = source.again.get(key, 0) + 1
            else:
                holders[key] = mask | bit
                if key in nodes:
                    self._touched[key] = None

    def _store_copies(self, source: _Source, medium: _Medium, hashes: Sequence[KvHash]) -> None:
        """Copies of blocks that were told in full when another medium stored them."""
        for name in hashes:
            key = source.find(name)
            if key is None:
                self._miss(source, 1)
            elif name not in medium.held:
                medium.held[name] = key
                self._entries += 1
                source.again[key] = source.again.get(key, 0) + 1
            elif self._count_copies:
                medium.copies[name] = medium.copies.get(name, 0) + 1

    def _remove(self, source: _Source, event: BlockRemoved) -> None:
        medium = source.medium(event.medium)
        if medium is None:
            return
        held, copies = medium.held, medium.copies
        for name in event.block_hashes:
            if copies:
                left = copies.get(name)
                if left is not None:
                    if left > 1:
                        copies[name] = left - 1
                    else:
                        del copies[name]
                    continue
            key = held.pop(name, None)
            if key is not None:
                self._entries -= 1
                self._release(source, key)

    def _release(self, source: _Source, key: bytes) -> None:
        """One name less for this key at this source."""
        again = source.again
        if again and key in again:
            left = again[key]
            if left > 1:
                again[key] = left - 1
            else:
                del again[key]
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
        """Make room where most is held."""
        self._flush_touched()
        while self._entries > self.max_kv_blocks:
            source = max(self._sources.values(), key=_Source.size)
            medium = max(source.media.values(), key=lambda medium: len(medium.held))
            for name in list(islice(medium.held, max(len(medium.held) // _SHARE_DROPPED, 1))):
                key = medium.held.pop(name)
                medium.copies.pop(name, None)
                self._entries -= 1
                self._dropped += 1
                self._release(source, key)
            source.complete = False
        self._withdraw_touched()

    def _learn_block_size(self, source: _Source, size: int) -> bool:
        """Whether this source has KV blocks of this size, as far as was told."""
        if source.block_size:
            return source.block_size == size
        if size not in self._sizes:
            if len(self._sizes) >= _MOST_SIZES:
                return False
            self._sizes = sorted([*self._sizes, size])
            self._prompts.clear()  # of their KV blocks in this size nothing is known, for their tokens are gone
            waiting = list(self._waiting)
            self._waiting.clear()
            for prompt in waiting:
                self.remember(prompt)
        source.block_size = size
        return True

    def _learn_adapter(self, adapter: str) -> None:
        if len(self._adapters) < _MOST_ADAPTERS:
            self._adapters.add(adapter)
            self._prompts.forget_model(adapter)  # they were taken for prompts of the model without it

    # -- what is asked -----------------------------------------------------------------------------------------

    def remember(self, prompt: MappedPrompt) -> None:
        """From now on `changes` tells of this prompt; first what is resident of it now."""
        if not self._sizes:
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(prompt)
            return
        self._flush_touched()
        root = root_key(prompt.cache_salt, self._adapter(prompt.scope.model))
        self._prompts.remember(prompt, [(size, chain(prompt.tokens, size, root)) for size in self._sizes])

    def _adapter(self, model: str | None) -> str | None:
        return model if model in self._adapters else None

    def resident_tokens(self, tokens: bytes, salt: str | None = None, model: str | None = None) -> int:
        """How long a prefix of this prompt one source holds, in tokens of full KV blocks.

        Args:
            tokens: The prompt, as `kv_keys.pack_tokens` makes it.
            salt: The request's `cache_salt`.
            model: The name it is requested under, which may be a LoRA adapter's.
        """
        root = root_key(salt, self._adapter(model))
        most = 0
        for size in self._sizes:
            mask, blocks = -1, 0
            for key in chain(tokens, size, root):
                mask &= self._holders.get(key, 0)
                if not mask:
                    break
                blocks += 1
            most = max(most, blocks * size)
        return most

    def changes(self, *, all_heard: bool = True) -> list[Change]:
        """What there is to tell since the last call: paths of which more or less is resident than was told.

        Args:
            all_heard: Whether every source there is was heard of. Otherwise nothing is certain.
        """
        certain = (all_heard and self.certain(salted=False), all_heard and self.certain(salted=True))
        for salted in (False, True):
            if certain[salted] and not self._was_certain[salted]:
                self._prompts.review(salted)
        self._was_certain = certain
        self._flush_touched()
        return self._prompts.changes(lambda salt: certain[salt is not None])

    def _flush_touched(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            self._prompts.held_changed(touched)

    def _withdraw_touched(self) -> None:
        touched, self._touched = self._touched, {}
        self._prompts.withdraw(touched)

    def certain(self, *, salted: bool = False) -> bool:
        """Whether a block that is not known to be held is not, by any source heard of: nothing that one did was missed.

        Of salted prompts nothing is certain while a source does not tell salts. This alone any thread may ask.
        """
        sources = list(self._sources.values())  # at once, for another thread may add one
        return bool(sources) and all(source.complete and (source.tells_salts or not salted) for source in sources)

    @property
    def sources(self) -> int:
        """How many have told anything."""
        return len(self._sources)

    @property
    def kv_blocks(self) -> int:
        """KV blocks that any source holds."""
        return len(self._holders)

    @property
    def prompts(self) -> int:
        """Prompts remembered."""
        return len(self._prompts) + len(self._waiting)

    @property
    def dropped(self) -> int:
        """KV blocks and prompts that were forgotten, or not taken up, to keep within the bounds."""
        return self._dropped + self._prompts.dropped

    def check_integrity(self) -> None:
        """Raise AssertionError unless all invariants hold; for tests. O(all)."""
        holders: dict[bytes, int] = {}
        entries = 0
        for source in self._sources.values():
            names: dict[bytes, int] = {}
            for medium in source.media.values():
                assert all(copies > 0 for copies in medium.copies.values())
                assert medium.copies.keys() <= medium.held.keys()
                entries += len(medium.held)
                for key in medium.held.values():
                    names[key] = names.get(key, 0) + 1
            assert source.again == {key: count - 1 for key, count in names.items() if count > 1}
            for key in names:
                holders[key] = holders.get(key, 0) | source.bit
        assert holders == self._holders
        assert entries == self._entries <= self.max_kv_blocks
        self._flush_touched()
        self._prompts.check_integrity()


class _Source:
    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.complete = False
        """Whether all that it ever did is known, or all since it was last empty."""
        self.tells_salts = False
        self.block_size = 0
        """0 until it is told."""
        self.media: dict[str, _Medium] = {}
        self.again: dict[bytes, int] = {}
        """Of keys with more than one name, on one medium or several, how many more."""
        self._roots: dict[tuple[str | None, str | None], bytes] = {}

    def medium(self, name: str | None) -> _Medium | None:
        medium = self.media.get(name or _MAIN)
        if medium is None and len(self.media) < _MOST_MEDIA:
            self.media[name or _MAIN] = medium = _Medium()
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
            if len(self._roots) >= _MOST_ROOTS:
                self._roots.clear()
            self._roots[salt, adapter] = root = root_key(salt, adapter)
        return root

    def size(self) -> int:
        return sum(len(medium.held) for medium in self.media.values())


class _Medium:
    __slots__ = ("copies", "held")

    def __init__(self) -> None:
        self.held: dict[KvHash, bytes] = {}
        """The source's names, and ours."""
        self.copies: dict[KvHash, int] = {}
        """How many copies more than one there are."""
