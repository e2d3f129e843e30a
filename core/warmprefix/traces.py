"""The contract of recorders, and the recorder that the environment asks for.

`warmprefix_telemetry` brings the recorder that writes trace files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from warmprefix.blocks import ContextBlock
from warmprefix.extensions import extension

__all__ = ["RECORD_PATH_VARIABLE", "RECORD_TEXT_VARIABLE", "NoRecorder", "RequestRecorder", "recorder_from_environment"]

RECORD_PATH_VARIABLE = "WARMPREFIX_RECORD"
"""Environment variable with the path of the trace; unset or empty: nothing is recorded."""

RECORD_TEXT_VARIABLE = "WARMPREFIX_RECORD_TEXT"
"""Environment variable that is `1` to write texts too."""


@runtime_checkable
class RequestRecorder(Protocol):
    """Receives every request that a planner plans, from any thread, before it is planned."""

    def record(
        self,
        blocks: Sequence[ContextBlock],
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        k: int | None = None,
        request: str | None = None,
    ) -> None:
        """Note one request: its distinct blocks in relevance order, and the arguments of `ContextPlanner.plan`.

        The planner passes `k` and `request` only with `choose`: the blocks are then all candidates, relevance alone
        would feed the first `k`, and `request` is the id of the plan. It delays the request, so it should be quick.
        The planner counts and logs any exception, and the request goes on.
        """


class NoRecorder:
    """A `RequestRecorder` that notes nothing."""

    def record(self, blocks: Sequence[ContextBlock], **_request: str | int | None) -> None:
        pass


def recorder_from_environment() -> RequestRecorder | None:
    """Return the recorder that the environment asks for, the same one each time: a process has one trace.

    None if it asks for none. `warmprefix record` sets the variables. A path that cannot be used is logged, and nothing
    is recorded.
    """
    path = os.environ.get(RECORD_PATH_VARIABLE)
    if not path:
        return None
    open_trace = extension("warmprefix.recorders", "file")
    recorder: RequestRecorder | None = None
    if open_trace is not None:
        recorder = open_trace(path, os.environ.get(RECORD_TEXT_VARIABLE) == "1")
    return recorder
