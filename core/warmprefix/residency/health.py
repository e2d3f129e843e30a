"""Whether an engine caches at all."""

from __future__ import annotations

__all__ = ["CachingEvidence"]

_PROBE_EVERY = 16
"""Requests; one of so many is planned as ever while ordering is off, or nothing could show that it pays again."""


class CachingEvidence:
    """Turns ordering off for a scope whose engine evidently does not cache, and on again when it does.

    Evidence against it is a run of answers to prompts that were predicted to be cached in part, of which the engine
    says that nothing was. Any cached token is evidence for it. An engine that reports nothing gives no evidence.

    Args:
        patience: Length of such a run; None for never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._in_vain = 0
        self._requests = 0
        self.is_off = False
        """Whether ordering is off."""

    def leaves_alone(self) -> bool:
        """Whether the request that is being planned is to stay as it is."""
        if not self.is_off:
            return False
        self._requests += 1
        return self._requests % _PROBE_EVERY != 0

    def hear(self, expected: bool, cached_tokens: int) -> bool:
        """An answer came; True if that turned ordering on or off.

        Args:
            expected: Whether some of its context was predicted to be resident.
            cached_tokens: Those that the engine reported.
        """
        was_off = self.is_off
        if cached_tokens > 0:
            self._in_vain, self.is_off = 0, False
        elif expected:
            self._in_vain += 1
            self.is_off = self._patience is not None and self._in_vain >= self._patience
        return self.is_off != was_off
