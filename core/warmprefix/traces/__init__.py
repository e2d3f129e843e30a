"""Retrieval traces: what a retriever returned, request by request, with lengths instead of text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from warmprefix.traces.contract import (
    RECORD_PATH_VARIABLE,
    RECORD_TEXT_VARIABLE,
    NoRecorder,
    RequestRecorder,
    recorder_from_environment,
)

if TYPE_CHECKING:
    from warmprefix.traces.format import MAX_TRACE_TOKENS, RECORDED_FIELD
    from warmprefix.traces.recorder import TraceRecorder
    from warmprefix.traces.trace_files import recorded_files

__all__ = [
    "MAX_TRACE_TOKENS",
    "RECORDED_FIELD",
    "RECORD_PATH_VARIABLE",
    "RECORD_TEXT_VARIABLE",
    "NoRecorder",
    "RequestRecorder",
    "TraceRecorder",
    "recorded_files",
    "recorder_from_environment",
]

_HOMES = {"TraceRecorder": "recorder", "recorded_files": "trace_files"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A planner needs the contract only.
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'format')}"), name)
