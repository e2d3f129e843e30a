"""What can go wrong with a log as a whole."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["DoctorError"]


class DoctorError(WarmprefixError):
    """There is no log to look at; the message says why, for the person at the keyboard."""
