"""One run of the demo: text, questions, and both arms under each placement."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from warmprefix import ContextBlock
from warmprefix.plan import Placement
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.arms import (
    DOCUMENT_INSTRUCTIONS,
    INSTRUCTIONS,
    DemoArm,
    Message,
    PromptContext,
    chat,
    continued,
    relevance_arm,
    warmprefix_arm,
)
from warmprefix_tools.demo.client import Answer, ChatClient
from warmprefix_tools.demo.corpus import LEAST_TOKENS, MOST_TOKENS, LibraryEntry, read_standard_library
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.document_questions import ask_about_documents, subjects
from warmprefix_tools.demo.documents import Documents, read_documents
from warmprefix_tools.demo.questions import UserQuestion, ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.retriever import Bm25Retriever

__all__ = [
    "Announce",
    "ArmRuns",
    "DemoResult",
    "DemoText",
    "DemoTurn",
    "ServedTurn",
    "prepare_document_turns",
    "prepare_session",
    "prepare_turns",
    "run_session",
    "serve_turns",
]

T = TypeVar("T")

Announce = Callable[[str, int], Callable[[], object]]
"""Function that takes a task's name and number of steps, and returns a function to call after each step."""

_ARMS = ("relevance order", "warmprefix")
_LEAST_SUBJECTS = 3
_CAPACITY_TOKENS = 500_000  # assumed of a real server, which does not report it


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """A question, and the blocks that the retriever found for it."""

    question: UserQuestion
    blocks: tuple[ContextBlock, ...]


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One request that was sent and answered."""

    question: UserQuestion
    context: PromptContext
    messages: tuple[Message, ...]
    answer: Answer
    ttft: float
    """Seconds from the retrieved blocks to the answer's first token, planning included."""


ArmRuns = Mapping[Placement, tuple[Sequence[ServedTurn], Sequence[ServedTurn]]]
"""Requests of relevance order and of warmprefix, question for question."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All results of a run."""

    turns: tuple[DemoTurn, ...]
    runs: ArmRuns
    emulator: EmulatorConfig | None
    """None if a real server answered."""
    model: str
    seconds: float
    documents: Documents | None = None
    """The user's own documents; None if the questions are about the standard library."""


def prepare_turns(entries: Sequence[LibraryEntry], options: DemoOptions) -> tuple[DemoTurn, ...]:
    """Return the questions with their blocks: the same for both arms, and for the same text and options."""
    questions = ask(entries, options.questions, options.seed)
    return _retrieved([block for entry in entries for block in entry.blocks], questions, options)


def prepare_document_turns(documents: Documents, options: DemoOptions) -> tuple[DemoTurn, ...]:
    """Return the same for a user's own documents.

    Raises:
        DemoError: There are too few passages for a comparison.
    """
    least = 2 * options.k  # with fewer, most questions retrieve the same passages
    about = subjects(documents.passages)
    if len(documents.passages) < least or len(about) < _LEAST_SUBJECTS:
        raise DemoError(_too_few(documents, least, len(about)))
    questions = ask_about_documents(about, options.questions, options.seed)
    return _retrieved([passage.block for passage in documents.passages], questions, options)


def _too_few(documents: Documents, least: int, subjects: int) -> str:
    found = counted(len(documents.passages), "passage")
    needed = f"the demo needs {least} passages, twice the number that it retrieves for a question (-k)"
    if len(documents.passages) >= least:
        found += f", {subjects} of them with a sentence to ask about"
        needed = f"the demo needs {_LEAST_SUBJECTS} of these"
    return (
        f"{documents.name} is too little text: {found} in {counted(documents.files, 'file')} (.txt, .md, .rst, .html);"
        f" {needed}. A passage has {LEAST_TOKENS} to {MOST_TOKENS} tokens.{documents.remarks}"
    )


def _retrieved(
    blocks: Sequence[ContextBlock], questions: Sequence[UserQuestion], options: DemoOptions
) -> tuple[DemoTurn, ...]:
    retriever = Bm25Retriever(blocks)
    return tuple(DemoTurn(question, retriever.retrieve(question.query, options.k)) for question in questions)


class DemoText(NamedTuple):
    """What a session asks."""

    turns: tuple[DemoTurn, ...]
    documents: Documents | None = None
    """The user's own documents; None if the questions are about the standard library."""


