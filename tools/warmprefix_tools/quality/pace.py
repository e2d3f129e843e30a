"""How fast a run asks, and how long the rest takes. Pure."""

from __future__ import annotations

__all__ = ["RunPace"]

_FIRST_CALLS = 20
"""Calls after which the pace says something."""
_LINE_SECONDS = 60.0
_MINUTE = 60.0


class RunPace:
    """Writes a line on the pace of a run after its first calls, and one per minute into a log."""

    def __init__(self, calls: int, started: float, is_terminal: bool) -> None:
        """Begin.

        Args:
            calls: Calls to make now.
            started: The time, in seconds of a monotonic clock.
            is_terminal: True if a progress bar shows the rest.
        """
        self._calls, self._started, self._is_terminal = calls, started, is_terminal
        self._next_line = 0.0

    def line(self, remaining: int, now: float) -> str | None:
        """Return the line to print after a call; None if it is not yet time for one."""
        made, seconds = self._calls - remaining, now - self._started
        is_due = made == _FIRST_CALLS or (made > _FIRST_CALLS and not self._is_terminal and now >= self._next_line)
        if not is_due or not remaining or seconds <= 0:
            return None
        self._next_line = now + _LINE_SECONDS
        left = _shown(remaining * seconds / made)
        return (
            f"{made:,} calls made, {remaining:,} left: {made * _MINUTE / seconds:,.0f} per minute, about {left} more."
        )


def _shown(seconds: float) -> str:
    hours, minutes = divmod(max(1, round(seconds / _MINUTE)), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
