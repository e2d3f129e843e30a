"""Planners by name, for whoever reads their counts now and then."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from warmprefix.telemetry.stats import PlannerStats

__all__ = ["CountingPlanner", "WatchedPlanners"]

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = {"planner", "reason", "le"}

_lock = threading.RLock()
"""One for all, hardly ever asked for: registries live as long as the process, longer than what renews an object's."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class CountingPlanner(Protocol):
    """A `ContextPlanner`, as far as it matters here."""

    def stats(self) -> PlannerStats: ...


class _Watched(NamedTuple):
    planner: weakref.ref[CountingPlanner]
    labels: dict[str, str]


class WatchedPlanners:
    """Keeps none of them alive: of one that is gone nothing is told any more, and its name is free."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def add(self, planner: CountingPlanner, name: str, labels: Mapping[str, str] | None = None) -> None:
        """Raise ValueError if another one has the name, or a label can't be one."""
        given = dict(labels or {})
        for label in given:
            if label in _TAKEN or label.startswith("__") or not _LABEL.fullmatch(label):
                raise ValueError(f"labels must be named by letters, digits and _, and not {label!r}")
        with _lock:
            other = self._watched.get(name)
            holder = None if other is None else other.planner()
            if holder is not None and holder is not planner:
                raise ValueError(f"name must be another one: there is a planner called {name!r} already")
            self._watched[name] = _Watched(weakref.ref(planner), {"planner": name, **given})

    def discard(self, planner: CountingPlanner) -> None:
        """Tell nothing of it any more."""
        with _lock:
            for name, watched in list(self._watched.items()):
                if watched.planner() is planner:
                    del self._watched[name]

    def stats(self) -> list[tuple[dict[str, str], PlannerStats]]:
        """The labels and counts of those that are left."""
        with _lock:
            alive = [(watched.labels, watched.planner()) for watched in self._watched.values()]
        return [(labels, planner.stats()) for labels, planner in alive if planner is not None]
