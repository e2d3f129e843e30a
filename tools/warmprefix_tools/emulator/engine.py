"""The engine: one GPU's prefills in order of arrival, and a decoder for every running request.

A request's time to first token is

    TTFT = wait + base_ttft_ms / 1000 + uncached_tokens / prefill_rate

where `wait` is for the prefills before it and, if running requests fill the cache, for KV blocks. A hosted API computes
all prompts at once. Token `i` of the
answer comes `i / decode_rate` seconds after the first. First tokens come strictly in order of arrival.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix_tools.caches import (
    Admission,
    CacheUse,
    CheckpointLayout,
    MarkedPrompt,
    is_hosted,
    simulated_cache,
)
from warmprefix_tools.emulator.answers import ComposedAnswer, FinishReason
from warmprefix_tools.emulator.scripts import AnswerScript
from warmprefix_tools.emulator.stored_items import ItemStore
from warmprefix_tools.emulator.tokenizer import ChatMessage

__all__ = ["EmulatorConfig", "EmulatorEngine", "EngineObserver", "Generation"]


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """Size of the cache and speed of the imaginary GPU; names are those of vLLM's flags where vLLM has the flag.

    `kv_blocks` is vLLM's `--num-gpu-blocks-override`: one of them is the null block, which stores nothing, so
    `capacity_tokens` is `(kv_blocks - 1) * block_size`. Rates are in tokens per second; `math.inf` makes that phase
    instantaneous. `max_model_len=None` means as many tokens as the cache can store.

    `profile` is the cache to emulate, or its name. With checkpoints, the profile has the block size, and `window` is
    the number of tokens that sliding-window layers see, None for recurrent layers. `kv_blocks` and `block_size` mean
    nothing to hosted APIs, whose context limit is a million tokens by default. `script` is a file with answers to give
    to requests with tools; see `AnswerScript`.

    >>> EmulatorConfig(kv_blocks=101).capacity_tokens
    1600
    >>> EmulatorConfig(kv_blocks=101, profile="vllm-checkpoints(528,16)").capacity_tokens
    45936

    Raises:
        ValueError: A value is out of range.
    """

    kv_blocks: int = 4096
    """Number of KV blocks, the null block included."""
    block_size: int = 16
    """Tokens per KV block."""
    prefill_rate: float = 8000.0
    """Prefilled tokens per second."""
    base_ttft_ms: float = 20.0
    """Milliseconds that each request takes before its prefill."""
    decode_rate: float = 80.0
    """Generated tokens per second."""
    model: str = "warmprefix-emulator"
    """Name of the served model."""
    max_model_len: int | None = None
    """Most tokens of a request; None for all that the cache can store."""
    profile: CacheProfile | str = "full-attention"
    """The cache to emulate, or its name."""
    window: int | None = None
    """Tokens that sliding-window layers see; None for recurrent layers."""
    script: Path | None = None
    """File with answers to requests with tools."""
    refuses_priorities: bool = False
    """True to refuse chats that have a priority, as SGLang with `--abort-on-priority-when-disabled`."""

    def __post_init__(self) -> None:
        profile = self.cache_profile  # which refuses names without a profile
        _require(profile.separator is None, "profile", self.profile, "one of a prefix cache")
        _require(self.kv_blocks >= 2, "kv_blocks", self.kv_blocks, "2 or more (one is the null block)")
        _require(self.block_size >= 1, "block_size", self.block_size, "1 or more")
        _require(self.prefill_rate > 0, "prefill_rate", self.prefill_rate, "above 0")
        _require(0 <= self.base_ttft_ms < math.inf, "base_ttft_ms", self.base_ttft_ms, "0 or more, and finite")
        _require(self.decode_rate > 0, "decode_rate", self.decode_rate, "above 0")
        _require(bool(self.model), "model", self.model, "a name that is not empty")
        if self.window is not None:
            _require(profile.checkpoints is not None, "window", self.window, f"None with the profile {profile.name}")
            _require(self.window >= 2, "window", self.window, "2 or more")
        limits = f"from 2 to {self.capacity_tokens}, the tokens that the cache can store"
        _require(2 <= self.context_limit <= self.capacity_tokens, "max_model_len", self.context_limit, limits)

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens whose KV fits into the cache at once."""
        if is_hosted(self.cache_profile):
            return _HOSTED_CONTEXT
        checkpoints = self.cache_profile.checkpoints
        if checkpoints is not None:
            return CheckpointLayout(checkpoints, self.window).most_tokens(self.kv_blocks - 1)
        return (self.kv_blocks - 1) * self.kv_block_size

    @property
    def cache_profile(self) -> CacheProfile:
        """The profile of the emulated cache."""
        return as_profile(self.profile)

    @property
    def kv_block_size(self) -> int:
        """Tokens per KV block: the profile's, if it has one, else `block_size`."""
        profile = self.cache_profile
        if profile.checkpoints is not None:
            return profile.checkpoints.block
        return self.block_size if profile.unit == 1 else profile.unit

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


