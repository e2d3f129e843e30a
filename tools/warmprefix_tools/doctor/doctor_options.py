"""Options of `warmprefix doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix import MissingExtraError

try:
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["STDOUT", "DoctorOptions"]

STDOUT = Path("-")
"""Name for standard output, which only `--json` takes; all other output goes to standard error then."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """One run of `warmprefix doctor`.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    logs: Annotated[
        list[Path],
        Argument(metavar="REQUESTS...", help="Captured requests: JSON, JSONL, or vLLM's own log; gzipped or not."),
    ]
    kv_block_size: Annotated[int, Option(help="Tokens per KV block of your engine.")] = 16
    capacity_tokens: Annotated[int | None, Option(help="Size of the prefix cache.", show_default="no bound")] = None
    fail_above: Annotated[
        float | None,
        Option(
            metavar="PERCENT", help="Exit with status 1 if the findings cost more than this percentage of all tokens."
        ),
    ] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="File for the report as JSON; - for standard output.")
    ] = None
    html_file: Annotated[Path | None, Option("--html", metavar="FILE", help="File for the report as a page.")] = None

    def __post_init__(self) -> None:
        if self.kv_block_size < 1:
            raise ValueError(f"--kv-block-size must be 1 or more, got {self.kv_block_size}")
        if self.capacity_tokens is not None and self.capacity_tokens < self.kv_block_size:
            raise ValueError(
                f"--capacity-tokens must be --kv-block-size ({self.kv_block_size}) or more, got {self.capacity_tokens}"
            )
        if self.fail_above is not None and not 0 <= self.fail_above <= 100:
            raise ValueError(f"--fail-above must be a percentage from 0 to 100, got {self.fail_above:g}")
        if self.html_file == STDOUT:
            raise ValueError("--html must name a file, got -; only --json takes - for standard output")
        outputs = [os.path.realpath(file) for file in self.outputs]
        if len(set(outputs)) < len(outputs):
            raise ValueError(f"--json and --html must name different files, got {self.json_file} for both")
        for log in self.logs:
            if os.path.realpath(log) in outputs:
                raise ValueError(f"--json and --html must not name a log that is read, got {log}")

    @property
    def outputs(self) -> list[Path]:
        """Files to write, without standard output."""
        return [file for file in (self.json_file, self.html_file) if file is not None and file != STDOUT]
