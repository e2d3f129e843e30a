"""The KV blocks of remembered prompts as a tree, and how far each prompt is resident."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from warmprefix.plan import Scope

__all__ = ["Change", "MappedPrompt", "PromptTree"]


class MappedPrompt(NamedTuple):
    """A prompt in which every context block was found."""

    scope: Scope
    cache_salt: str | None
    keys: tuple[bytes, ...]
    """Fingerprints of its context blocks, in their order."""
    tokens: bytes
    """The prompt up to the end of the last of them, as `kv_keys.pack_tokens` makes it."""
    ends: tuple[int, ...]
    """For each context block, one at least, how many tokens of the prompt end with it. Never falls."""


class Change(NamedTuple):
    """What is to be told of one path of context blocks."""

    scope: Scope
    keys: tuple[bytes, ...]
    resident_blocks: int


class PromptTree:
    """Which KV blocks each remembered prompt consists of, those that prompts share kept once.

    `holders` says for a KV block's key, as a set of bits, which sources hold it. A prefix is resident where one source
    holds all of it, so a change of one block concerns the prompts beyond it, and those only as long as everything
    before it is held: each change costs O(blocks whose prefix it completes or breaks).
    """

    def __init__(self, max_prompts: int, max_blocks: int, holders: Callable[[bytes], int]) -> None:
        self.max_prompts = max_prompts
        self.max_blocks = max_blocks
        self.nodes: dict[bytes, _Node] = {}
        self.dropped = 0
        """Prompts forgotten to keep within the bounds."""
        self._holders = holders
        self._prompts: OrderedDict[_Name, _Prompt] = OrderedDict()
        self._changed: dict[_Prompt, None] = {}

    def __len__(self) -> int:
        """How many prompts are remembered."""
        return len(self._prompts)

    def remember(self, prompt: MappedPrompt, chains: Iterable[tuple[int, Iterable[bytes]]]) -> None:
        """Follow this prompt from now on, in place of an earlier one of the same context blocks.

        Args:
            prompt: What is followed.
            chains: For each size of KV block that engines use: the size, and the keys of the prompt's KV blocks. Not
                asked for if this very prompt is remembered already.
        """
        name = (prompt.scope, prompt.cache_salt, prompt.keys)
        digest = blake2b(prompt.tokens, digest_size=16).digest()
        known = self._prompts.get(name)
        if known is not None:
            if known.digest == digest and known.ends == prompt.ends:
                self._prompts.move_to_end(name)
                known.presume_resident()
                self._changed[known] = None
                return
            self._forget(name)
        entry = _Prompt(prompt, digest)
        for size, keys in chains:
            path: list[_Node] = []
            for key in islice(keys, prompt.ends[-1] // size):
                path.append(self._node(key, path[-1] if path else None))
            entry.boundaries.append([path[end // size - 1] if end // size else None for end in prompt.ends])
        for node in entry.all_boundaries():
            if node.ends is None:
                node.ends = {}
            node.ends[entry] = None
        self._prompts[name] = entry
        self._changed[entry] = None
        while len(self._prompts) > self.max_prompts or (len(self.nodes) > self.max_blocks and self._prompts):
            self._forget(next(iter(self._prompts)))
            self.dropped += 1

    def _node(self, key: bytes, parent: _Node | None) -> _Node:
        node = self.nodes.get(key)
        if node is None:
            held = self._holders(key)
            self.nodes[key] = node = _Node(key, parent, held if parent is None else held & parent.reach)
            if parent is not None:
                if parent.children is None:
                    parent.children = {}
                parent.children[key] = node
        return node

    def forget_model(self, model: str) -> None:
        """Forget all prompts for one model."""
        for name, prompt in list(self._prompts.items()):
            if prompt.scope.model == model:
                self._forget(name)
                self.dropped += 1

    def clear(self) -> None:
        """Forget all prompts."""
        self.dropped += len(self._prompts)
        self._prompts.clear()
        self._changed.clear()
        self.nodes.clear()

    def _forget(self, name: _Name) -> None:
        prompt = self._prompts.pop(name)
        self._changed.pop(prompt, None)
        for node in prompt.all_boundaries():
            if node.ends is not None:
                node.ends.pop(prompt, None)
        for node in prompt.all_boundaries():
            self._prune(node)

    def _prune(self, node: _Node | None) -> None:
        while node is not None and not node.ends and not node.children and self.nodes.get(node.key) is node:
            del self.nodes[node.key]
            parent = node.parent
            if parent is not None and parent.children is not None:
                del parent.children[node.key]
            node = parent

    # -- what changed ------------------------------------------------------------------------------------------

    def held_changed(self, keys: Iterable[bytes]) -> None:
        """Other sources hold these KV blocks than before; which ones, `holders` tells."""
        for key in keys:
            node = self.nodes.get(key)
            if node is not None:
                self._refresh(node)

    def _refresh(self, top: _Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            reach = self._holders(node.key)
            if node.parent is not None:
                reach &= node.parent.reach
            if reach == node.reach:
                continue
            if bool(reach) != bool(node.reach) and node.ends:
                self._changed.update(node.ends)
            node.reach = reach
            if node.children:
                stack.extend(node.children.values())

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """As `held_changed`, but because nothing is known of them any more: what was told of them does not stand."""
        before = self._changed
        self._changed = {}
        self.held_changed(keys)
        for prompt in self._changed:
            prompt.told = None
        before.update(self._changed)
        self._changed = before

    def review(self, salted: bool) -> None:
        """Have everything told anew of all prompts with a salt, or of all without: more may be told now."""
        for prompt in self._prompts.values():
            if (prompt.cache_salt is not None) is salted:
                prompt.told = None
                self._changed[prompt] = None

    def changes(self, certain: Callable[[str | None], bool]) -> list[Change]:
        """What is to be told since the last call, the same for several prompts once.

        Args:
            certain: Whether a block that no source is known to hold is held by none, for prompts with this salt. If
                not, a block is said to be missing only if it was there before.
        """
        told: dict[Change, None] = {}
        for prompt in self._changed:
            resident, before = prompt.resident_blocks(), prompt.told
            removed = before is not None and prompt.proven and resident < before
            prompt.told, prompt.proven = resident, True
            if resident == before:
                continue
            if resident < len(prompt.keys) and (removed or certain(prompt.cache_salt)):
                # All beyond the first missing block is missing too, whichever prompt it belongs to.
                told[Change(prompt.scope, prompt.keys[: resident + 1], resident)] = None
            elif before is None or resident > before:
                if resident:
                    told[Change(prompt.scope, prompt.keys[:resident], resident)] = None
            else:
                prompt.told = None
        self._changed.clear()
        return list(told)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all invariants hold; for tests. O(all)."""
        assert len(self._prompts) <= self.max_prompts
        assert len(self.nodes) <= self.max_blocks or not self._prompts
        needed: set[bytes] = set()
        for name, prompt in self._prompts.items():
            assert name == (prompt.scope, prompt.cache_salt, prompt.keys)
            for boundary in prompt.all_boundaries():
                assert boundary.ends is not None
                assert prompt in boundary.ends
                node: _Node | None = boundary
                while node is not None:
                    assert self.nodes[node.key] is node
                    needed.add(node.key)
                    node = node.parent
        assert needed == set(self.nodes), "a KV block that no prompt needs"
        for key, node in self.nodes.items():
            assert node.key == key
            expected = self._holders(key)
            if node.parent is not None:
                assert node.parent.children is not None
                assert node.parent.children[key] is node
                expected &= node.parent.reach
            assert node.reach == expected, "residency is out of date"
            assert all(prompt in self._prompts.values() for prompt in node.ends or ())
        assert all(prompt in self._prompts.values() for prompt in self._changed)


