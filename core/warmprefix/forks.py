"""Set-up of locks, threads and connections that each process must have for itself."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["in_each_process"]

# Not a WeakMethod: one that ends together with its object prints an error at interpreter exit (Python 3.11).
_set_ups: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_numbers = itertools.count()


def in_each_process(set_up: Callable[[], Any]) -> None:
    """Call a bound method now, and at the start of each forked process.

    The object of the method is not kept alive. A forked process has no other thread, but a lock that one held stays
    locked, and connections are shared with the parent.
    """
    owner: Any = getattr(set_up, "__self__")  # noqa: B009
    number = next(_numbers)
    _set_ups[number] = weakref.ref(owner, partial(_set_ups.pop, number)), getattr(set_up, "__func__")  # noqa: B009
    set_up()


def _set_up_forked_process() -> None:
    for reference, set_up in list(_set_ups.values()):
        owner = reference()
        if owner is not None:
            set_up(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_set_up_forked_process)