def prepare_session(options: DemoOptions, entries: Sequence[LibraryEntry] | None = None) -> DemoText:
    """Read the text, and return the questions with their blocks.

    `entries` default to the standard library's.

    Raises:
        DemoError: The text cannot be read, or is too short.
    """
    if options.documents is None:
        return DemoText(prepare_turns(read_standard_library() if entries is None else entries, options))
    documents = read_documents(options.documents)
    return DemoText(prepare_document_turns(documents, options), documents)


async def run_session(options: DemoOptions, announce: Announce, text: DemoText) -> DemoResult:
    """Serve every question once per arm and placement.

    Each of these runs has its own emulated engine, and they go on at the same time. A real server gets one run after
    the other; a cache salt and a line before the instructions, different for each run, keep runs from sharing a cache.

    Raises:
        DemoError: The server does not answer.
    """
    started = time.perf_counter()
    emulator = options.emulator
    turns = text.turns
    runs: list[tuple[Placement, str]] = [(placement, arm) for placement in options.placements for arm in _ARMS]
    async with AsyncExitStack() as stack:
        if emulator is None:
            clients = [await stack.enter_async_context(_real_client(options))] * len(runs)
        else:
            clients = [await stack.enter_async_context(_emulated_client(emulator)) for _ in runs]
        ticks = [announce(f"{placement}: {arm}", len(turns)) for placement, arm in runs]

        async def serve(run: int) -> list[ServedTurn]:
            placement, arm = runs[run]
            return await _serve_run(options, turns, placement, arm, clients[run], ticks[run])

        if emulator is None:
            served = [await serve(run) for run in range(len(runs))]
        else:
            served = await _all_of([asyncio.create_task(serve(run)) for run in range(len(runs))])
    pairs: ArmRuns = {placement: (served[2 * i], served[2 * i + 1]) for i, placement in enumerate(options.placements)}
    return DemoResult(turns, pairs, emulator, clients[0].model, time.perf_counter() - started, text.documents)


async def _serve_run(
    options: DemoOptions,
    turns: Sequence[DemoTurn],
    placement: Placement,
    arm_name: str,
    client: ChatClient,
    tick: Callable[[], object],
) -> list[ServedTurn]:
    session = f"{secrets.randbelow(10**12):012}"  # digits, so that every session has the same number of tokens
    tenant = f"demo-{session}"
    emulator = options.emulator
    instructions = INSTRUCTIONS if options.documents is None else DOCUMENT_INSTRUCTIONS
    if emulator is None:
        instructions = f"Session {session}. {instructions}"
    if arm_name == "warmprefix":
        capacity = _CAPACITY_TOKENS if emulator is None else emulator.capacity_tokens
        arm = warmprefix_arm(placement, tenant, client.model, instructions, capacity)
    else:
        arm = relevance_arm(cache_salt=tenant)
    return await serve_turns(turns, arm, placement, instructions, client, options.concurrency, tick)


async def serve_turns(
    turns: Sequence[DemoTurn],
    arm: DemoArm,
    placement: Placement,
    instructions: str,
    client: ChatClient,
    concurrency: int = 1,
    tick: Callable[[], object] = lambda: None,
) -> list[ServedTurn]:
    """Ask in order of arrival, at most `concurrency` at a time, and each turn after the one that it follows.

    Calls `tick` after each answer. The results are in the order of `turns`.
    """
    slots = asyncio.Semaphore(concurrency)  # first come, first served: a turn cannot block the one that it waits for

    async def serve(turn: DemoTurn, previous: asyncio.Task[ServedTurn] | None) -> ServedTurn:
        async with slots:
            before = None if previous is None else await previous
            history = [] if before is None else continued(before.messages, before.answer.text)
            started = time.perf_counter()
            async with arm(turn.blocks, history) as context:
                messages = chat(placement, instructions, history, context.text, turn.question.text)
                preparing = time.perf_counter() - started
                answer = await client.ask(messages, context.cache_salt)
        tick()
        return ServedTurn(turn.question, context, tuple(messages), answer, preparing + answer.ttft)

    tasks: list[asyncio.Task[ServedTurn]] = []
    latest: dict[int, asyncio.Task[ServedTurn]] = {}
    for turn in turns:
        conversation = turn.question.conversation
        latest[conversation] = asyncio.create_task(serve(turn, latest.get(conversation)))
        tasks.append(latest[conversation])
    return await _all_of(tasks)


async def _all_of(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Return all results; or raise the first exception, after cancelling the other tasks and awaiting their ends."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    """Enter with a client whose server has answered once, so that no measured request meets a cold engine."""
    assert options.endpoint is not None
    client = ChatClient(options.endpoint, options.model, options.api_key)
    try:
        await client.warm_up()
        yield client
    finally:
        await client.close()
