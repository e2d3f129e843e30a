"""The recorder that `warmprefix record` asks for, through the environment of the application it runs."""

from __future__ import annotations

import logging
import os

from warmprefix.traces.base import NoRecorder, RequestRecorder
from warmprefix.traces.recorder import TraceRecorder

__all__ = ["RECORD_PATH_VARIABLE", "RECORD_TEXT_VARIABLE", "recorder_from_environment"]

RECORD_PATH_VARIABLE = "WARMPREFIX_RECORD"
"""Where the trace goes; nothing is recorded where it is unset or empty."""

RECORD_TEXT_VARIABLE = "WARMPREFIX_RECORD_TEXT"
"""`1` to write texts too."""

_log = logging.getLogger("warmprefix")
_recorders: dict[tuple[str, bool], TraceRecorder] = {}


def recorder_from_environment() -> RequestRecorder:
    """What the environment asks for now: the same recorder each time, so that a process has one trace.

    An application must not fail because it is recorded: where that can't even begin, nothing is recorded.
    """
    path = os.environ.get(RECORD_PATH_VARIABLE)
    if not path:
        return NoRecorder()
    wanted = path, os.environ.get(RECORD_TEXT_VARIABLE) == "1"
    if wanted not in _recorders:
        try:
            _recorders.setdefault(wanted, TraceRecorder(path, text=wanted[1]))
        except OSError:  # such as a relative path in a directory that is gone
            _log.warning("cannot record to %s", path, exc_info=True)
            return NoRecorder()
    return _recorders[wanted]
