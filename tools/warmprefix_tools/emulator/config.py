"""What an emulated engine is made of: the size of its cache and the speed of its imaginary GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["EmulatorConfig"]


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """One engine; the names are those of vLLM's flags where vLLM has the flag.

    `kv_blocks` is vLLM's `--num-gpu-blocks-override`: one of them is the null block, which holds nothing, so
    `capacity_tokens` is `(kv_blocks - 1) * block_size`. Rates are in tokens a second and may be `math.inf`,
    which makes that phase instantaneous. `max_model_len=None` means all the cache can hold.

    >>> EmulatorConfig(kv_blocks=101).capacity_tokens
    1600
    """

    kv_blocks: int = 4096
    block_size: int = 16
    prefill_rate: float = 8000.0
    base_ttft_ms: float = 20.0
    decode_rate: float = 80.0
    model: str = "warmprefix-emulator"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _require(self.kv_blocks >= 2, "kv_blocks", self.kv_blocks, "at least 2: one is the null block")
        _require(self.block_size >= 1, "block_size", self.block_size, "at least 1")
        _require(self.prefill_rate > 0, "prefill_rate", self.prefill_rate, "above 0")
        _require(0 <= self.base_ttft_ms < math.inf, "base_ttft_ms", self.base_ttft_ms, "0 or more, and finite")
        _require(self.decode_rate > 0, "decode_rate", self.decode_rate, "above 0")
        _require(bool(self.model), "model", self.model, "a name")
        _require(
            2 <= self.context_limit <= self.capacity_tokens,
            "max_model_len",
            self.context_limit,
            f"between 2 and {self.capacity_tokens}, the tokens that the cache can hold",
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits into the cache at once."""
        return (self.kv_blocks - 1) * self.block_size

    @property
    def context_limit(self) -> int:
        """Most tokens of prompt and answer together: `max_model_len` with its default filled in."""
        return self.capacity_tokens if self.max_model_len is None else self.max_model_len

    def prefill_seconds(self, uncached_tokens: int) -> float:
        """Time that one prefill holds the GPU: the TTFT of a request that finds it idle.

        >>> EmulatorConfig(base_ttft_ms=20, prefill_rate=8000).prefill_seconds(4000)
        0.52
        """
        return self.base_ttft_ms / 1000 + uncached_tokens / self.prefill_rate


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
