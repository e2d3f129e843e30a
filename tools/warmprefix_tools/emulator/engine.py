"""The engine: one GPU's prefills in order of arrival, and a decoder for every running request.

A request's time to first token is

    TTFT = wait + base_ttft_ms / 1000 + uncached_tokens / prefill_rate

where `wait` is for the prefills before it and, if the cache is full of running requests, for KV blocks. Token
`i` of the answer comes `i / decode_rate` seconds after the first. The first tokens of requests are strictly
in order of arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Protocol

from warmprefix_tools.emulator.answer import Answer, FinishReason
from warmprefix_tools.emulator.config import EmulatorConfig
from warmprefix_tools.emulator.kv_cache import KvSequence, PrefixCache

__all__ = ["EmulatorEngine", "EngineObserver", "Generation", "NullObserver"]


class EngineObserver(Protocol):
    """Is told what the engine does, as it does it; must not block or raise."""

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """A prompt has been computed and its first token is there, `ttft` seconds after the request came."""
        ...

    def generated(self) -> None:
        """One token more, the first included."""
        ...

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        """A request is over and holds nothing; "abort" is one that its client gave up, at whatever stage."""
        ...


class NullObserver:
    """Looks away."""

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """Do nothing."""

    def generated(self) -> None:
        """Do nothing."""

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        """Do nothing."""


class EmulatorEngine:
    """One engine, for one event loop; `clock` and `sleep` are arguments so that tests need not wait."""

    def __init__(
        self,
        config: EmulatorConfig,
        *,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.cache = PrefixCache(config.kv_blocks, config.block_size)
        self._observer = NullObserver() if observer is None else observer
        self._clock = clock
        self._sleep = sleep
        self._gpu = asyncio.Lock()
        self._blocks_freed = asyncio.Event()
        self._unfinished = 0

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks: in prefill or decoding."""
        return self.cache.num_sequences

    @property
    def num_waiting(self) -> int:
        """Requests that have come and hold nothing yet."""
        return self._unfinished - self.num_running

    @asynccontextmanager
    async def generate(
        self, prompt: Sequence[int], answer: Answer, cache_salt: str | None = None
    ) -> AsyncIterator[Generation]:
        """Enter when the prompt is computed; iterate over the tokens; leave, at any time, to free the blocks.

        `prompt` and `answer` together must fit into the context limit. Cancelling while entering is safe too:
        a prefill that is cancelled leaves nothing in the cache.
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
                await self._sleep(self.config.prefill_seconds(len(prompt) - sequence.cached_tokens))
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

    async def _decode(self, sequence: KvSequence, answer: Answer, first_token_at: float, position: int) -> None:
        if position:
            due = first_token_at + position / self.config.decode_rate
            await self._sleep(max(due - self._clock(), 0))  # 0 too: it lets the loop notice a client that has left
            self.cache.append(sequence, answer.token_ids[position - 1])
        self._observer.generated()


class Generation:
    """The answer to one request: an async iterator over the texts of its tokens, each at its time."""

    def __init__(self, answer: Answer, cached_tokens: int, decode: Callable[[int], Awaitable[None]]) -> None:
        self.answer = answer
        self.cached_tokens = cached_tokens
        self.generated_tokens = 0
        self._decode = decode

    @property
    def complete(self) -> bool:
        """Whether the last token has been given out."""
        return self.generated_tokens == len(self.answer.token_ids)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        if self.complete:
            raise StopAsyncIteration
        await self._decode(self.generated_tokens)
        self.generated_tokens += 1
        return self.answer.pieces[self.generated_tokens - 1]
