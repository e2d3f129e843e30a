"""Retrieval traces: what a retriever returned, request by request, with lengths instead of text."""

from __future__ import annotations

from warmprefix.traces.format import MAX_TRACE_TOKENS, RECORDED_FIELD
from warmprefix.traces.recorder import (
    RECORD_PATH_VARIABLE,
    RECORD_TEXT_VARIABLE,
    NoRecorder,
    RequestRecorder,
    TraceRecorder,
    recorder_from_environment,
)
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
