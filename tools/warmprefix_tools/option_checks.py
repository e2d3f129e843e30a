"""Checks of options that several commands share.

Each message names the option, the value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from warmprefix_tools.report.amounts import listed

__all__ = ["STDOUT", "check_files", "check_least", "check_range", "output_files"]

STDOUT = Path("-")
"""Name for standard output, which only `--json` takes; nothing else is written there then."""


def check_least(option: str, number: int | None, least: int) -> None:
    """Raise a ValueError if a number is below the least one; None is allowed."""
    if number is not None and number < least:
        raise ValueError(f"{option} must be {least} or more, got {number}")


def check_range(option: str, number: float | None, least: float, most: float) -> None:
    """Raise a ValueError if a number is out of range or not a number; None is allowed."""
    if number is not None and not least <= number <= most:
        raise ValueError(f"{option} must be from {least:,.0f} to {most:,.0f}, got {number:g}")


def check_files(outputs: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Raise a ValueError if an option must not write to its file.

    Only `--json` may name standard output, and no option an input or the file of another option.

    Args:
        outputs: Path of each option that names a file to write; None if it is not given.
        inputs: Files that the command reads.
    """
    read = {os.path.realpath(file) for file in inputs}
    written: set[str] = set()
    for option, file in outputs.items():
        if file == STDOUT and option != "--json":
            raise ValueError(f"{option} must name a file, got -; only --json takes - for standard output")
    for option, file in outputs.items():
        if file is None or file == STDOUT:
            continue
        target = os.path.realpath(file)
        if target in read:
            raise ValueError(f"{option} must name a file that the command does not read, got {file}")
        if target in written:
            raise ValueError(f"{listed(list(outputs))} must name different files, got {file} twice")
        written.add(target)


def output_files(outputs: Mapping[str, Path | None]) -> list[Path]:
    """Return the files to write, without standard output."""
    return [file for file in outputs.values() if file is not None and file != STDOUT]
