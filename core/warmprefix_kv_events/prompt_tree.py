"""Prompts as chains of KV blocks, and the tree that follows how far each prompt is resident. Pure.

A KV block is identified by a digest of its tokens, of all tokens before it, and of the salt and adapter that requests
must share. The engines' own hashes differ between engines and restarts, and may be too short to be unique.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from warmprefix.plan import Scope
from warmprefix.residency import FoundCheckpoints

__all__ = [
    "KEY_BYTES",
    "TOKEN_BYTES",
    "KvLayout",
    "MappedPrompt",
    "PromptTree",
    "ResidencyChange",
    "chain",
    "pack_tokens",
    "root_key",
]

KEY_BYTES = 16
TOKEN_BYTES = array("I").itemsize


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the ids, `TOKEN_BYTES` each; raise TypeError or OverflowError for an id outside uint32."""
    return array("I", token_ids).tobytes()


def root_key(salt: str | None, adapter: str | None) -> bytes:
    """Return the key before the first KV block, shared by all prompts with this `cache_salt` and LoRA adapter."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (salt, adapter):
        encoded = None if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"\0" if encoded is None else b"\1%d:%s" % (len(encoded), encoded))
    return digest.digest()


class KvLayout(NamedTuple):
    """The tokens that identify a KV block together with those before it."""

    block_size: int
    """Tokens per KV block."""
    lookahead: int = 0
    """Tokens behind each KV block that decide whether it is reused, where the engine drafts with EAGLE or MTP."""

    def full_blocks(self, tokens: int) -> int:
        """Return the number of KV blocks that these first tokens of a prompt decide."""
        return max(tokens - self.lookahead, 0) // self.block_size


def chain(tokens: bytes, layout: KvLayout, root: bytes) -> Iterator[bytes]:
    """Yield the keys of a prompt's full KV blocks, first to last."""
    key, step, ahead = root, layout.block_size * TOKEN_BYTES, layout.lookahead * TOKEN_BYTES
    for end in range(step, len(tokens) - ahead + 1, step):
        key = blake2b(key + tokens[end : end + ahead] + tokens[end - step : end], digest_size=KEY_BYTES).digest()
        yield key


class MappedPrompt(NamedTuple):
    """A prompt with the position of every context block in it."""

    scope: Scope
    cache_salt: str | None
    keys: tuple[bytes, ...]
    """Fingerprints of its context blocks, in order."""
    tokens: bytes
    """The prompt up to the end of the last context block, as returned by `pack_tokens`."""
    ends: tuple[int, ...]
    """For each context block (at least one), the number of tokens up to its end. Never falls."""


class ResidencyChange(NamedTuple):
    """The new residency of one path of context blocks."""

    scope: Scope
    keys: tuple[bytes, ...]
    resident_blocks: int
    checkpoints: FoundCheckpoints | None = None
    """None if the engine continues behind every resident block, or events were lost."""


