"""Memory of a router over all its tenants: how much it is, and which tenant gives way where it is too much."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["TenantMemory", "TenantState"]

_WORTH_COMPACTING = 100_000
"""Bytes that a tenant once took."""


class TenantState(ABC):
    """What a router remembers of one tenant."""

    recorded_bytes = 0
    """Of its memory, what the router's `TenantMemory` has counted."""
    peak_bytes = 0
    """The most that was counted since the last `compact`."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Estimated memory. O(1)."""

    @abstractmethod
    def shrink(self, excess: int) -> bool:
        """Forget the oldest things, of `excess` bytes or more in all. False if there was nothing left to forget."""

    @abstractmethod
    def compact(self) -> None:
        """Give back the room of what was forgotten: a dict keeps its table when entries leave. O(what is left)."""


class TenantMemory:
    """Keeps the sum of all tenants' bytes within a bound. Not thread-safe: the router calls it under its lock.

    Every tenant has a share that no other can take: the bound divided by the most tenants that a router remembers.
    Of the tenants above their share, the one not used longest shrinks first. So a tenant within its share is routed as
    if it were alone, whatever the others do.
    """

    def __init__(self, max_bytes: int, max_tenants: int) -> None:
        self._max_bytes = max_bytes
        self._share = max_bytes // max_tenants
        self.clear()

    def clear(self) -> None:
        """Forget all tenants."""
        self.total_bytes = 0
        self._large: OrderedDict[str | None, TenantState] = OrderedDict()
        """Tenants above their share, the one not used longest first."""

    def remove(self, tenant: str | None, state: TenantState) -> None:
        """Forget a tenant. Idempotent."""
        self.total_bytes -= state.recorded_bytes
        state.recorded_bytes = 0
        self._large.pop(tenant, None)

    def update(self, tenant: str | None, state: TenantState, used: bool = False) -> Iterable[str | None]:
        """Record what a tenant's memory has become, and have tenants shrink until all of them fit. O(1), amortised.

        Call it whenever a tenant's memory may have grown; what became less is found out before a tenant shrinks.

        Args:
            tenant: Its name.
            state: What is remembered of it.
            used: Whether a request of the tenant is the reason, so that others shrink before it.

        Returns:
            Tenants for the router to `remove`, since there is nothing left of them to shrink; never `tenant` itself.
        """
        self._record(tenant, state)
        if used and tenant in self._large:
            self._large.move_to_end(tenant)
        return self._fit(state) if self.total_bytes > self._max_bytes else ()

    def _record(self, tenant: str | None, state: TenantState) -> None:
        size = state.memory_bytes
        self.total_bytes += size - state.recorded_bytes
        state.recorded_bytes = size
        if size > state.peak_bytes:
            state.peak_bytes = size
        elif 3 * size < 2 * state.peak_bytes > _WORTH_COMPACTING:  # copies at most two entries for one that has gone
            state.compact()
            state.peak_bytes = size
        if size > self._share:
            self._large[tenant] = state
        elif tenant in self._large:
            del self._large[tenant]

    def _fit(self, used: TenantState) -> list[str | None]:
        forgotten: list[str | None] = []
        # If all tenants together are above the bound, at least one is above its share.
        while self.total_bytes > self._max_bytes and self._large:
            tenant, state = next(iter(self._large.items()))
            if state.memory_bytes != state.recorded_bytes or state.shrink(self.total_bytes - self._max_bytes):
                self._record(tenant, state)  # it may have less by now than when it was used
            elif state is used:
                break  # what is left of it is what a tenant takes that nothing is known of
            else:
                self.remove(tenant, state)
                forgotten.append(tenant)
        return forgotten
