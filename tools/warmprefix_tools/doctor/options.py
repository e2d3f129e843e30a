"""What `warmprefix doctor` can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix.errors import MissingExtraError

try:
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["STDOUT", "DoctorOptions"]

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    logs: Annotated[
        list[Path],
        Argument(metavar="REQUESTS...", help="Captured requests: JSON, JSONL, or vLLM's own log; gzipped or not."),
    ]
    kv_block_size: Annotated[int, Option(help="Tokens in a KV block of your engine.")] = 16
    capacity_tokens: Annotated[
        int | None, Option(help="Tokens that the prefix cache can hold.", show_default="no bound")
    ] = None
    fail_above: Annotated[
        float | None,
        Option(
            metavar="PERCENT", help="Exit with status 1 if the findings cost more than this percentage of all tokens."
        ),
    ] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Where to write the report too; - for standard output.")
    ] = None
    html_file: Annotated[Path | None, Option("--html", metavar="FILE", help="Where to write it as a page.")] = None

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