_Name = tuple[Scope, str | None, tuple[bytes, ...]]


class _Node:
    """One KV block of remembered prompts."""

    __slots__ = ("children", "ends", "key", "parent", "reach")

    def __init__(self, key: bytes, parent: _Node | None, reach: int) -> None:
        self.key = key
        self.parent = parent
        self.reach = reach
        """The sources that hold this block and all before it, as bits."""
        self.children: dict[bytes, _Node] | None = None
        self.ends: dict[_Prompt, None] | None = None
        """Prompts of which a context block ends with this KV block, or before the next is full."""


class _Prompt:
    __slots__ = ("boundaries", "cache_salt", "digest", "ends", "keys", "proven", "scope", "told")

    def __init__(self, prompt: MappedPrompt, digest: bytes) -> None:
        self.scope, self.cache_salt, self.keys, self.ends = prompt.scope, prompt.cache_salt, prompt.keys, prompt.ends
        self.digest = digest
        """Of its tokens."""
        self.boundaries: list[Sequence[_Node | None]] = []
        """For each size of KV block: each context block's last full KV block, None if none is full by then."""
        self.presume_resident()

    def presume_resident(self) -> None:
        """It was just served, so all of it is thought to be resident, unless it turns out otherwise."""
        self.told: int | None = len(self.keys)
        """How many of its blocks are thought to be resident by whoever is told; None if that is not known."""
        self.proven = False
        """Whether as many were known to be."""

    def all_boundaries(self) -> list[_Node]:
        return list({node: None for path in self.boundaries for node in path if node is not None})

    def resident_blocks(self) -> int:
        most = 0
        for path in self.boundaries:
            count = 0
            for node in path:
                # Blocks in front of the first full KV block are neither; they are as resident as what follows.
                if node is not None and not node.reach:
                    break
                count += 1
            most = max(most, count)
        return most
