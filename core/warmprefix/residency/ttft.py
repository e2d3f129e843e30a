"""What the time to the first token says, where the engine reports nothing."""

from __future__ import annotations

from collections import deque

__all__ = ["TtftFeedback"]

_REMEMBERED = 64
_ENOUGH = 8
"""Cold answers before anything is concluded."""

_DEEP = 0.5
"""The part of the context that a prediction must call resident, or its being wrong would not show."""


class TtftFeedback:
    """Tells, for one scope, when a prompt that was predicted to be largely cached was prefilled as if nothing were.

    CacheWeaver, section 3.4. How long a token takes to prefill is learned from prompts of which nothing was predicted
    to be cached. A deep hit that took longer than halfway from what it should take to what a cold one takes was none.
    """

    def __init__(self) -> None:
        self._seconds_a_token: deque[float] = deque(maxlen=_REMEMBERED)

    def was_cold(self, tokens: int, resident_tokens: int, ttft: float) -> bool:
        """Learn from an answer, or judge it. O(1) for a bounded memory.

        Args:
            tokens: Of the whole context.
            resident_tokens: Of these, predicted to be resident.
            ttft: Seconds to the first token.
        """
        if tokens <= 0 or ttft <= 0:
            return False
        if resident_tokens == 0:
            self._seconds_a_token.append(ttft / tokens)
            return False
        if resident_tokens < _DEEP * tokens or len(self._seconds_a_token) < _ENOUGH:
            return False
        cold = sorted(self._seconds_a_token)[len(self._seconds_a_token) // 2] * tokens
        warm = cold * (1 - resident_tokens / tokens)
        return ttft > (warm + cold) / 2
