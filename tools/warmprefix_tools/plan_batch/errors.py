"""What the command can't do."""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["PlanBatchError"]


class PlanBatchError(WarmprefixError):
    """A trace can't be planned as asked; the message says why, for the person at the keyboard."""
