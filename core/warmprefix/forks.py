"""What a forked process has to have of its own: locks, threads, connections."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["in_each_process"]

_set_ups: set[weakref.WeakMethod[Callable[[], Any]]] = set()


def in_each_process(set_up: Callable[[], Any]) -> None:
    """Call a bound method now, and again first of all in each forked process, as long as its object lives.

    There no other thread exists, but a lock that one held stays locked, and a connection is still the parent's too.
    """
    _set_ups.add(weakref.WeakMethod(set_up, _set_ups.discard))
    set_up()


def _set_up_the_fork() -> None:
    for method in list(_set_ups):
        set_up = method()
        if set_up is not None:
            set_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_set_up_the_fork)