class PromptTree:
    """The KV blocks of remembered prompts, with common prefixes stored once.

    `holders` returns the sources that hold a KV block, as bits. A prefix is resident if one source holds all of it, so
    a change costs O(blocks whose prefix it completes or breaks).
    """

    def __init__(self, max_prompts: int, max_blocks: int, holders: Callable[[bytes], int]) -> None:
        self.max_prompts = max_prompts
        self.max_blocks = max_blocks
        self.nodes: dict[bytes, _KvNode] = {}
        self.dropped = 0
        """Number of prompts forgotten to stay within the bounds."""
        self._holders = holders
        self._prompts: OrderedDict[_PromptName, _FollowedPrompt] = OrderedDict()
        self._changed: dict[_FollowedPrompt, None] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def remember(self, prompt: MappedPrompt, chains: Iterable[tuple[KvLayout, Iterable[bytes]]]) -> None:
        """Follow this prompt from now on, instead of an earlier one with the same context blocks.

        Args:
            prompt: The prompt.
            chains: For each layout of KV blocks that engines use: the layout, and the keys of the prompt's KV blocks.
                Not consumed if the same prompt is remembered already.
        """
        name = (prompt.scope, prompt.cache_salt, prompt.keys)
        digest = blake2b(prompt.tokens, digest_size=16).digest()
        earlier = self._prompts.get(name)
        if earlier is not None:
            if earlier.digest == digest and earlier.ends == prompt.ends:
                self._prompts.move_to_end(name)
                earlier.presume_resident()
                self._changed[earlier] = None
                return
            self._forget(name)
        entry = _FollowedPrompt(prompt, digest)
        for layout, keys in chains:
            path: list[_KvNode] = []
            for key in islice(keys, layout.full_blocks(prompt.ends[-1])):
                path.append(self._node(key, path[-1] if path else None))
            entry.sizes.append(layout.block_size)
            full = map(layout.full_blocks, prompt.ends)
            entry.boundaries.append([path[blocks - 1] if blocks else None for blocks in full])
        for node in entry.all_boundaries():
            if node.ends is None:
                node.ends = {}
            node.ends[entry] = None
        self._prompts[name] = entry
        self._changed[entry] = None
        while len(self._prompts) > self.max_prompts or (len(self.nodes) > self.max_blocks and self._prompts):
            self._forget(next(iter(self._prompts)))
            self.dropped += 1

    def _node(self, key: bytes, parent: _KvNode | None) -> _KvNode:
        node = self.nodes.get(key)
        if node is None:
            held = self._holders(key)
            self.nodes[key] = node = _KvNode(key, parent, held if parent is None else held & parent.reach)
            if parent is not None:
                if parent.children is None:
                    parent.children = {}
                parent.children[key] = node
        return node

    def forget_model(self, model: str) -> None:
        """Forget all prompts of one model."""
        names = [name for name, prompt in self._prompts.items() if prompt.scope.model == model]
        for name in names:
            self._forget(name)
        self.dropped += len(names)

    def clear(self) -> None:
        """Forget all prompts."""
        self.dropped += len(self._prompts)
        self._prompts.clear()
        self._changed.clear()
        self.nodes.clear()

    def _forget(self, name: _PromptName) -> None:
        prompt = self._prompts.pop(name)
        self._changed.pop(prompt, None)
        boundaries = prompt.all_boundaries()
        for boundary in boundaries:
            if boundary.ends is not None:
                boundary.ends.pop(prompt, None)
        for boundary in boundaries:
            node: _KvNode | None = boundary
            while node is not None and not node.ends and not node.children and self.nodes.get(node.key) is node:
                del self.nodes[node.key]
                if node.parent is not None and node.parent.children is not None:
                    del node.parent.children[node.key]
                node = node.parent

    # -- changes -----------------------------------------------------------------------------------------------

    def refresh(self, keys: Iterable[bytes]) -> dict[bytes, None]:
        """Read `holders` again for these KV blocks, which other sources hold than before.

        Returns:
            The keys of blocks whose prefix other sources hold than before.
        """
        refreshed: dict[bytes, None] = {}
        stack = [self.nodes[key] for key in keys if key in self.nodes]
        stack.reverse()
        while stack:
            node = stack.pop()
            reach = self._holders(node.key)
            if node.parent is not None:
                reach &= node.parent.reach
            if reach == node.reach:
                continue
            refreshed[node.key] = None
            if bool(reach) != bool(node.reach) and node.ends:
                self._changed.update(node.ends)
            node.reach = reach
            if node.children:
                stack.extend(node.children.values())
        return refreshed

    def recheck(self, keys: Iterable[bytes], span: int) -> None:
        """Find the checkpoints again on paths through these KV blocks, as far as `span` blocks from each decide.

        O(blocks within `span` and up to the end of the next context block).
        """
        stack = [(self.nodes[key], span) for key in keys if key in self.nodes]
        while stack:
            node, left = stack.pop()
            if node.ends:
                self._changed.update(node.ends)
            if node.children and (left > 1 or not node.ends):
                stack.extend([(child, left - 1) for child in node.children.values()])

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Refresh these KV blocks, whose state was lost: the residency reported before counts as unknown."""
        before, self._changed = self._changed, {}
        self.refresh(keys)
        for prompt in self._changed:
            prompt.reported = None
        self._changed = before | self._changed

    def review(self, salted: bool) -> None:
        """Report all prompts with a salt again, or all without one, because more is certain now."""
        for prompt in self._prompts.values():
            if (prompt.cache_salt is not None) is salted:
                prompt.reported = None
                self._changed[prompt] = None

    def changes(self, certain: Callable[[str | None], bool], stops: _Stops | None = None) -> list[ResidencyChange]:
        """Return the changes since the last call, without duplicates from prompts with equal paths.

        Args:
            certain: True if a block that is missing in `holders` is missing from every engine, for prompts with this
                salt. Otherwise a block is reported as missing only if it was resident before.
            stops: Returns the numbers of KV blocks of a path behind which engines continue; None for every one that
                they hold. Without it, engines continue behind every block.
        """
        changes: dict[ResidencyChange, None] = {}
        for prompt in self._changed:
            resident, before = prompt.resident_blocks(), prompt.reported
            removed = before is not None and prompt.proven and resident < before
            checkpoints, stops_before = stops and _checkpoints(prompt, stops), prompt.checkpoints
            prompt.reported, prompt.proven, prompt.checkpoints = resident, True, checkpoints
            if resident == before and checkpoints == stops_before:
                continue
            if resident < len(prompt.keys) and (removed or certain(prompt.cache_salt)):
                # Everything behind the first missing block is missing too, whichever prompt it belongs to.
                changes[ResidencyChange(prompt.scope, prompt.keys[: resident + 1], resident, checkpoints)] = None
            elif before is None or resident >= before:
                if resident:
                    changes[ResidencyChange(prompt.scope, prompt.keys[:resident], resident, checkpoints)] = None
            else:
                prompt.reported = None
        self._changed.clear()
        return list(changes)


_Stops = Callable[[Sequence[bytes]], Iterable[int] | None]
_PromptName = tuple[Scope, str | None, tuple[bytes, ...]]


class _KvNode:
    """A KV block of remembered prompts."""

    __slots__ = ("children", "ends", "key", "parent", "reach")

    def __init__(self, key: bytes, parent: _KvNode | None, reach: int) -> None:
        self.key = key
        self.parent = parent
        self.reach = reach
        """Sources that hold this block and all before it, as bits."""
        self.children: dict[bytes, _KvNode] | None = None
        self.ends: dict[_FollowedPrompt, None] | None = None
        """Prompts with a context block that ends in this KV block, or before the next one is full."""


class _FollowedPrompt:
    __slots__ = (
        "boundaries",
        "cache_salt",
        "checkpoints",
        "digest",
        "ends",
        "keys",
        "proven",
        "reported",
        "scope",
        "sizes",
    )

    def __init__(self, prompt: MappedPrompt, digest: bytes) -> None:
        self.scope, self.cache_salt, self.keys, self.ends = prompt.scope, prompt.cache_salt, prompt.keys, prompt.ends
        self.digest = digest
        """Digest of the tokens."""
        self.sizes: list[int] = []
        """All sizes of KV blocks, in tokens."""
        self.boundaries: list[Sequence[_KvNode | None]] = []
        """For each size of KV block: the last full KV block of each context block, None before the first full one."""
        self.presume_resident()

    def presume_resident(self) -> None:
        """Assume that all of it is resident, since it was just served."""
        self.reported: int | None = len(self.keys)
        """Number of blocks that the target takes for resident; None if unknown."""
        self.proven = False
        """True if events confirmed that number."""
        self.checkpoints: FoundCheckpoints | None = None
        """The checkpoints that the target has received."""

    def all_boundaries(self) -> list[_KvNode]:
        return list({node: None for path in self.boundaries for node in path if node is not None})

    def resident_blocks(self) -> int:
        most = 0
        for path in self.boundaries:
            count = 0
            for node in path:
                # A context block before the first full KV block counts as resident as the ones that follow.
                if node is not None and not node.reach:
                    break
                count += 1
            most = max(most, count)
        return most


def _checkpoints(prompt: _FollowedPrompt, find_stops: _Stops) -> FoundCheckpoints | None:
    """Return the checkpoints on the resident part of a prompt. O(its KV blocks)."""
    found: set[int] = set()
    block = 0
    for size, boundaries in zip(prompt.sizes, prompt.boundaries, strict=True):
        node: _KvNode | None = boundaries[-1]
        if node is None:
            continue
        path: list[bytes] = []
        while node is not None:
            path.append(node.key)
            node = node.parent
        path.reverse()
        stops = find_stops(path)
        if stops is None:
            return None
        block = max(block, size)
        found.update([bisect_left(prompt.ends, stop * size) + 1 for stop in stops])
    return FoundCheckpoints(block, tuple(sorted(found))) if block else None
