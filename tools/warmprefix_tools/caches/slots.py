"""llama.cpp's prefix cache: the last prompt of each slot of the server, and prompts that left a slot, in host memory.

The rules are those of `llama-server`, https://github.com/ggml-org/llama.cpp/tree/master/tools/server:

- A request takes the idle slot whose prompt has most tokens in common with it, if that is more than a tenth of the
  request (`--slot-prompt-similarity`), else the idle slot that was used least recently.
- If it keeps less than half of the slot's prompt, that prompt is copied to host memory (`--cache-ram`). Then the slot
  takes the prompt from there that has more in common with the request, and keeps a larger share of itself, than its
  own. The request must share a quarter of that prompt. Taking a prompt moves it, so its other end is lost.
- Then the prompts of the other idle slots are copied to host memory too, and stay where they are
  (`--cache-idle-slots`).
- The common tokens are reused, but the last one of a prompt is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt

__all__ = ["SlotCache"]

_SIMILARITY = 0.1
_LEAST_KEPT = 0.5
_LEAST_SHARED = 0.25


@dataclass(slots=True, eq=False)
class _KeptPrompt:
    """A prompt in a slot or in host memory. llama.cpp has no salts: prompts with different ones share nothing here."""

    tokens: list[int] = field(default_factory=list)
    salt: str | None = None

    def common_tokens(self, prompt: _KeptPrompt | MarkedPrompt) -> int:
        return common_prefix(self.tokens, prompt.tokens) if self.salt == prompt.salt else 0


@dataclass(slots=True, eq=False)
class _Slot:
    prompt: _KeptPrompt = field(default_factory=_KeptPrompt)
    used: int = 0
    is_busy: bool = False


@dataclass(slots=True, eq=False)
class _SlotAdmission:
    """A prompt that has a slot."""

    slot: _Slot
    prompt: MarkedPrompt
    use: CacheUse

    def store(self, now: float) -> None:
        self.slot.prompt = _KeptPrompt(list(self.prompt.tokens), self.prompt.salt)

    def append(self, token_id: int) -> None:
        self.slot.prompt.tokens.append(token_id)

    def free(self) -> None:
        self.slot.is_busy = False


class SlotCache:
    """The slots of one server. All operations are O(kept prompts times tokens).

    Args:
        slots: Number of slots.
        host_memory: True if prompts that leave a slot are kept; there is room for all of them.

    Raises:
        ValueError: There is no slot.
    """

    def __init__(self, slots: int, *, host_memory: bool) -> None:
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, got {slots}")
        self._slots = [_Slot() for _ in range(slots)]
        self._host: list[_KeptPrompt] | None = [] if host_memory else None
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
        common = [slot.prompt.common_tokens(prompt) for slot in idle]
        best = max(range(len(idle)), key=lambda number: common[number])
        is_similar = common[best] > _SIMILARITY * len(prompt.tokens)
        slot = idle[best] if is_similar else min(idle, key=lambda each: each.used)
        if self._host is not None and not (is_similar and common[best] >= _LEAST_KEPT * len(slot.prompt.tokens)):
            slot.prompt = self._exchanged(self._host, slot.prompt, prompt)
        if self._host is not None:
            for other in idle:
                if other is not slot:
                    _save(self._host, other.prompt)
        read = min(slot.prompt.common_tokens(prompt), len(prompt.tokens) - 1)
        self._requests += 1
        slot.used, slot.is_busy = self._requests, True
        return _SlotAdmission(slot, prompt, CacheUse(read, (0,), len(prompt.tokens) - read))

    def _exchanged(self, host: list[_KeptPrompt], own: _KeptPrompt, prompt: MarkedPrompt) -> _KeptPrompt:
        """Copy a slot's prompt to host memory; return the one that the slot has now."""
        _save(host, own)
        best, most = own, own.common_tokens(prompt)
        share = most / len(own.tokens) if own.tokens else -1.0
        for kept in host:
            common = kept.common_tokens(prompt)
            kept_share = common / len(kept.tokens)
            if common > most and kept_share > share and kept_share >= _LEAST_SHARED:
                best, most, share = kept, common, kept_share
        if best is not own:
            host.remove(best)
        return best

    def reset(self) -> bool:
        """Forget everything; return False, and do nothing, if requests are running."""
        if self.num_sequences:
            return False
        self._slots = [_Slot() for _ in self._slots]
        self._host = None if self._host is None else []
        return True


def _save(host: list[_KeptPrompt], own: _KeptPrompt) -> None:
    """Copy a slot's prompt to host memory, where it replaces those that it begins with."""
    if own.tokens and not any(kept.common_tokens(own) == len(own.tokens) for kept in host):
        host[:] = [kept for kept in host if kept.common_tokens(own) < len(kept.tokens)]
        host.append(_KeptPrompt(list(own.tokens), own.salt))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
