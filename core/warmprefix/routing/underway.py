"""What the prompts on their way to a replica begin with."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PromptsUnderWay"]


class PromptsUnderWay:
    """Counts prompts by their first blocks, so that a request can follow one that is not answered yet.

    Each prompt that was added must be removed once, with the same blocks. Memory is what is under way.

    >>> prompts = PromptsUnderWay()
    >>> prompts.add([b"A", b"B"])
    >>> prompts.match([b"A", b"C"], [100, 50])
    100
    >>> prompts.remove([b"A", b"B"])
    >>> prompts.match([b"A", b"C"], [100, 50])
    0
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: dict[bytes, _Step] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        """O(blocks)."""
        steps = self._root
        for key in keys:
            step = steps.get(key)
            if step is None:
                step = steps[key] = _Step()
            step.prompts += 1
            steps = step.next

    def remove(self, keys: Sequence[bytes]) -> None:
        """O(blocks)."""
        steps = self._root
        for key in keys:
            step = steps[key]
            step.prompts -= 1
            if not step.prompts:
                del steps[key]
                if not self._root:
                    self._root.clear()  # gives back its table
                return
            steps = step.next

    def match(self, keys: Sequence[bytes], tokens: Sequence[int]) -> int:
        """Tokens of the longest beginning of `keys` that any of the prompts has too. O(blocks)."""
        matched = 0
        steps = self._root
        for key, length in zip(keys, tokens, strict=True):
            step = steps.get(key)
            if step is None:
                break
            matched += length
            steps = step.next
        return matched


class _Step:
    __slots__ = ("next", "prompts")

    def __init__(self) -> None:
        self.prompts = 0
        self.next: dict[bytes, _Step] = {}
