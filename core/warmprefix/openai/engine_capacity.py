"""The cache capacity of the engines that a link sends to, read from their metrics in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warmprefix.errors import EngineError
from warmprefix.residency import EngineReport, capacity_from_metrics

if TYPE_CHECKING:
    from warmprefix.planner.planner import ContextPlanner

__all__ = ["EngineCapacity"]

_log = logging.getLogger("warmprefix")

_MAX_ENGINES = 64


class EngineCapacity:
    """Capacity of the smallest engine that requests went to, once its metrics are read.

    Each engine is asked once, on a daemon thread, and only for a planner that learns its capacity. Thread-safe.
    """

    def __init__(self, planner: ContextPlanner, read: Callable[[str], int] = capacity_from_metrics) -> None:
        self._planner = planner
        self._read = read
        self._engines: set[str] = set()
        self._tokens: int | None = None

    def visit(self, url: Any) -> None:
        """Read the metrics of the engine behind a URL of httpx, unless that was done. Does not wait."""
        engine = f"{url.scheme}://{url.netloc.decode('ascii')}{url.path.partition('/v1/')[0]}"
        if engine in self._engines or len(self._engines) >= _MAX_ENGINES:
            return
        self._engines.add(engine)
        if self._planner.stats().capacity_source != "argument":
            threading.Thread(target=self._ask, args=(engine,), name="warmprefix-capacity", daemon=True).start()

    def _ask(self, engine: str) -> None:
        try:
            tokens = self._read(engine)
        except (EngineError, ValueError) as error:
            _log.debug("the capacity of an engine is learned from its reports: %s", error)
            return
        self._tokens = tokens if self._tokens is None else min(tokens, self._tokens)

    def added_to(self, report: EngineReport | None) -> EngineReport | None:
        """Return the report with the capacity, if it was read."""
        if self._tokens is None:
            return report
        return replace(report or EngineReport(), capacity_tokens=self._tokens)
