"""What can stop the demo: said in one line."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["DemoError"]


class DemoError(WarmprefixError):
    """The demo can't go on; the message is for the person at the keyboard."""
