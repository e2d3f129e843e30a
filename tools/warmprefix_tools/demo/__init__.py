"""The command `warmprefix demo`: what warmprefix saves on real text, as the engine reports it."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["DemoError"]


class DemoError(WarmprefixError):
    """A reason that stops the demo, in one line for the user."""
