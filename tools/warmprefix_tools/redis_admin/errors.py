"""What can go wrong with a server that is asked for its state."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["StateError"]


class StateError(WarmprefixError):
    """There is no answer; the message says why in one line, without any password, for the person at the keyboard."""
