"""Bounded values of several tenants, where a tenant that fills the space loses only its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FairLru"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _OwnedValue(Generic[V]):  # a generic NamedTuple needs Python 3.11
    tenant: Hashable
    size: int
    value: V


class FairLru(Generic[K, V]):
    """Values by key, each of one tenant. Not thread-safe.

    `evict` removes the least recently used value of the tenant whose values are the largest together. So a tenant
    within an equal share of the space loses nothing, whatever the others do. With one tenant this is plain LRU.
    Each method takes O(1), `evict` O(different sizes of tenants).

    >>> values = FairLru()
    >>> for tenant, key in (("small", 1), ("large", 2), ("large", 3)):
    ...     values.put(key, "value", tenant)
    >>> values.evict(), list(values)
    ((2, 'value'), [1, 3])
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[K, _OwnedValue[V]] = OrderedDict()
        self._keys: dict[Hashable, OrderedDict[K, None]] = {}
        """Of each tenant, least recently used first."""
        self._sizes: dict[Hashable, int] = {}
        self._by_size: dict[int, OrderedDict[Hashable, None]] = {}
        """Tenants by their size, least recently used first."""
        self.size = 0
        """Sum of the sizes of all values."""

    def put(self, key: K, value: V, tenant: Hashable, size: int = 1) -> None:
        """Add a value as the most recently used, or replace one in its place. Nothing is evicted."""
        before = self._entries.get(key)
        if before is not None and before.tenant != tenant:
            self.pop(key)
            before = None
        self._entries[key] = _OwnedValue(tenant, size, value)
        if before is None:
            self._keys.setdefault(tenant, OrderedDict())[key] = None
            self._resize(tenant, size)
        elif size != before.size:
            self._resize(tenant, size - before.size)

    def use(self, key: K) -> V | None:
        """Return a value and count it as used; None without one."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        tenant = entry.tenant
        self._entries.move_to_end(key)
        self._keys[tenant].move_to_end(key)
        self._by_size[self._sizes[tenant]].move_to_end(tenant)
        return entry.value

    def get(self, key: K) -> V | None:
        """Return a value; None without one."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def pop(self, key: K) -> V | None:
        """Remove and return a value; None without one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        del self._keys[entry.tenant][key]
        self._resize(entry.tenant, -entry.size)
        return entry.value

    def evict(self) -> tuple[K, V]:
        """Remove and return the least recently used key and value of the largest tenant."""
        largest = next(iter(self._by_size[max(self._by_size)]))
        key = next(iter(self._keys[largest]))
        value = self._entries[key].value
        self.pop(key)
        return key, value

    def clear(self) -> None:
        """Remove all values."""
        for part in (self._entries, self._keys, self._sizes, self._by_size):
            part.clear()
        self.size = 0

    def values(self) -> Iterator[V]:
        """Return all values, least recently used first."""
        return (entry.value for entry in self._entries.values())

    def __iter__(self) -> Iterator[K]:
        """Return all keys, least recently used first."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _resize(self, tenant: Hashable, change: int) -> None:
        self.size += change
        size = self._sizes.pop(tenant, None)
        if size is not None:
            if len(self._by_size[size]) == 1 and size + change not in self._by_size and self._keys[tenant]:
                self._sizes[tenant] = size + change
                self._by_size[size + change] = self._by_size.pop(size)
                return
            del self._by_size[size][tenant]
            if not self._by_size[size]:
                del self._by_size[size]
        if self._keys[tenant]:
            self._sizes[tenant] = size = (size or 0) + change
            self._by_size.setdefault(size, OrderedDict())[tenant] = None
        else:
            del self._keys[tenant]
