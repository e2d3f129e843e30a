"""What the demo can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Placement
from warmprefix_tools.emulator.config import EmulatorConfig

try:
    from typer import Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["BASE_TTFT_MS", "KV_BLOCKS", "PREFILL_RATE", "DemoOptions", "PlacementChoice"]

PlacementChoice = Literal["head", "tail", "both"]

BASE_TTFT_MS = 20.0
KV_BLOCKS = 4_096
PREFILL_RATE = 10_000.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run; the defaults take about a minute.

    Raises:
        ValueError: A number is out of range, or options of the emulator and of a real server are mixed.
    """

    placement: Annotated[
        PlacementChoice, Option(help="Place of the context: in the system prompt, with the questions, or both.")
    ] = "both"
    k: Annotated[int, Option("-k", help="Passages to retrieve for a question.")] = 10
    questions: Annotated[int, Option(help="Number of questions to ask.")] = 240
    seed: Annotated[int, Option(help="Another seed asks other questions.")] = 0
    concurrency: Annotated[int, Option(help="Requests at a time.")] = 1
    prefill_rate: Annotated[
        float | None,
        Option(help="Uncached prompt tokens per second of the emulator.", show_default=f"{PREFILL_RATE:g}"),
    ] = None
    kv_blocks: Annotated[
        int | None, Option(help="Size of the emulator's cache in KV blocks.", show_default=str(KV_BLOCKS))
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
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Where to write the numbers too.")] = None

    def __post_init__(self) -> None:
        for name, value in (("-k", self.k), ("--questions", self.questions), ("--concurrency", self.concurrency)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.endpoint is None and (self.model is not None or self.api_key is not None):
            raise ValueError("--model and --api-key are for a real server; give its --endpoint too")
        if self.endpoint is not None and (self.prefill_rate is not None or self.kv_blocks is not None):
            raise ValueError("--prefill-rate and --kv-blocks are the emulator's; they do not go with --endpoint")
        _ = self.emulator  # so that bad numbers fail here

    @property
    def emulator(self) -> EmulatorConfig | None:
        """The engine to emulate; None where a real one is asked. Answers come at once: TTFT is what matters here."""
        if self.endpoint is not None:
            return None
        return EmulatorConfig(
            kv_blocks=KV_BLOCKS if self.kv_blocks is None else self.kv_blocks,
            prefill_rate=PREFILL_RATE if self.prefill_rate is None else self.prefill_rate,
            base_ttft_ms=BASE_TTFT_MS,
            decode_rate=math.inf,
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One or both, in the order in which they are shown."""
        return ("head", "tail") if self.placement == "both" else (self.placement,)
