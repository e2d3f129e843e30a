"""Errors raised on purpose, checks of arguments, and a log of survived errors.

A caller's mistake is a plain `ValueError` or `TypeError`. Everything else derives from `WarmprefixError`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = [
    "BatchError",
    "BatchFileError",
    "EngineError",
    "MissingExtraError",
    "NoAgentError",
    "StoreError",
    "StoreUnavailableError",
    "TraceError",
    "WarmprefixError",
    "check_count",
    "check_names",
    "log_failure",
]


class WarmprefixError(Exception):
    """Base class of the errors below, for callers that catch them all."""


class MissingExtraError(WarmprefixError, ImportError):
    """An optional dependency is missing; the message contains the install command.

    >>> error = MissingExtraError("cli", "typer")
    >>> str(error) == f"warmprefix needs 'typer' for this: {error.command}"
    True
    """

    def __init__(self, extra: str, module: str) -> None:
        self.command = _install_command(extra)
        """The command that installs the extra."""
        super().__init__(f"warmprefix needs '{module}' for this: {self.command}", name=module)
        self.extra = extra
        """Name of the extra."""
        self.module = module
        """Name of the module that is missing."""


def _install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of warmprefix.

    warmprefix need not be on a package index, so the command names the clone, directory or file that it came from.
    """
    import shlex  # not imported at the top, to keep `import warmprefix` fast
    from pathlib import Path

    clone = Path(__file__).resolve().parents[2]
    if (clone / "core" / "warmprefix" / "errors.py").exists() and (clone / "pyproject.toml").exists():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    requirement = f"warmprefix[{extra}]"
    if url := _installed_from():
        requirement += f" @ {url}"
    return f"pip install {shlex.quote(requirement)}"


def _installed_from() -> str | None:
    """Return the URL that pip installed warmprefix from; None for a package index."""
    import json
    from importlib import metadata

    try:
        origin = json.loads(metadata.distribution("warmprefix").read_text("direct_url.json") or "{}")
        url = origin.get("url")
        if url and (source := origin.get("vcs_info")):
            url = f"{source['vcs']}+{url}@{source['commit_id']}"
        if url and (folder := origin.get("subdirectory")):
            url += f"#subdirectory={folder}"
    except (metadata.PackageNotFoundError, OSError, ValueError, AttributeError, KeyError):
        return None
    return url if isinstance(url, str) else None


class EngineError(WarmprefixError):
    """An engine did not answer, or its answer lacks what was requested."""


class NoAgentError(EngineError):
    """No agent or replica is available: all have failed or left."""


class StoreError(WarmprefixError):
    """A seen-block store failed; names the operation and the conversation's key."""

    def __init__(self, operation: str, key: object) -> None:
        super().__init__(operation, key)
        self.operation = operation
        """Name of the operation that failed."""
        self.key = key
        """Key of the conversation."""

    def __str__(self) -> str:
        return f"seen-block store failed in {self.operation} for {self.key}"


class StoreUnavailableError(StoreError):
    """A seen-block store was not called, because it failed a moment ago."""

    def __str__(self) -> str:
        return f"seen-block store failed a moment ago, so {self.operation} was not called for {self.key}"


class _FileError(WarmprefixError):
    """A file can't be used; names the file and the line."""

    def __init__(self, path: str, line: int | None, problem: str) -> None:
        place = path if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {problem}")
        self.path = path
        self.line = line
        """From 1 on; None for the file as a whole."""
        self.problem = problem


class TraceError(_FileError):
    """A trace file can't be used; names the file and the line.

    >>> str(TraceError("day.jsonl", 7, "tokens must be an integer, 0 or more, got -3"))
    'day.jsonl, line 7: tokens must be an integer, 0 or more, got -3'
    """


class BatchError(WarmprefixError):
    """A batch can't start or finish; its journal, if any, keeps the answers so far."""


class BatchFileError(_FileError, BatchError):
    """A batch's journal or output file can't be used; names the file and the line.

    >>> str(BatchFileError("night.journal", 3, "no request of this batch is called 'q7'"))
    "night.journal, line 3: no request of this batch is called 'q7'"
    """


def check_count(name: str, value: object, *, optional: bool = False, least: int = 1) -> None:
    """Check an argument that is a count of `least` or more, or None if `optional`.

    Raises:
        TypeError: `value` is not an int.
        ValueError: `value` is below `least`.
    """
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{or_none}, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more{or_none and ', or None'}, got {value}")


def check_names(**names: str | None) -> None:
    """Check arguments that are a name or None.

    Raises:
        TypeError: A value is neither a str nor None; the message names its argument.
    """
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a str or None, got {type(value).__name__}")


def log_failure(log: logging.Logger, what: str, *, first: bool) -> None:
    """Log the exception being handled in one line.

    It is a warning if it is the `first` of its kind, and at DEBUG otherwise. The traceback is added only if the logger
    shows DEBUG messages.
    """
    import logging  # not imported at the top, to keep `import warmprefix` fast

    level = logging.WARNING if first else logging.DEBUG
    log.log(level, "%s: %s", what, _in_one_line(sys.exc_info()[1]), exc_info=log.isEnabledFor(logging.DEBUG))


def _in_one_line(error: BaseException | None) -> str:
    """Return the error and its root cause."""
    if error is None:
        return "unknown"
    root, causes = error, 0
    while (cause := root.__cause__ or root.__context__) is not None and causes < 100:
        root, causes = cause, causes + 1
    if root is error:
        return _described(error)
    return f"{_described(error)} (because of {_described(root)})"


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
