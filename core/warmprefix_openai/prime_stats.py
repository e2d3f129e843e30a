"""Counts of the primes that were sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["PrimeStats", "primed"]


@dataclass(frozen=True, slots=True)
class PrimeStats:
    """A snapshot of counters that only grow."""

    sent: int = 0
    """Primes that the engine answered."""
    failed: int = 0
    """Primes that failed; the requests that they prepare went on."""
    inexact: int = 0
    """Of the sent ones, those whose prompt ends in template tokens, because the endpoint refused the fields that leave
    these out."""
    skipped: int = 0
    """Primes that were due and not sent: the engine was busy or failed before, the budget was used up, or the chat has
    the shared blocks in several content parts."""


def primed(counts: Counter[str]) -> PrimeStats:
    """Return the counts as a snapshot."""
    return PrimeStats(**counts)
