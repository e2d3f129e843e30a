"""Locks, threads and connections in forked processes."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

__all__ = ["fork_safe_lock", "in_each_process"]

_MAX_WAIT_SECONDS = 1.0
"""Longest time that a fork waits for other threads. Locks are held for microseconds, unless a caller's code is slow."""

_BACK_OFF_SECONDS = 0.005
"""Longest wait for a lock while holding others: a thread may take two locks in the opposite order."""


class _ForkSafeLock(NamedTuple):
    lock: weakref.ref[threading.RLock]
    drop_state: Callable[[], object] | None


# Not a WeakMethod: one that ends together with its object prints an error at interpreter exit (Python 3.11).
_set_ups: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_locks: dict[int, _ForkSafeLock] = {}
_numbers = itertools.count()
_forking = threading.local()


def in_each_process(set_up: Callable[[], Any]) -> None:
    """Call a bound method now, and at the start of each forked process.

    The object of the method is not kept alive. A forked process has no other thread, and shares connections with its
    parent.
    """
    owner: Any = getattr(set_up, "__self__")  # noqa: B009
    number = next(_numbers)
    _set_ups[number] = weakref.ref(owner, partial(_set_ups.pop, number)), getattr(set_up, "__func__")  # noqa: B009
    set_up()


def fork_safe_lock(drop_state: Callable[[], object] | None = None) -> threading.RLock:
    """Return a re-entrant lock that is free in a forked process, as is the state that it guards.

    A fork waits until no other thread holds such a lock, one second at most. If a thread holds it longer, the state may
    be half changed: then the forked process calls `drop_state`, a bound method, whose object is not kept alive.
    """
    lock = threading.RLock()
    number = next(_numbers)
    drop = None
    if drop_state is not None:
        drop = partial(_call, weakref.ref(getattr(drop_state, "__self__")), getattr(drop_state, "__func__"))  # noqa: B009
    _locks[number] = _ForkSafeLock(weakref.ref(lock, partial(_locks.pop, number)), drop)
    return lock


def _call(reference: weakref.ref[Any], method: Callable[[Any], object]) -> None:
    owner = reference()
    if owner is not None:
        method(owner)


def _living_locks() -> dict[threading.RLock, Callable[[], object] | None]:
    found = [(each.lock(), each.drop_state) for each in list(_locks.values())]
    return {lock: drop_state for lock, drop_state in found if lock is not None}


def _hold_all() -> None:
    """Acquire all locks that come free in time, so that no other thread holds one during the fork."""
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    waiting = list(_living_locks())
    held: list[threading.RLock] = []
    _forking.held = held
    while waiting:
        left = deadline - time.monotonic()
        lock = waiting[-1]
        if lock.acquire(timeout=max(min(left, _BACK_OFF_SECONDS) if held else left, 0.0)):
            held.append(waiting.pop())
        elif left <= 0:
            waiting.pop()
        else:  # let go, and wait for this one first
            for other in held:
                other.release()
            waiting = [*waiting[:-1], *held, lock]
            held.clear()


def _release_all() -> None:
    for lock in _forking.held:
        lock.release()
    _forking.held = []


def _set_up_forked_process() -> None:
    held = set(_forking.held)
    _release_all()
    for lock, drop_state in _living_locks().items():
        if lock not in held:
            lock._at_fork_reinit()  # type: ignore[attr-defined] # noqa: SLF001 - as `threading` and `logging` do
            if drop_state is not None:
                drop_state()
    for reference, set_up in list(_set_ups.values()):
        owner = reference()
        if owner is not None:
            set_up(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_set_up_forked_process)
