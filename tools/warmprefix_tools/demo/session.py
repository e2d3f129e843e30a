"""One run of the demo: text, questions, and both arms under each placement."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from warmprefix.plan import Placement
from warmprefix_tools.demo.arms import Arm, RelevanceOrder, Warmprefix
from warmprefix_tools.demo.client import ChatClient
from warmprefix_tools.demo.corpus import Entry, read_standard_library
from warmprefix_tools.demo.examples import Runs
from warmprefix_tools.demo.options import DemoOptions
from warmprefix_tools.demo.prompts import INSTRUCTIONS
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.demo.retriever import Bm25Retriever
from warmprefix_tools.demo.runner import Served, Turn, all_of, replay
from warmprefix_tools.emulator.config import EmulatorConfig
from warmprefix_tools.emulator.server import EmulatorServer

__all__ = ["Announce", "DemoResult", "prepare_turns", "run_session"]

Announce = Callable[[str, int], Callable[[], object]]
"""Given a task's name and the number of its steps, makes what is called after each step."""

_ARMS = ("relevance order", "warmprefix")
_CAPACITY_TOKENS = 500_000  # of a real server, which is not asked


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All that a run came to."""

    turns: tuple[Turn, ...]
    runs: Runs
    emulator: EmulatorConfig | None
    """None where a real server answered."""
    model: str
    seconds: float


def prepare_turns(entries: Sequence[Entry], options: DemoOptions) -> tuple[Turn, ...]:
    """Index, ask and retrieve: the same for both arms, and for every run with the same text and options."""
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    questions = ask(entries, options.questions, options.seed)
    return tuple(Turn(question, retriever.retrieve(question.query, options.k)) for question in questions)


async def run_session(options: DemoOptions, announce: Announce, entries: Sequence[Entry] | None = None) -> DemoResult:
    """Serve every question once for each arm and placement; `entries` are the standard library's by default.

    Emulated engines are one for each of these runs, which then go on side by side. A real server gets one run after
    the other; a cache salt and a line of its own in front of the instructions keep each from profiting from the
    others.

    Raises:
        DemoError: The text can't be read, or the server doesn't answer.
    """
    started = time.perf_counter()
    emulator = options.emulator
    runs: list[tuple[Placement, str]] = [(placement, arm) for placement in options.placements for arm in _ARMS]
    async with AsyncExitStack() as stack:
        if emulator is None:
            clients = [await stack.enter_async_context(_real_client(options))] * len(runs)
        else:
            clients = [await stack.enter_async_context(_emulated_client(emulator)) for _ in runs]
        read = announce("reading the documentation", 1)
        turns = prepare_turns(read_standard_library() if entries is None else entries, options)
        read()
        jobs = [
            partial(
                _serve, options, turns, placement, arm, client, emulator, announce(f"{placement}: {arm}", len(turns))
            )
            for (placement, arm), client in zip(runs, clients, strict=True)
        ]
        if emulator is None:
            served = [await job() for job in jobs]
        else:
            served = await all_of([asyncio.create_task(job()) for job in jobs])
    by_run = dict(zip(runs, served, strict=True))
    return DemoResult(
        turns=turns,
        runs={
            placement: (by_run[placement, _ARMS[0]], by_run[placement, _ARMS[1]]) for placement in options.placements
        },
        emulator=emulator,
        model=clients[0].model,
        seconds=time.perf_counter() - started,
    )


async def _serve(
    options: DemoOptions,
    turns: Sequence[Turn],
    placement: Placement,
    arm_name: str,
    client: ChatClient,
    emulator: EmulatorConfig | None,
    served: Callable[[], object],
) -> list[Served]:
    session = f"{secrets.randbelow(10**12):012}"  # digits, so that each is as many tokens as the next
    tenant = f"demo-{session}"
    instructions = INSTRUCTIONS if emulator is not None else f"Session {session}. {INSTRUCTIONS}"
    arm: Arm
    if arm_name == "warmprefix":
        capacity = _CAPACITY_TOKENS if emulator is None else emulator.capacity_tokens
        arm = Warmprefix(placement, tenant, client.model, instructions, capacity)
    else:
        arm = RelevanceOrder(cache_salt=tenant)
    return await replay(turns, arm, placement, instructions, client, concurrency=options.concurrency, served=served)


@asynccontextmanager
async def _emulated_client(emulator: EmulatorConfig) -> AsyncIterator[ChatClient]:
    with EmulatorServer(emulator) as server:
        client = ChatClient(server.base_url, emulator.model)
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def _real_client(options: DemoOptions) -> AsyncIterator[ChatClient]:
    """One that has answered a first request, which the measured ones need not wait for a cold engine after."""
    assert options.endpoint is not None
    client = ChatClient(options.endpoint, options.model, options.api_key)
    try:
        await client.warm_up()
        yield client
    finally:
        await client.close()
