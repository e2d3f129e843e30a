"""Administration of shared state in Redis: the commands of `warmprefix state`."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["StateError"]


class StateError(WarmprefixError):
    """A server gave no usable answer; the message has one line for the operator, without any password."""
