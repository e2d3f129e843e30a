"""What `warmprefix doctor` can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["STDOUT", "DoctorOptions"]

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    logs: tuple[Path, ...]
    kv_block_size: int = 16
    """Tokens in a KV block."""
    capacity_tokens: int | None = None
    """Of the prefix cache; None for no bound."""
    fail_above: float | None = None
    """In percent of all prompt tokens; None to succeed whatever is found."""
    json_file: Path | None = None
    """`STDOUT` for standard output, where nothing else is written then."""
    html_file: Path | None = None

    def __post_init__(self) -> None:
        if self.kv_block_size < 1:
            raise ValueError(f"--kv-block-size must be 1 or more, got {self.kv_block_size}")
        if self.capacity_tokens is not None and self.capacity_tokens < self.kv_block_size:
            raise ValueError(
                f"--capacity-tokens must hold one KV block of {self.kv_block_size} tokens or more,"
                f" got {self.capacity_tokens}"
            )
        if self.fail_above is not None and not 0 <= self.fail_above <= 100:
            raise ValueError(f"--fail-above must be a percentage from 0 to 100, got {self.fail_above:g}")
        if self.html_file == STDOUT:
            raise ValueError("--html needs the name of a file; only --json takes - for standard output")
        outputs = [os.path.realpath(file) for file in self.outputs]
        if len(set(outputs)) < len(outputs):
            raise ValueError("--json and --html must name different files")
        for log in self.logs:
            if os.path.realpath(log) in outputs:
                raise ValueError(f"{log} is to be read, so --json and --html can't be written there")

    @property
    def outputs(self) -> list[Path]:
        """The files that are written."""
        return [file for file in (self.json_file, self.html_file) if file is not None and file != STDOUT]
