"""The command `warmprefix record`: runs an application and records its planners."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from warmprefix.errors import TraceError
from warmprefix.traces import RECORD_PATH_VARIABLE, RECORD_TEXT_VARIABLE
from warmprefix_telemetry.trace_files import recorded_files
from warmprefix_tools.traces.reader import read_trace

__all__ = ["run_recorded"]

_CANNOT_RUN, _NOT_FOUND, _SIGNALLED = 126, 127, 128  # as in env(1) and shells


def run_recorded(command: Sequence[str], trace: Path, *, text: bool, print_line: Callable[[str], object]) -> int:
    """Run `command` to its end, print what was recorded, and return its exit status.

    Signals are passed on to it. If one ends it, the status is 128 plus the signal's number.

    Raises:
        TraceError: The trace is a folder, or its folder cannot be written; nothing was run.
    """
    if trace.is_dir():
        raise TraceError(str(trace), None, "a trace must be a file, and this is a folder")
    if not trace.parent.is_dir() or not os.access(trace.parent, os.R_OK | os.W_OK | os.X_OK):
        raise TraceError(str(trace), None, f"no file can be made in {trace.parent.absolute()}")
    before = recorded_files(str(trace))
    try:
        status = _run(
            command, {RECORD_PATH_VARIABLE: str(trace.absolute()), RECORD_TEXT_VARIABLE: "1" if text else "0"}
        )
    except OSError as error:
        print_line(f"{command[0]}: {error.strerror}")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN
    _report([path for path in recorded_files(str(trace)) if path not in before], print_line)
    return status


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
            return  # the terminal sends Ctrl-C to the child as well
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with _handling(pass_on):
        child = subprocess.Popen(command, env={**os.environ, **variables})  # noqa: S603 - the user asks for it
        for number in early:
            child.send_signal(number)
        status = child.wait()
    return status if status >= 0 else _SIGNALLED - status


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals that ask a process to end or act, unless ignored (nohup)."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _report(paths: Sequence[str], print_line: Callable[[str], object]) -> None:
    readable: list[str] = []
    for path in paths:
        try:
            requests = len(read_trace(path).requests)
        except TraceError as error:
            print_line(str(error))
            continue
        print_line(f"Recorded {requests} request{'' if requests == 1 else 's'} to {path}.")
        readable.append(path)
    if readable:
        print_line(f"Next: {shlex.join(['warmprefix', 'replay', *readable])}")
    elif not paths:
        print_line("No request was recorded: no ContextPlanner planned one, or each was given a recorder of its own.")
        print_line("An application that has no planner yet records with one line; docs/record.md has it.")
