"""What the engines that a link sends to show in their metrics, read in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import EngineError
from warmprefix.residency import EngineReport
from warmprefix_openai.cache_metrics import report_from_metrics

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = ["EngineMetrics"]

_log = logging.getLogger("warmprefix")

_MAX_ENGINES = 64
_HOSTED = (
    ".amazonaws.com",
    ".anthropic.com",
    ".azure.com",
    ".deepseek.com",
    ".googleapis.com",
    ".openai.com",
    ".openrouter.ai",
)
"""Ends of the names of hosted APIs, which have no metrics to read."""


class EngineMetrics:
    """Capacity of the smallest engine that requests went to, and the cache profile that an engine's metrics show.

    Each engine is asked once, on a daemon thread. Hosted APIs are not asked. Thread-safe.
    """

    def __init__(
        self,
        planner: ContextPlanner,
        read: Callable[[str], EngineReport] = report_from_metrics,
        *,
        always: bool = False,
    ) -> None:
        """Ask nothing yet. With `always`, engines are asked for a planner that learns nothing from them, too."""
        self._planner = planner
        self._read = read
        self._always = always
        self._is_given = planner.stats().profile_source == "argument"
        self._engines: set[str] = set()
        self._shown: set[str] = set()
        self._prioritising: set[str] = set()
        self._tokens: int | None = None
        self._profile: CacheProfile | None = None

    def visit(self, url: Any) -> None:
        """Read the metrics of the engine behind a URL of httpx, unless that was done. Does not wait."""
        engine = _engine(url)
        if engine in self._engines or len(self._engines) >= _MAX_ENGINES:
            return
        self._engines.add(engine)
        stats = self._planner.stats()
        is_learned = stats.capacity_source != "argument" or stats.profile_source != "argument"
        if (is_learned or self._always) and not f".{url.host}".endswith(_HOSTED):
            threading.Thread(target=self._ask, args=(engine,), name="warmprefix-metrics", daemon=True).start()

    def shows(self, url: Any) -> bool:
        """Return True if the engine behind a URL of httpx has shown its metrics, as one of the application's own."""
        return _engine(url) in self._shown

    def may_prioritise(self, url: Any) -> bool:
        """Return True if the engine behind a URL evicts by priority: as it has shown, or as the caller said.

        To another one, behind the same planner, a priority means something else or nothing.
        """
        if self._planner.profile.eviction != "priority":
            return False
        return self._is_given or _engine(url) in self._prioritising

    def _ask(self, engine: str) -> None:
        try:
            report = self._read(engine)
        except (EngineError, ValueError) as error:
            _log.debug("capacity and profile of an engine are learned from its reports: %s", error)
            return
        if report.capacity_tokens is not None:
            self._shown.add(engine)
            tokens = report.capacity_tokens
            self._tokens = tokens if self._tokens is None else min(tokens, self._tokens)
        if report.profile is not None and report.profile.eviction == "priority":
            self._prioritising.add(engine)
        self._profile = report.profile or self._profile

    def added_to(self, report: EngineReport | None) -> EngineReport | None:
        """Return the report with what the metrics show, if they were read."""
        if self._tokens is None and self._profile is None:
            return report
        report = report or EngineReport()
        return replace(report, capacity_tokens=self._tokens, profile=self._profile or report.profile)


def _engine(url: Any) -> str:
    """Return the address of an engine, which ends in front of its `/v1`."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}{url.path.partition('/v1/')[0]}"
