"""Options of `warmprefix doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix import MissingExtraError
from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.option_checks import check_files, check_least, check_range, output_files
from warmprefix_tools.replay.replay_options import ProfileOption, named_profile

try:
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["DoctorOptions"]


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """One run of `warmprefix doctor`.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    logs: Annotated[
        list[Path],
        Argument(
            metavar="REQUESTS...",
            help="Captured requests, spans or transcripts: JSON, JSONL, or vLLM's own log; gzipped or not.",
        ),
    ]
    kv_block_size: Annotated[int, Option(help="Tokens per KV block of your engine.")] = 16
    profile: ProfileOption = None
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
        check_least("--kv-block-size", self.kv_block_size, 1)
        _ = self.cache_profile  # so that a wrong name fails here
        check_range("--fail-above", self.fail_above, 0, 100)
        check_files(self._files, self.logs)

    @property
    def cache_profile(self) -> CacheProfile | None:
        """The cache profile with this name; None without one."""
        return named_profile(self.profile)

    @property
    def outputs(self) -> list[Path]:
        """Files to write, without standard output."""
        return output_files(self._files)

    @property
    def _files(self) -> dict[str, Path | None]:
        return {"--json": self.json_file, "--html": self.html_file}
