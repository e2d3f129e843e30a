"""Options of `warmprefix demo`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Placement
from warmprefix_tools.emulator import EmulatorConfig
from warmprefix_tools.option_checks import check_files, check_least, output_files

try:
    from typer import Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["DEFAULT_PAGE", "DemoOptions"]

DEFAULT_PAGE = Path("warmprefix-demo.html")
"""The page if none is named. It replaces no file but an older page of the demo."""

_BASE_TTFT_MS = 20.0
_KV_BLOCKS = 4_096
_PREFILL_RATE = 10_000.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run of the command; the defaults take about a minute.

    Raises:
        ValueError: A number is out of range, or options of the emulator and of a real server are mixed.
    """

    documents: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="Folder of your own .txt, .md, .rst and .html files, or one file, to ask about.",
            show_default="Python's standard library",
        ),
    ] = None
    placement: Annotated[
        Literal["head", "tail", "both"],
        Option(help="Place of the context: in the system prompt, with the questions, or both."),
    ] = "both"
    k: Annotated[int, Option("-k", help="Passages to retrieve for a question.")] = 10
    questions: Annotated[int, Option(help="Number of questions to ask.")] = 240
    seed: Annotated[int, Option(help="Another seed asks other questions.")] = 0
    concurrency: Annotated[int, Option(help="Requests at a time.")] = 1
    prefill_rate: Annotated[
        float | None,
        Option(help="Uncached prompt tokens per second of the emulator.", show_default=f"{_PREFILL_RATE:g}"),
    ] = None
    kv_blocks: Annotated[
        int | None, Option(help="Size of the emulator's cache in KV blocks.", show_default=str(_KV_BLOCKS))
    ] = None
    endpoint: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default="an emulator",
        ),
    ] = None
    model: Annotated[str | None, Option(help="The server's name for its model.", show_default="the first it lists")] = (
        None
    )
    api_key: Annotated[str | None, Option(envvar="WARMPREFIX_DEMO_API_KEY", help="API key of the server.")] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output.")
    ] = None
    html_file: Annotated[
        Path | None,
        Option("--html", metavar="FILE", help="Where to write the report as a page.", show_default=str(DEFAULT_PAGE)),
    ] = None

    def __post_init__(self) -> None:
        check_least("-k", self.k, 1)
        check_least("--questions", self.questions, 1)
        check_least("--concurrency", self.concurrency, 1)
        real = {"--model": self.model, "--api-key": self.api_key}
        emulated = {"--prefill-rate": self.prefill_rate, "--kv-blocks": self.kv_blocks}
        if self.endpoint is None and any(value is not None for value in real.values()):
            raise ValueError(f"{_given(real)} must come with --endpoint, the URL of a real server; got none")
        if self.endpoint is not None and any(value is not None for value in emulated.values()):
            raise ValueError(
                f"{_given(emulated)} must come without --endpoint, which replaces the emulator; got {self.endpoint}"
            )
        _ = self.emulator  # so that bad numbers fail here
        check_files(self._files, [] if self.documents is None else [self.documents])

    @property
    def emulator(self) -> EmulatorConfig | None:
        """Engine to emulate, which decodes in no time because the demo is about TTFT; None for a real server."""
        if self.endpoint is not None:
            return None
        return EmulatorConfig(
            kv_blocks=_KV_BLOCKS if self.kv_blocks is None else self.kv_blocks,
            prefill_rate=_PREFILL_RATE if self.prefill_rate is None else self.prefill_rate,
            base_ttft_ms=_BASE_TTFT_MS,
            decode_rate=math.inf,
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements to compare, in the order of the report."""
        return ("head", "tail") if self.placement == "both" else (self.placement,)

    @property
    def files(self) -> list[Path]:
        """Named files to write."""
        return output_files(self._files)

    @property
    def _files(self) -> dict[str, Path | None]:
        return {"--json": self.json_file, "--html": self.html_file}


def _given(options: Mapping[str, object]) -> str:
    return " and ".join(name for name, value in options.items() if value is not None)
