"""What the demo can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmprefix.plan import Placement
from warmprefix_tools.emulator.config import EmulatorConfig

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

    placement: PlacementChoice = "both"
    k: int = 10
    questions: int = 240
    seed: int = 0
    concurrency: int = 1
    prefill_rate: float | None = None
    """Of the emulator, in tokens a second; None for `PREFILL_RATE`."""
    kv_blocks: int | None = None
    """Of the emulator; None for `KV_BLOCKS`."""
    endpoint: str | None = None
    """Base URL of a real server, with its `/v1`; None for the emulator."""
    model: str | None = None
    """The real server's name for the model; None for the first that it lists."""
    api_key: str | None = None
    json_file: Path | None = None

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
