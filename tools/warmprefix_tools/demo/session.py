"""One run of the demo: the questions, asked with and without warmprefix, with the context in two places."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.labels import label_candidates
from warmprefix.plan import Placement
from warmprefix.residency import EngineReport
from warmprefix_openai import ChatAnswer
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import LEAST_TOKENS, MOST_TOKENS, read_standard_library
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.document_questions import ask_about_documents, subjects
from warmprefix_tools.demo.documents import Documents, read_documents
from warmprefix_tools.demo.questions import UserQuestion, ask
from warmprefix_tools.demo.servers import DemoServer, Message, message, serve
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.retriever import Bm25Retriever

__all__ = [
    "MODEL_SECONDS",
    "ArmRuns",
    "DemoResult",
    "DemoText",
    "DemoTurn",
    "ServedTurn",
    "prepare_session",
    "run_session",
]

MODEL_SECONDS = 150.0
"""Time after which the model on this machine gets no further question."""

_INSTRUCTIONS = (
    "You answer questions about {subject}. Rely on the {passages} in the context, name {those} that you used, and point"
    " it out if the answer is not there."
)
_ABOUT_PYTHON = _INSTRUCTIONS.format(
    subject="the Python standard library", passages="documentation", those="the passages"
)
_ABOUT_DOCUMENTS = _INSTRUCTIONS.format(subject="a collection of documents", passages="passages", those="those")
_SEED = 0
_LEAST_SUBJECTS = 3


class DemoTurn(NamedTuple):
    """A question, and the blocks that the retriever found for it."""

    question: UserQuestion
    blocks: tuple[ContextBlock, ...]


class DemoText(NamedTuple):
    """The questions of a session, in order of arrival."""

    turns: tuple[DemoTurn, ...]
    passages: int
    """Most passages that are retrieved for a question."""
    documents: Documents | None
    """The user's own documents; None if the questions are about the standard library."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One request that was sent and answered."""

    turn: DemoTurn
    plan: ContextPlan | None
    """None without warmprefix."""
    planning_seconds: float
    messages: Sequence[Message]
    answer: ChatAnswer
    """With the server's own token counts, which are None if it reports none."""

    @property
    def ttft(self) -> float:
        """Seconds from the retrieved blocks to the answer's first token, planning included."""
        return self.planning_seconds + (self.answer.ttft or 0.0)

    @property
    def shown(self) -> list[tuple[str, str, bool]]:
        """Name and text of each block in the order of the prompt, and True for a reference."""
        if self.plan is None:
            return [(_name(block), block.text, False) for block in self.turn.blocks]
        return [
            (planned.label or _name(planned.block), text, planned.reference is not None)
            for planned, text in zip(self.plan.blocks, self.plan.paragraphs(), strict=True)
        ]


def _name(block: ContextBlock) -> str:
    """Return the label that a block would have in a prompt with labels."""
    return next(label_candidates(block))


ArmRuns = Mapping[Placement, tuple[Sequence[ServedTurn], Sequence[ServedTurn]]]
"""Requests in relevance order and with warmprefix, question for question."""


class DemoResult(NamedTuple):
    """All results of a run."""

    text: DemoText
    runs: ArmRuns


def prepare_session(options: DemoOptions) -> DemoText:
    """Read the text, and return the questions with their blocks; the same for the same text and options.

    Raises:
        DemoError: The text cannot be read, or is too short.
    """
    if options.documents is None:
        entries = read_standard_library()
        blocks = [block for entry in entries for block in entry.blocks]
        return _retrieved(options, blocks, ask(entries, options.number, _SEED, options.users), None)
    documents = read_documents(options.documents)
    about = subjects(documents.passages)
    least = 2 * options.passages  # with fewer, most questions retrieve the same passages
    if len(documents.passages) < least or len(about) < _LEAST_SUBJECTS:
        raise DemoError(
            f"{documents.name} is too little text: {counted(len(documents.passages), 'passage')},"
            f" {len(about)} of them with a sentence to ask about, in {counted(documents.files, 'file')}"
            f" (.txt, .md, .rst, .html); the demo needs {least} passages and {_LEAST_SUBJECTS} such sentences."
            f" A passage has {LEAST_TOKENS} to {MOST_TOKENS} tokens.{documents.remarks}"
        )
    questions = ask_about_documents(about, options.number, _SEED, options.users)
    return _retrieved(options, [passage.block for passage in documents.passages], questions, documents)


def _retrieved(
    options: DemoOptions,
    blocks: Sequence[ContextBlock],
    questions: Sequence[UserQuestion],
    documents: Documents | None,
) -> DemoText:
    if options.model:  # each question stands alone, which keeps prompts short
        questions = [replace(each, conversation=i, turn=1, text=each.query) for i, each in enumerate(questions)]
    retriever = Bm25Retriever(blocks)
    turns = tuple([DemoTurn(question, retriever.retrieve(question.query, options.passages)) for question in questions])
    return DemoText(turns, options.passages, documents)


