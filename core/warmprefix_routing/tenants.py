"""The tenants of a router: a state for each, within bounds on their number and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from warmprefix_routing.members import Member

__all__ = ["StateT", "TenantState", "Tenants"]

_WORTH_COMPACTING = 100_000
"""Peak bytes from which a tenant that shrank is compacted."""


class TenantState(ABC):
    """What a router keeps about one tenant. Not thread-safe: the router calls it under its lock."""

    recorded_bytes = 0
    """Bytes that `Tenants` counts for it."""
    peak_bytes = 0
    """Most bytes recorded since the last `compact`."""

    @property
    def memory_bytes(self) -> int:
        """Estimated memory. O(1)."""
        return self.fixed_bytes + sum([size for size, _ in self.shrinkable()])

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Estimated memory without anything that `shrink` can forget. O(1)."""

    @abstractmethod
    def join(self, member: Member) -> None:
        """Add a member, with the others' mean load."""

    @abstractmethod
    def leave(self, member: Member) -> None:
        """Remove a member, with everything that it holds."""

    @abstractmethod
    def compact(self) -> None:
        """Release the tables of forgotten entries, which a dict keeps. O(remaining entries)."""

    @abstractmethod
    def shrinkable(self) -> Sequence[tuple[int, Callable[[int], object]]]:
        """Return the bytes of each kind of record, each with a function that forgets some of the oldest.

        The function receives the bytes to release; it may release fewer.
        """

    def shrink(self, excess: int) -> bool:
        """Forget `excess` bytes or more, always from the largest kind. False if nothing is left to forget."""
        target = self.memory_bytes - excess
        shrunk = False
        while self.memory_bytes > target:
            size, forget = max(self.shrinkable(), key=itemgetter(0))
            if not size:
                break
            forget(self.memory_bytes - target)
            shrunk = True
        return shrunk


StateT = TypeVar("StateT", bound=TenantState)


class Tenants(Generic[StateT]):
    """The states of all tenants. Not thread-safe: the router calls it under its lock.

    Beyond `max_tenants`, the least recently used tenant is forgotten. Beyond `max_bytes`, tenants shrink that take more
    than `max_bytes / max_tenants`, the least recently used first. A tenant within that share is therefore routed as if
    it were alone, whatever the others do. `shared_bytes`, of what the router keeps for all of them, count too.

    `forgotten` is called after a tenant was forgotten.
    """

    def __init__(
        self,
        max_tenants: int,
        max_bytes: int,
        create: Callable[[str | None], StateT],
        forgotten: Callable[[str | None, StateT], object],
    ) -> None:
        self._max_tenants = max_tenants
        self._max_bytes = max_bytes
        self._share = max_bytes // max_tenants
        self._create = create
        self._forgotten = forgotten
        self.clear()

    def clear(self) -> None:
        """Drop all tenants, without a call of `forgotten`."""
        self.total_bytes = self.shared_bytes = 0
        self.states: OrderedDict[str | None, StateT] = OrderedDict()
        """By tenant, least recently used first; to look up a state here does not count as use."""
        self._large: OrderedDict[str | None, StateT] = OrderedDict()
        """Tenants above their share, least recently used first."""

    def use(self, tenant: str | None) -> StateT:
        """Return a tenant's state, created if new, and make it the most recently used."""
        state = self.states.get(tenant)
        if state is not None:
            self.states.move_to_end(tenant)
            return state
        state = self.states[tenant] = self._create(tenant)
        if len(self.states) > self._max_tenants:
            self.forget(next(iter(self.states)))
        self.record(tenant, state, used=True)
        return state

    def forget(self, tenant: str | None) -> None:
        """Drop one tenant."""
        state = self.states.pop(tenant)
        self.total_bytes -= state.recorded_bytes
        state.recorded_bytes = 0
        self._large.pop(tenant, None)
        self._forgotten(tenant, state)

    def record(self, tenant: str | None, state: StateT, used: bool = False) -> None:
        """Record a tenant's memory, and shrink tenants until all fit. O(1), amortised.

        Call it when a tenant's memory may have grown; a decrease is noticed before anything shrinks. `used` means that
        a request of this tenant is the reason, so that other tenants shrink first. The tenant itself is never dropped.
        """
        self._count(tenant, state)
        if used and tenant in self._large:
            self._large.move_to_end(tenant)
        # While all tenants together are above the bound, at least one is above its share; what they share may be more.
        while (excess := self.total_bytes + self.shared_bytes - self._max_bytes) > 0 and self._large:
            oldest, large = next(iter(self._large.items()))
            if large.memory_bytes != large.recorded_bytes or large.shrink(excess):
                self._count(oldest, large)
            elif large is state:
                break  # what remains is the cost of an empty tenant
            else:
                self.forget(oldest)

    def record_all(self) -> None:
        """Record every tenant's memory."""
        for tenant, state in list(self.states.items()):
            if tenant in self.states:  # an earlier step may have dropped it
                self.record(tenant, state)

    def _count(self, tenant: str | None, state: StateT) -> None:
        size = state.memory_bytes
        self.total_bytes += size - state.recorded_bytes
        state.recorded_bytes = size
        if size > state.peak_bytes:
            state.peak_bytes = size
        elif 3 * size < 2 * state.peak_bytes > _WORTH_COMPACTING:  # copies at most two entries per forgotten one
            state.compact()
            state.peak_bytes = size
        if size > self._share:
            self._large[tenant] = state
        else:
            self._large.pop(tenant, None)
