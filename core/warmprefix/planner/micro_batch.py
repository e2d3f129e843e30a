"""Single requests that wait some milliseconds, so that they can be planned together."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from warmprefix.batch.plan import BatchPlan, BatchRequest
from warmprefix.blocks import ContextBlock
from warmprefix.errors import check_count, check_names
from warmprefix.plan import ContextPlan
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.request import PlanOptions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["MicroBatch", "WindowSource"]

_OPTIONS_OF_WINDOWS = ("tenant", "model", "preamble", "order_locked", "placement")


class WindowSource(Protocol):
    """The part of a `ContextPlanner` that plans for a micro batch."""

    async def aplan(self, blocks: Iterable[ContextBlock | str], **options: Unpack[PlanOptions]) -> ContextPlan: ...
    def plan_window(
        self, requests: Sequence[BatchRequest], *, model: str | None, preamble: str | None
    ) -> BatchPlan: ...
    def abandon(self, plan: ContextPlan) -> bool: ...


class _HeldRequest(NamedTuple):
    request: BatchRequest
    model: str | None
    preamble: str | None
    began: float
    """`time.perf_counter()` when the request came."""
    plan: asyncio.Future[ContextPlan]


class MicroBatch:
    """An async context that plans requests together which come within some milliseconds.

    The first request starts the clock. All requests that come before it ends are planned as one window, and each caller
    gets its own plan. The plans are returned in execution order. Requests that a window cannot hold are planned at
    once: those with a conversation, a history, or placement `"tail"`. So are all requests after the end of the context.

    For any number of tasks of one event loop.
    """

    def __init__(self, planner: WindowSource, metrics: PlannerMetrics, max_delay: float, max_requests: int) -> None:
        """Start without requests; see `ContextPlanner.micro_batch`."""
        check_count("max_requests", max_requests)
        if isinstance(max_delay, bool) or not isinstance(max_delay, int | float):
            raise TypeError(f"max_delay must be a number of seconds, got {type(max_delay).__name__}")
        if not 0 <= max_delay < math.inf:
            raise ValueError(f"max_delay must be 0 seconds or more, got {max_delay}")
        self._planner = planner
        self._metrics = metrics
        self._max_delay = max_delay
        self._max_requests = max_requests
        self._ids = count()
        self._held: list[_HeldRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Plan the requests that still wait."""
        self._is_open = False
        self._plan(self._take_held())

    async def plan(self, blocks: Iterable[ContextBlock | str], **options: Unpack[PlanOptions]) -> ContextPlan:
        """Do the same as `ContextPlanner.aplan`, together with the requests that come at the same time.

        A cancelled call leaves the other requests unharmed, and its plan is abandoned.
        """
        if not self._is_open or not _fits_in_a_window(options):
            return await self._planner.aplan(blocks, **options)
        began = time.perf_counter()
        model, preamble = options.get("model"), options.get("preamble")
        check_names(model=model, preamble=preamble)
        request = BatchRequest(
            next(self._ids),
            blocks,
            tenant=options.get("tenant"),
            order_locked=options.get("order_locked", False),
        )
        loop = asyncio.get_running_loop()
        held = _HeldRequest(request, model, preamble, began, loop.create_future())
        self._held.append(held)
        if len(self._held) >= self._max_requests:
            loop.call_soon(self._plan, self._take_held())  # not now: this call would continue before the others
        elif self._timer is None:
            self._timer = loop.call_later(self._max_delay, lambda: self._plan(self._take_held()))
        try:
            return await held.plan
        except asyncio.CancelledError:
            # Cancelled after its plan was made, and before it received the plan.
            if not held.plan.cancelled() and held.plan.exception() is None:
                self._planner.abandon(held.plan.result())
            raise

    def _take_held(self) -> list[_HeldRequest]:
        """Stop the clock, and return the requests that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        return held

    def _plan(self, held: Sequence[_HeldRequest]) -> None:
        """Plan held requests, one window for each model and preamble."""
        windows: dict[tuple[str | None, str | None], dict[str, _HeldRequest]] = {}
        for each in held:
            if not each.plan.done():  # a cancelled call has cancelled it
                windows.setdefault((each.model, each.preamble), {})[each.request.id] = each
        for (model, preamble), waiting in windows.items():
            began = time.perf_counter()
            for each in waiting.values():
                self._metrics.hold_latency.observe(began - each.began)
            try:
                batch = self._planner.plan_window(
                    [each.request for each in waiting.values()], model=model, preamble=preamble
                )
            except Exception as error:
                for each in waiting.values():
                    each.plan.set_exception(error)
                continue
            for planned in batch:
                each, plan = waiting[planned.id], planned.plan
                self._metrics.notify_planned(plan, each.began)
                each.plan.set_result(plan)


def _fits_in_a_window(options: PlanOptions) -> bool:
    return options.get("placement", "head") == "head" and all(
        value is None or name in _OPTIONS_OF_WINDOWS for name, value in options.items()
    )
