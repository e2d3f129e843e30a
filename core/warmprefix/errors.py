"""The errors that warmprefix raises on purpose.

A caller's mistake is a plain `ValueError` or `TypeError`. Everything else derives from `WarmprefixError`.
"""

from __future__ import annotations

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
]


class WarmprefixError(Exception):
    """Base of every error below, for callers who want one `except`."""


class MissingExtraError(WarmprefixError, ImportError):
    """An optional dependency is absent; the message gives the command that installs it.

    >>> error = MissingExtraError("cli", "typer")
    >>> str(error) == f"warmprefix needs 'typer' for this: {error.command}"
    True
    """

    def __init__(self, extra: str, module: str) -> None:
        self.command = _install_command(extra)
        super().__init__(f"warmprefix needs '{module}' for this: {self.command}", name=module)
        self.extra = extra
        self.module = module


def _install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of warmprefix.

    A package index need not have warmprefix, so the command names the clone, directory or file that it came from.
    """
    import shlex  # none of these imports is needed before an extra is missing
    from pathlib import Path

    clone = Path(__file__).resolve().parents[2]
    if (clone / "core" / "warmprefix" / "errors.py").exists() and (clone / "pyproject.toml").exists():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    requirement = f"warmprefix[{extra}]"
    if url := _installed_from():
        requirement += f" @ {url}"
    return f"pip install {shlex.quote(requirement)}"


def _installed_from() -> str | None:
    """Return the URL that pip installed warmprefix from; None if that was an index, or is unknown."""
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
    """An engine could not be asked, or does not tell what it was asked for."""


class NoAgentError(EngineError):
    """All agents or replicas that could be asked have failed or left."""


class StoreError(WarmprefixError):
    """A seen-block store could not answer; names the operation and the conversation's key."""

    def __init__(self, operation: str, key: object) -> None:
        super().__init__(operation, key)
        self.operation = operation
        self.key = key

    def __str__(self) -> str:
        return f"seen-block store failed in {self.operation} for {self.key}"


class StoreUnavailableError(StoreError):
    """A seen-block store was not asked, because it failed a moment ago."""

    def __str__(self) -> str:
        return f"seen-block store failed lately, and is not asked to {self.operation} for {self.key}"


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
    """A batch can't be run, or not to its end; what had been answered is in its journal, if it has one."""


class BatchFileError(_FileError, BatchError):
    """A batch's journal or output file can't be used; names the file and the line.

    >>> str(BatchFileError("night.journal", 3, "no request of this batch is called 'q7'"))
    "night.journal, line 3: no request of this batch is called 'q7'"
    """


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Check an argument that is a count of 1 or more.

    Args:
        name: The argument's name, for the message.
        value: Its value.
        optional: Allow None too.

    Raises:
        TypeError: `value` is no int.
        ValueError: `value` is below 1.
    """
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{or_none}, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more{or_none and ', or None'}, got {value}")
