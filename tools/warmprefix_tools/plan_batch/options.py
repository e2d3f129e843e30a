"""What `warmprefix plan-batch` can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from warmprefix.batch.device import Device
from warmprefix.batch.session import BATCH_PLANNERS
from warmprefix_tools.replay.options import STDOUT, parse_capacities

__all__ = ["PlanBatchOptions", "parse_capacity"]

_MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class PlanBatchOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, the planner is unknown, or two options contradict each other.
    """

    trace: Path
    planner: str = "auto"
    k: int | None = None
    limit: int | None = None
    capacity_tokens: int | None = None
    """None for no bound."""
    device: Device = "auto"
    time_budget: float | None = None
    """Seconds, as for `ContextPlanner.plan_batch`."""
    json_file: Path | None = None
    """`STDOUT` for standard output, where nothing else is written then."""
    orders_file: Path | None = None

    def __post_init__(self) -> None:
        if self.planner not in BATCH_PLANNERS:
            raise ValueError(f"--planner must be one of {', '.join(BATCH_PLANNERS)}; got {self.planner!r}")
        for name, number in (("-k", self.k), ("--limit", self.limit)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be 1 or more, got {number}")
        if self.time_budget is not None and not 0 <= self.time_budget <= _MOST_SECONDS:
            raise ValueError(f"--time-budget must be from 0 to {_MOST_SECONDS:,.0f} seconds, got {self.time_budget:g}")
        if self.orders_file == STDOUT:
            raise ValueError("--orders-out needs the name of a file; only --json takes - for standard output")
        outputs = [os.path.realpath(file) for file in self.outputs]
        if len(set(outputs)) < len(outputs):
            raise ValueError("--json and --orders-out must name different files")
        if os.path.realpath(self.trace) in outputs:
            raise ValueError(f"{self.trace} is to be read, so --json and --orders-out can't be written there")

    @property
    def outputs(self) -> list[Path]:
        """The files that are written."""
        return [file for file in (self.json_file, self.orders_file) if file is not None and file != STDOUT]


def parse_capacity(text: str) -> int | None:
    """One size, as `warmprefix replay` takes several.

    >>> parse_capacity("500k")
    500000

    Raises:
        ValueError: It is neither `unbounded` nor a whole number from 1 on, or there are several.
    """
    if "," in text:
        raise ValueError(f"--capacity-tokens takes one size here, and no commas in it; got {text!r}")
    (capacity,) = parse_capacities(text)
    return capacity
