"""How a failure that a request survives is logged."""

from __future__ import annotations

import logging
import sys

__all__ = ["log_failure"]


def log_failure(log: logging.Logger, what: str, *, first: bool) -> None:
    """Log the exception being handled in one line: as a warning the first time, at DEBUG from then on.

    The traceback is added only where the logger shows DEBUG messages.
    """
    level = logging.WARNING if first else logging.DEBUG
    log.log(level, "%s: %s", what, _in_one_line(sys.exc_info()[1]), exc_info=log.isEnabledFor(logging.DEBUG))


def _in_one_line(error: BaseException | None) -> str:
    """Return the error, and the one that it began with."""
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