async def run_session(
    options: DemoOptions, text: DemoText, announce: Callable[[str, int], Callable[[], object]]
) -> DemoResult:
    """Serve every question once per arm and placement.

    Each of these runs has its own emulated engine, and they go on at the same time. The user's server gets one run
    after the other; a cache salt and a line before the instructions, different for each run, keep runs from sharing a
    cache. On this machine, each of two runs has its own server, and they take turns: so a machine that grows slower
    slows both. Such a session ends early if it takes too long.

    Args:
        options: The server.
        text: The questions.
        announce: Takes a run's name and number of steps, and returns a function to call after each step.

    Raises:
        DemoError: The server does not answer.
        LocalModelError: The model does not start on this machine.
    """
    placements: list[Placement] = ["head"] if options.model else ["head", "tail"]
    kinds: list[tuple[Placement, bool]] = [(each, planned) for each in placements for planned in (False, True)]
    names = {False: "relevance order", True: "warmprefix"}
    ticks = [announce(f"{placement}: {names[is_planned]}", len(text.turns)) for placement, is_planned in kinds]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serve(options)) for _ in (kinds[:1] if options.endpoint else kinds)]
        arms = [
            _ServedArm(text, *kind, servers[number % len(servers)], ticks[number]) for number, kind in enumerate(kinds)
        ]
        if options.model:
            return await _take_turns(text, *arms)
        limit = asyncio.Semaphore(1 if options.endpoint else len(arms))

        async def run(arm: _ServedArm) -> list[ServedTurn]:
            async with limit:
                return [await arm.ask(turn) for turn in text.turns]

        tasks = [asyncio.create_task(run(arm)) for arm in arms]
        try:
            served = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return DemoResult(text, {placement: (served[2 * i], served[2 * i + 1]) for i, placement in enumerate(placements)})


async def _take_turns(text: DemoText, relevance: _ServedArm, planned: _ServedArm) -> DemoResult:
    """Ask each question in both arms, the other one first each time, until the time is up."""
    started = time.monotonic()
    pairs: list[tuple[ServedTurn, ServedTurn]] = []
    for turn in text.turns:
        if time.monotonic() - started > MODEL_SECONDS:
            break
        served = {arm: await arm.ask(turn) for arm in ((relevance, planned), (planned, relevance))[len(pairs) % 2]}
        pairs.append((served[relevance], served[planned]))
    before, after = zip(*pairs, strict=True)
    return DemoResult(text._replace(turns=text.turns[: len(pairs)]), {"head": (before, after)})


class _ServedArm:
    """One run on one server; each turn follows the earlier turns of its conversation, as they were sent."""

    def __init__(
        self, text: DemoText, placement: Placement, is_planned: bool, server: DemoServer, tick: Callable[[], object]
    ) -> None:
        session = f"{secrets.randbelow(10**12):012}"  # digits, so that every session has the same number of tokens
        instructions = _ABOUT_PYTHON if text.documents is None else _ABOUT_DOCUMENTS
        self._instructions = f"Session {session}. {instructions}" if server.is_shared else instructions
        self._placement: Placement = placement
        self._server, self._tick = server, tick
        self._salt = f"demo-{session}"
        self._planner = ContextPlanner(capacity_tokens=server.capacity_tokens) if is_planned else None
        self._histories: dict[int, list[Message]] = {}

    async def ask(self, turn: DemoTurn) -> ServedTurn:
        """Serve one turn, and commit its plan with what the server reported."""
        history = self._histories.get(turn.question.conversation, [])
        started, plan, salt = time.perf_counter(), None, self._salt
        context = "\n\n".join([block.text for block in turn.blocks])
        if self._planner is not None:
            plan = self._planner.plan(
                turn.blocks,
                placement=self._placement,
                tenant=salt,
                model=self._server.model,
                preamble=self._instructions,
                history=history if self._placement == "tail" else None,
            )
            context, salt = plan.render(), plan.cache_salt or ""
        messages = _chat(self._placement, self._instructions, history, context, turn.question.text)
        seconds = time.perf_counter() - started
        answer = await self._server.ask(messages, salt)
        if self._planner is not None and plan is not None:
            self._planner.commit(plan, report=self._report(answer))
        self._histories[turn.question.conversation] = [*messages[1:], message("assistant", answer.text or "")]
        self._tick()
        return ServedTurn(turn, plan, seconds, messages, answer)

    def _report(self, answer: ChatAnswer) -> EngineReport | None:
        """Return what the planner learns from: nothing where it was given the size of the cache."""
        if self._server.capacity_tokens is not None:
            return None
        return EngineReport(answer.cached_tokens, answer.prompt_tokens, answer.ttft)


def _chat(
    placement: Placement, instructions: str, history: Sequence[Message], context: str, question: str
) -> list[Message]:
    """Return the messages of one request: fixed instructions come first, so that prefixes can be shared.

    `head`: the context follows the instructions, before the history, and changes with each turn.
    `tail`: the context comes with its question, and stays in the history.
    """
    if placement == "head":
        return [message("system", f"{instructions}\n\n{context}"), *history, message("user", question)]
    return [message("system", instructions), *history, message("user", f"{context}\n\nQuestion: {question}")]