_HOSTED_CONTEXT = 1_000_000


class EngineObserver:
    """Receiver of engine events as they happen, which must not block or raise; this one ignores them."""

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """Receive a computed prompt, whose first token came `ttft` seconds after the request."""

    def generated(self) -> None:
        """Receive one token, the first included."""

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        """Receive the end of a request, whose blocks are free; "abort" if its client gave up, at any stage."""


Reader = Callable[[Sequence[ChatMessage]], str]
"""Answers the messages of a chat."""


class EmulatorEngine:
    """One engine, for one event loop; tests pass a `clock` of their own. A `reader` answers what no script does."""

    def __init__(
        self,
        config: EmulatorConfig,
        *,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        reader: Reader | None = None,
    ) -> None:
        self.config = config
        self.reader = reader
        self.script = None if config.script is None else AnswerScript.read(config.script)
        self.profile = config.cache_profile
        self.cache = simulated_cache(
            self.profile, kv_blocks=config.kv_blocks, block_size=config.block_size, window=config.window
        )
        self._observer = EngineObserver() if observer is None else observer
        self._clock = clock
        self._cache_seconds_ahead = 0.0
        self.items = ItemStore(self._cache_time)
        self._gpu: AbstractAsyncContextManager[object] = nullcontext() if is_hosted(self.profile) else asyncio.Lock()
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

    def advance_clock(self, seconds: float) -> None:
        """Let this much time pass for cached prefixes and stored responses; TTFT and decoding are not affected.

        Raises:
            ValueError: `seconds` is below 0 or not finite.
        """
        _require(0 <= seconds < math.inf, "seconds", seconds, "0 or more, and finite")
        self._cache_seconds_ahead += seconds

    @asynccontextmanager
    async def generate(self, prompt: MarkedPrompt, answer: ComposedAnswer) -> AsyncIterator[Generation]:
        """Enter when the prompt is computed, iterate over the tokens, and leave at any time to free the blocks.

        `prompt` and `answer` together must fit into the context limit. Cancelling while entering is safe: a cancelled
        prefill leaves nothing in the cache.

        Raises:
            MarksRefusedError: The prompt has marks against the profile's rules.
        """
        arrived = self._clock()
        generation: Generation | None = None
        self._unfinished += 1
        try:
            admission = await self._prefill(prompt, len(answer.token_ids))
            try:
                first_token_at = self._clock()
                self._observer.prefilled(len(prompt.tokens), admission.use.read, first_token_at - arrived)
                decode = partial(self._decode, admission, answer, first_token_at)
                generation = Generation(answer, admission.use, decode)
                yield generation
            finally:
                self._release(admission)
        finally:
            self._unfinished -= 1
            complete = generation is not None and generation.complete
            self._observer.finished(answer.finish_reason if complete else "abort")

    async def _prefill(self, prompt: MarkedPrompt, answer_tokens: int) -> Admission:
        async with self._gpu:
            admission = await self._admit(prompt, answer_tokens)
            try:
                await asyncio.sleep(self.config.prefill_seconds(len(prompt.tokens) - admission.use.read))
            except BaseException:
                self._release(admission)
                raise
            admission.store(self._cache_time())
            return admission

    async def _admit(self, prompt: MarkedPrompt, answer_tokens: int) -> Admission:
        # The last token of an answer is never fed back, so its KV is never computed.
        room_for = answer_tokens - 1
        while (admission := self.cache.admit(prompt, self._cache_time(), room_for=room_for)) is None:
            self._blocks_freed.clear()
            await self._blocks_freed.wait()
        return admission

    def _cache_time(self) -> float:
        return self._clock() + self._cache_seconds_ahead

    def _release(self, admission: Admission) -> None:
        admission.free()
        self._blocks_freed.set()

    async def _decode(self, admission: Admission, answer: ComposedAnswer, first_token_at: float, position: int) -> None:
        if position:
            due = first_token_at + position / self.config.decode_rate
            await asyncio.sleep(max(due - self._clock(), 0))  # even for 0 s: the loop can notice a client that has left
            admission.append(answer.token_ids[position - 1])
        self._observer.generated()


class Generation:
    """The answer to one request: an async iterator that yields the text of each token at its time."""

    def __init__(self, answer: ComposedAnswer, use: CacheUse, decode: Callable[[int], Awaitable[None]]) -> None:
        self.answer = answer
        self.use = use
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
