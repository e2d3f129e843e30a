"""Counting over many bitsets at once, without reading single bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["BitCounter"]


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

    __slots__ = ("_planes", "highest")

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
        self.highest = _highest(self._planes)
        """The highest count of any bit; 0 if no bit is set."""

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


def _highest(planes: Sequence[int]) -> int:
    highest, having_it = 0, -1
    for p in reversed(range(len(planes))):
        if having_it & planes[p]:
            having_it &= planes[p]
            highest |= 1 << p
    return highest
