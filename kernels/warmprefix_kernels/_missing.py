"""The error for a package of an extra that is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["missing_extra"]


def missing_extra(module: str, extra: str = "gpu") -> Any:
    """Return warmprefix's `MissingExtraError` for a module of an extra.

    Kernels do not depend on the core. It is imported here, after the failure, so that all messages have one wording.
    """
    return import_module("warmprefix.errors").MissingExtraError(extra, module)
