"""Puts every question to the model, turn after turn, with the contexts of one arm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from warmprefix.blocks import ContextBlock
from warmprefix.plan import Placement
from warmprefix_tools.demo.arms import Arm, Context
from warmprefix_tools.demo.client import Answer, ChatClient
from warmprefix_tools.demo.prompts import Message, chat, continued
from warmprefix_tools.demo.questions import Question

__all__ = ["Served", "Turn", "all_of", "replay"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, and what the retriever found for it."""

    question: Question
    blocks: tuple[ContextBlock, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was sent and answered."""

    question: Question
    context: Context
    messages: tuple[Message, ...]
    answer: Answer
    ttft: float
    """Seconds from the retrieved blocks to the answer's first piece: planning counts."""


async def replay(
    turns: Sequence[Turn],
    arm: Arm,
    placement: Placement,
    instructions: str,
    client: ChatClient,
    *,
    concurrency: int = 1,
    served: Callable[[], object] = lambda: None,
) -> list[Served]:
    """Ask in order of arrival, at most `concurrency` at a time, and never a turn before the one that it follows.

    Calls `served` after each answer. The results are in the order of `turns`.
    """
    slots = asyncio.Semaphore(concurrency)  # first come, first served: no turn can hold up the one before it

    async def serve(turn: Turn, previous: asyncio.Task[Served] | None) -> Served:
        async with slots:
            before = None if previous is None else await previous
            history = [] if before is None else continued(before.messages, before.answer.text)
            started = time.perf_counter()
            async with arm.context(turn.blocks, history) as context:
                messages = chat(placement, instructions, history, context.text, turn.question.text)
                preparing = time.perf_counter() - started
                answer = await client.ask(messages, context.cache_salt)
        served()
        return Served(turn.question, context, tuple(messages), answer, preparing + answer.ttft)

    tasks: list[asyncio.Task[Served]] = []
    latest: dict[int, asyncio.Task[Served]] = {}
    for turn in turns:
        conversation = turn.question.conversation
        latest[conversation] = asyncio.create_task(serve(turn, latest.get(conversation)))
        tasks.append(latest[conversation])
    return await all_of(tasks)


async def all_of(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """All results; or the first exception, once every other task has been cancelled and has ended."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
