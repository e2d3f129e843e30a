"""The engine: one GPU's prefills in order of arrival, and a decoder for every running request.

A request's time to first token is

    TTFT = wait + base_ttft_ms / 1000 + uncached_tokens / prefill_rate

where `wait` is for the prefills before it and, if running requests fill the cache, for KV blocks. Token `i` of the
answer comes `i / decode_rate` seconds after the first. First tokens come strictly in order of arrival.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from warmprefix_tools.caches.kv_blocks import KvSequence, PrefixCache
from warmprefix_tools.emulator.answers import ComposedAnswer, FinishReason

__all__ = ["EmulatorConfig", "EmulatorEngine", "EngineObserver", "Generation"]


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """Size of the cache and speed of the imaginary GPU; names are those of vLLM's flags where vLLM has the flag.

    `kv_blocks` is vLLM's `--num-gpu-blocks-override`: one of them is the null block, which stores nothing, so
    `capacity_tokens` is `(kv_blocks - 1) * block_size`. Rates are in tokens per second; `math.inf` makes that phase
    instantaneous. `max_model_len=None` means as many tokens as the cache can store.

    >>> EmulatorConfig(kv_blocks=101).capacity_tokens
    1600

    Raises:
        ValueError: A value is out of range.
    """

    kv_blocks: int = 4096
    block_size: int = 16
    prefill_rate: float = 8000.0
    base_ttft_ms: float = 20.0
    decode_rate: float = 80.0
    model: str = "warmprefix-emulator"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _require(self.kv_blocks >= 2, "kv_blocks", self.kv_blocks, "2 or more (one is the null block)")
        _require(self.block_size >= 1, "block_size", self.block_size, "1 or more")
        _require(self.prefill_rate > 0, "prefill_rate", self.prefill_rate, "above 0")
        _require(0 <= self.base_ttft_ms < math.inf, "base_ttft_ms", self.base_ttft_ms, "0 or more, and finite")
        _require(self.decode_rate > 0, "decode_rate", self.decode_rate, "above 0")
        _require(bool(self.model), "model", self.model, "a name that is not empty")
        limits = f"from 2 to {self.capacity_tokens}, the tokens that the cache can store"
        _require(2 <= self.context_limit <= self.capacity_tokens, "max_model_len", self.context_limit, limits)

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens whose KV fits into the cache at once."""
        return (self.kv_blocks - 1) * self.block_size

    @property
    def context_limit(self) -> int:
        """Limit for prompt and answer together: `max_model_len` with its default filled in."""
        return self.capacity_tokens if self.max_model_len is None else self.max_model_len

    def prefill_seconds(self, uncached_tokens: int) -> float:
        """Return the time that one prefill takes on the GPU: the TTFT of a request that finds it idle.

        >>> EmulatorConfig(base_ttft_ms=20, prefill_rate=8000).prefill_seconds(4000)
        0.52
        """
        return self.base_ttft_ms / 1000 + uncached_tokens / self.prefill_rate


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


class EngineObserver:
    """Receiver of engine events as they happen, which must not block or raise; this one ignores them."""

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """Receive a computed prompt, whose first token came `ttft` seconds after the request."""

    def generated(self) -> None:
        """Receive one token, the first included."""

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        """Receive the end of a request, whose blocks are free; "abort" if its client gave up, at any stage."""


class EmulatorEngine:
    """One engine, for one event loop; tests pass a `clock` of their own."""

    def __init__(
        self,
        config: EmulatorConfig,
        *,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = PrefixCache(config.kv_blocks, config.block_size)
        self._observer = EngineObserver() if observer is None else observer
        self._clock = clock
        self._gpu = asyncio.Lock()
        self._blocks_freed = asyncio.Event()
        self._unfinished = 0

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV blocks: in prefill or decoding."""
        return self.cache.num_sequences

    @property
    def num_waiting(self) -> int:
        """Number of requests that have arrived and hold no blocks yet."""
        return self._unfinished - self.num_running

    @asynccontextmanager
    async def generate(
        self, prompt: Sequence[int], answer: ComposedAnswer, cache_salt: str | None = None
    ) -> AsyncIterator[Generation]:
        """Enter when the prompt is computed, iterate over the tokens, and leave at any time to free the blocks.

        `prompt` and `answer` together must fit into the context limit. Cancelling while entering is safe: a cancelled
        prefill leaves nothing in the cache.
        """
        arrived = self._clock()
        generation: Generation | None = None
        self._unfinished += 1
        try:
            sequence = await self._prefill(prompt, len(answer.token_ids), cache_salt)
            try:
                first_token_at = self._clock()
                self._observer.prefilled(len(prompt), sequence.cached_tokens, first_token_at - arrived)
                decode = partial(self._decode, sequence, answer, first_token_at)
                generation = Generation(answer, sequence.cached_tokens, decode)
                yield generation
            finally:
                self._release(sequence)
        finally:
            self._unfinished -= 1
            complete = generation is not None and generation.complete
            self._observer.finished(answer.finish_reason if complete else "abort")

    async def _prefill(self, prompt: Sequence[int], answer_tokens: int, cache_salt: str | None) -> KvSequence:
        async with self._gpu:
            sequence = await self._admit(prompt, answer_tokens, cache_salt)
            try:
                await asyncio.sleep(self.config.prefill_seconds(len(prompt) - sequence.cached_tokens))
            except BaseException:
                self._release(sequence)
                raise
            self.cache.store(sequence)
            return sequence

    async def _admit(self, prompt: Sequence[int], answer_tokens: int, cache_salt: str | None) -> KvSequence:
        # The last token of an answer is never fed back, so its KV is never computed.
        room_for = answer_tokens - 1
        while (sequence := self.cache.allocate(prompt, cache_salt, room_for=room_for)) is None:
            self._blocks_freed.clear()
            await self._blocks_freed.wait()
        return sequence

    def _release(self, sequence: KvSequence) -> None:
        self.cache.free(sequence)
        self._blocks_freed.set()

    async def _decode(self, sequence: KvSequence, answer: ComposedAnswer, first_token_at: float, position: int) -> None:
        if position:
            due = first_token_at + position / self.config.decode_rate
            await asyncio.sleep(max(due - self._clock(), 0))  # even for 0 s: the loop can notice a client that has left
            self.cache.append(sequence, answer.token_ids[position - 1])
        self._observer.generated()


class Generation:
    """The answer to one request: an async iterator that yields the text of each token at its time."""

    def __init__(self, answer: ComposedAnswer, cached_tokens: int, decode: Callable[[int], Awaitable[None]]) -> None:
        self.answer = answer
        self.cached_tokens = cached_tokens
        self.generated_tokens = 0
        self._decode = decode

    @property
    def complete(self) -> bool:
        """True if the last token has been yielded."""
        return self.generated_tokens == len(self.answer.token_ids)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        if self.complete:
            raise StopAsyncIteration
        await self._decode(self.generated_tokens)
        self.generated_tokens += 1
        return self.answer.pieces[self.generated_tokens - 1]
