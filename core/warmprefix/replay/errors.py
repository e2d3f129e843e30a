"""What can stop a replay: said in one line."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["ReplayError"]


class ReplayError(WarmprefixError):
    """The replay can't go on; the message is for the person at the keyboard."""
