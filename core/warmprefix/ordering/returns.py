"""What orders leave for later requests, as these find it."""

from __future__ import annotations

__all__ = ["MOST_RATE", "Returns"]

MOST_RATE = 2.0
_FIRST_REQUESTS = 0.25
"""Requests whose tokens count as expected before anything was learned."""
_RETURNS_DECAY = 0.96


class Returns:
    """How much of the expected savings of later requests has come true.

    An order that costs more than it saves now is an investment. On traffic that rarely repeats, or behind a cache that
    has evicted a path before it recurs, such investments are lost. So their expected value is scaled by the share that
    reordered requests have found, beyond the notes that this took, at most `MOST_RATE`: a path often serves more than
    the next request.
    """

    def __init__(self) -> None:
        self._found = self._expected = 0.0
        self.rate = MOST_RATE

    def learn(self, found: int, expected: float, tokens: int) -> None:
        """Add a reordered request that found this many tokens beyond its note, and has `tokens` in all."""
        if not self._expected:
            self._expected = _FIRST_REQUESTS * tokens
            self._found = MOST_RATE * self._expected
        self._found = self._found * _RETURNS_DECAY + found
        self._expected = self._expected * _RETURNS_DECAY + max(expected, 0.0)
        self.rate = min(MOST_RATE, self._found / self._expected) if self._expected else MOST_RATE
