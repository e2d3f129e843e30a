"""The blocks of recent requests, and the requests that hold several of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Generic, TypeVar

from warmprefix.errors import check_count

__all__ = ["AccessWindow"]

K = TypeVar("K", bound=Hashable)


class AccessWindow(Generic[K]):
    """Access counts over the last `size` requests.

    Each block has a bitset with one bit per request of the window. So counting the requests that hold a whole set of
    blocks takes one `&` and one `bit_count` per block, about 0.1 µs at the default size. Memory is bounded by the
    blocks of `size` requests. Not thread-safe.

    >>> window = AccessWindow[str]()
    >>> window.observe(["A", "B"]); window.observe(["B", "C"])
    >>> window.count("B"), window.together("A", "B"), window.together("A", "C")
    (2, 1, 0)
    """

    def __init__(self, size: int = 1_000) -> None:
        check_count("size", size)
        self.size = size
        self._slots: list[Sequence[K]] = [()] * size
        self._next = 0
        self._requests: dict[K, int] = {}

    def observe(self, keys: Sequence[K]) -> None:
        """Add a request's blocks; drop the oldest request if the window is full. O(keys)."""
        slot = self._next
        bit = 1 << slot
        requests = self._requests
        distinct = tuple(dict.fromkeys(keys))
        for key in self._slots[slot]:
            left = requests[key] & ~bit
            if left:
                requests[key] = left
            else:
                del requests[key]
        for key in distinct:
            requests[key] = requests.get(key, 0) | bit
        self._slots[slot] = distinct
        self._next = (slot + 1) % self.size

    def requests(self, keys: Iterable[K]) -> list[int]:
        """Return for each key the bitset of the requests that hold it; 0 for none."""
        requests = self._requests
        return [requests.get(key, 0) for key in keys]

    @property
    def next_place(self) -> int:
        """Bit of the next observed request, which the oldest has while the window is full."""
        return self._next

    def latest(self, places: int) -> int:
        """Return the bit of the most recent of some requests, a bitset that is not 0."""
        before_the_wrap = places & ((1 << self._next) - 1)
        return (before_the_wrap or places).bit_length() - 1

    def count(self, key: K) -> int:
        """Return the number of requests of the window that hold `key`."""
        return self._requests.get(key, 0).bit_count()

    def together(self, *keys: K) -> int:
        """Return the number of requests of the window that hold all of `keys`."""
        return reduce(and_, self.requests(keys)).bit_count() if keys else 0

    def __len__(self) -> int:
        """Return the number of different blocks in the window."""
        return len(self._requests)
