"""The engine in virtual time: the formula, the order, and that a cancelled request frees its blocks."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.kv_integrity import check_blocks

from warmprefix_tools.caches import MarkedPrompt, PrefixCache
from warmprefix_tools.emulator import EmulatorConfig
from warmprefix_tools.emulator.answers import ComposedAnswer, FinishReason, compose_answer
from warmprefix_tools.emulator.engine import EmulatorEngine, EngineObserver

CONFIG = EmulatorConfig(kv_blocks=101, block_size=10, prefill_rate=100, base_ttft_ms=500, decode_rate=4)


class _SkippingSelector(selectors.DefaultSelector):
    """Jumps to the next timer instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits forever"
        self.now += max(timeout, 0)
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    loop = _VirtualTimeLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


@dataclass
class Log(EngineObserver):
    """An observer that records events with their times."""

    prefills: list[tuple[float, int, int, float]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        self.prefills.append((now(), prompt_tokens, cached_tokens, ttft))

    def generated(self) -> None:
        self.token_times.append(now())

    def finished(self, reason: FinishReason | Literal["abort"]) -> None:
        self.reasons.append(reason)


def now() -> float:
    return asyncio.get_running_loop().time()


def make_engine(config: EmulatorConfig = CONFIG) -> tuple[EmulatorEngine, Log]:
    log = Log()
    return EmulatorEngine(config, observer=log, clock=now), log


def kv_of(engine: EmulatorEngine) -> PrefixCache:
    assert isinstance(engine.cache, PrefixCache)
    return engine.cache


def prompt_of(tokens: int, name: int = 0) -> list[int]:
    return [name * 10_000 + number for number in range(tokens)]


async def run(
    engine: EmulatorEngine, prompt: list[int], answer: ComposedAnswer | None = None, *, after: float = 0
) -> None:
    await asyncio.sleep(after)
    async with engine.generate(MarkedPrompt(prompt), answer or compose_answer(prompt, 1)) as generation:
        async for _ in generation:
            pass


def check_all_blocks_are_free(engine: EmulatorEngine) -> None:
    check_blocks(kv_of(engine))
    assert (engine.num_running, engine.num_waiting, engine.cache.usage) == (0, 0, 0)


def test_ttft_is_base_plus_uncached_tokens_over_rate() -> None:
    async def main() -> None:
        engine, log = make_engine()
        await run(engine, prompt_of(305))
        await run(engine, prompt_of(305))
        assert [cached for _, _, cached, _ in log.prefills] == [0, 300]
        assert [ttft for *_, ttft in log.prefills] == pytest.approx([0.5 + 305 / 100, 0.5 + 5 / 100])

    in_virtual_time(main())


def test_prefills_are_one_after_the_other_in_order_of_arrival() -> None:
    async def main() -> None:
        engine, log = make_engine()
        await asyncio.gather(
            run(engine, prompt_of(100, 1), after=0.1),
            run(engine, prompt_of(200, 2)),
            run(engine, prompt_of(50, 3), after=0.2),
        )
        assert [tokens for _, tokens, _, _ in log.prefills] == [200, 100, 50]
        assert [at for at, *_ in log.prefills] == pytest.approx([2.5, 4.0, 5.0])
        assert [ttft for *_, ttft in log.prefills] == pytest.approx([2.5, 3.9, 4.8])

    in_virtual_time(main())


def test_tokens_come_at_the_decode_rate_and_answers_decode_at_the_same_time() -> None:
    async def main() -> None:
        engine, log = make_engine()
        one, two = prompt_of(50, 1), prompt_of(50, 2)
        await asyncio.gather(*(run(engine, prompt, compose_answer(prompt, 5)) for prompt in (one, two)))
        assert log.token_times == pytest.approx(sorted([start + step / 4 for start in (1.0, 2.0) for step in range(5)]))
        assert log.reasons == ["length", "length"]

    in_virtual_time(main())


def test_answer_is_cached_except_its_last_token() -> None:
    async def main() -> None:
        engine, _ = make_engine()
        prompt = prompt_of(17)
        answer = compose_answer(prompt, 14)
        await run(engine, prompt, answer)
        history = [*prompt, *answer.token_ids]
        assert kv_of(engine).match_prefix([*history, 1, 2, 3]) == 30
        await run(engine, prompt, compose_answer(prompt, 13))
        assert kv_of(engine).match_prefix([*history[:30], 1]) == 30
        engine.cache.reset()
        await run(engine, prompt, compose_answer(prompt, 13))
        assert kv_of(engine).match_prefix([*history[:30], 1]) == 20

    in_virtual_time(main())


def test_request_that_does_not_fit_waits_and_later_ones_too() -> None:
    async def main() -> None:
        engine, log = make_engine(EmulatorConfig(kv_blocks=11, block_size=10, decode_rate=1))
        big = prompt_of(50, 1)
        holder = asyncio.ensure_future(run(engine, big, compose_answer(big, 30)))
        waiting = asyncio.ensure_future(run(engine, prompt_of(60, 2), after=1))
        behind = asyncio.ensure_future(run(engine, prompt_of(10, 3), after=2))
        await asyncio.sleep(10)
        assert (engine.num_running, engine.num_waiting) == (1, 2)
        await asyncio.gather(holder, waiting, behind)
        assert [tokens for _, tokens, _, _ in log.prefills] == [50, 60, 10]
        check_all_blocks_are_free(engine)

    in_virtual_time(main())


def test_cancelled_prefill_leaves_nothing_in_the_cache() -> None:
    async def main() -> None:
        engine, _ = make_engine()
        task = asyncio.ensure_future(run(engine, prompt_of(300)))
        await asyncio.sleep(1)
        assert engine.num_running == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert kv_of(engine).match_prefix(prompt_of(300)) == 0
        check_all_blocks_are_free(engine)

    in_virtual_time(main())


@dataclass(frozen=True)
class Visit:
    """One request of a random history."""

    arrives: float
    prompt_tokens: int
    prompt_name: int
    max_tokens: int
    patience: float | None


visits = st.builds(
    Visit,
    arrives=st.floats(0, 5),
    prompt_tokens=st.integers(1, 60),
    prompt_name=st.integers(0, 2),
    max_tokens=st.integers(1, 30),
    patience=st.none() | st.floats(0, 10),
)


@settings(deadline=None)
@given(st.lists(visits, max_size=12))
def test_requests_are_served_and_blocks_freed_whichever_clients_leave(history: list[Visit]) -> None:
    async def main() -> None:
        engine, log = make_engine(EmulatorConfig(kv_blocks=12, block_size=10, prefill_rate=50, decode_rate=5))
        done: list[Visit] = []

        async def visit(plan: Visit) -> None:
            prompt = prompt_of(plan.prompt_tokens, plan.prompt_name)
            work = run(engine, prompt, compose_answer(prompt, plan.max_tokens), after=plan.arrives)
            await asyncio.wait_for(work, None if plan.patience is None else plan.arrives + plan.patience)
            done.append(plan)

        await asyncio.gather(*map(visit, history), return_exceptions=True)
        check_all_blocks_are_free(engine)
        assert all(plan in done for plan in history if plan.patience is None)
        assert len(log.reasons) - log.reasons.count("abort") == len(done)

    in_virtual_time(main())
