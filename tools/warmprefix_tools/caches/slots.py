"""llama.cpp's prefix cache: each slot of the server keeps its last prompt and answer, and nothing else.

The rules are those of `llama-server` without prompts in host memory (`--cache-ram 0`),
https://github.com/ggml-org/llama.cpp/tree/master/tools/server: a request takes the idle slot whose prompt has most
tokens in common with it, if that is more than a tenth of the request (`--slot-prompt-similarity`), else the idle slot
that was used least recently. The common tokens are reused, but the last one of a prompt is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt

__all__ = ["SlotCache"]

_SIMILARITY = 0.1


@dataclass(slots=True, eq=False)
class _Slot:
    tokens: list[int] = field(default_factory=list)
    salt: str | None = None
    used: int = 0
    is_busy: bool = False

    def common_tokens(self, prompt: MarkedPrompt) -> int:
        if self.salt != prompt.salt:
            return 0
        return common_prefix(self.tokens, prompt.tokens)


@dataclass(slots=True, eq=False)
class _SlotAdmission:
    """A prompt that has a slot."""

    cache: SlotCache
    slot: _Slot
    prompt: MarkedPrompt
    use: CacheUse

    def store(self, now: float) -> None:
        self.slot.tokens, self.slot.salt = list(self.prompt.tokens), self.prompt.salt

    def append(self, token_id: int) -> None:
        self.slot.tokens.append(token_id)

    def free(self) -> None:
        self.slot.is_busy = False


class SlotCache:
    """The slots of one server. All operations are O(slots times tokens).

    llama.cpp has no salts; a prompt with another salt than the slot's finds nothing there.

    Raises:
        ValueError: There is no slot.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, got {slots}")
        self._slots = [_Slot() for _ in range(slots)]
        self._requests = 0

    @property
    def usage(self) -> float:
        """Share of the slots in use, 0 to 1."""
        return self.num_sequences / len(self._slots)

    @property
    def num_sequences(self) -> int:
        """Number of slots in use."""
        return sum(slot.is_busy for slot in self._slots)

    def admit(self, prompt: MarkedPrompt, now: float = 0.0, *, room_for: int = 0) -> _SlotAdmission | None:
        """Give a prompt a slot and look it up there; None if all are in use."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        common = [slot.common_tokens(prompt) for slot in idle]
        best = max(range(len(idle)), key=lambda number: common[number])
        if common[best] <= _SIMILARITY * len(prompt.tokens):
            best = min(range(len(idle)), key=lambda number: idle[number].used)
        slot, read = idle[best], min(common[best], len(prompt.tokens) - 1)
        self._requests += 1
        slot.used, slot.is_busy = self._requests, True
        return _SlotAdmission(self, slot, prompt, CacheUse(read, (0,), len(prompt.tokens) - read))

    def reset(self) -> bool:
        """Forget everything; return False, and do nothing, if requests are running."""
        if self.num_sequences:
            return False
        self._slots = [_Slot() for _ in self._slots]
        return True


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
