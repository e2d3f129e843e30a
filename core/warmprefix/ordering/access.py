"""Which requests of a window hold which blocks, as bitsets."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from warmprefix.errors import check_count

__all__ = ["AccessWindow", "BitCounter"]

K = TypeVar("K", bound=Hashable)


class AccessWindow(Generic[K]):
    """Access counts over the last `size` requests.

    Each block has a bitset with one bit per request of the window. So counting the requests that hold a whole set of
    blocks takes one `&` and one `bit_count` per block, about 0.1 µs at the default size. Memory is bounded by the
    blocks of `size` requests. Not thread-safe.

    >>> window = AccessWindow[str]()
    >>> window.observe(["A", "B"]); window.observe(["B", "C"])
    >>> window.count("A"), window.count("B")
    (1, 2)
    """

    def __init__(self, size: int = 1_000) -> None:
        check_count("size", size)
        self.size = size
        self._slots: list[Sequence[K]] = [()] * size
        self.next_place = 0
        """Bit of the next observed request, which the oldest has while the window is full."""
        self._requests: dict[K, int] = {}

    def observe(self, keys: Sequence[K]) -> None:
        """Add a request's blocks; drop the oldest request if the window is full. O(keys)."""
        slot = self.next_place
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
        self.next_place = (slot + 1) % self.size

    def requests(self, keys: Iterable[K]) -> list[int]:
        """Return for each key the bitset of the requests that hold it; 0 for none."""
        requests = self._requests
        return [requests.get(key, 0) for key in keys]

    def latest(self, places: int) -> int:
        """Return the bit of the most recent of some requests, a bitset that is not 0."""
        before_the_wrap = places & ((1 << self.next_place) - 1)
        return (before_the_wrap or places).bit_length() - 1

    def count(self, key: K) -> int:
        """Return the number of requests of the window that hold `key`."""
        return self._requests.get(key, 0).bit_count()

    def __len__(self) -> int:
        """Return the number of different blocks in the window."""
        return len(self._requests)


class BitCounter:
    """The number of bitsets that have each bit set.

    The counts are bit-sliced: plane p holds binary digit p of all counts. Adding n bitsets takes about 2n operations
    on whole integers, whatever their length.

    >>> counter = BitCounter([0b0111, 0b0110, 0b0100])
    >>> counter.highest
    3
    >>> bin(counter.at_least(2))
    '0b110'
    """

    __slots__ = ("_planes", "having_highest", "highest")

    def __init__(self, bitsets: Iterable[int]) -> None:
        self._planes: list[int] = []
        planes = self._planes
        for bitset in bitsets:
            carry, p = bitset, 0
            while carry:
                if p == len(planes):
                    planes.append(carry)
                    break
                planes[p], carry = planes[p] ^ carry, planes[p] & carry
                p += 1
        self.highest = 0
        """The highest count of any bit; 0 if no bit is set."""
        self.having_highest = -1 if planes else 0
        """The bits that have it; 0 if no bit is set."""
        for p in reversed(range(len(planes))):
            if having_it := self.having_highest & planes[p]:
                self.having_highest = having_it
                self.highest |= 1 << p

    def at_least(self, count: int) -> int:
        """Return the bits that are set in `count` bitsets or more; `count` is 1 or more."""
        if count.bit_length() > len(self._planes):
            return 0
        more, equal = 0, -1
        for p in reversed(range(len(self._planes))):
            if count >> p & 1:
                equal &= self._planes[p]
            else:
                more |= equal & self._planes[p]
                equal &= ~self._planes[p]
        return more | equal
