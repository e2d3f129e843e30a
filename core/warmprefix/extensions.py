"""Parts that other packages bring, found by their entry points.

A package names what it brings in its metadata. The groups are `warmprefix.urls` (by scheme: a function of a URL and
settings that returns arguments of `ContextPlanner`, such as a store, a feed or a tokenizer), `warmprefix.policies` and
`warmprefix.batch_planners` (by name: a function that makes one, which takes the device for a batch planner), and
`warmprefix.recorders` (`file`: a function of a path, and True to write texts, that returns a recorder).
"""

from __future__ import annotations

from typing import Any

__all__ = ["extension", "extension_names"]


def extension(group: str, name: str) -> Any:
    """Return what an installed package brings under a name, imported now; None if no package does.

    Raises:
        MissingExtraError: The package needs an extra that is not installed.
    """
    from importlib.metadata import entry_points  # slow to import

    return next((found.load() for found in entry_points(group=group, name=name)), None)


def extension_names(group: str) -> list[str]:
    """Return the names of all that installed packages bring in a group."""
    from importlib.metadata import entry_points

    return sorted({found.name for found in entry_points(group=group)})
