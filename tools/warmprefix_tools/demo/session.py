"""One run of the demo: the questions, asked with and without warmprefix, with the context in two places."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.errors import MissingExtraError
from warmprefix.labels import label_candidates
from warmprefix.plan import Placement
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import LEAST_TOKENS, MOST_TOKENS, read_standard_library
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.document_questions import ask_about_documents, subjects
from warmprefix_tools.demo.documents import Documents, read_documents
from warmprefix_tools.demo.questions import UserQuestion, ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.retriever import Bm25Retriever

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("demo", "openai") from exc

from warmprefix_openai import ChatAnswer, ChatAsker, chat_options

__all__ = [
    "EMULATOR",
    "PASSAGES",
    "ArmRuns",
    "DemoResult",
    "DemoText",
    "DemoTurn",
    "ServedTurn",
    "prepare_session",
    "run_session",
]

PASSAGES = 10
"""Passages that are retrieved for a question."""
EMULATOR = EmulatorConfig(kv_blocks=4_096, prefill_rate=10_000.0, base_ttft_ms=20.0, decode_rate=math.inf)
"""The engine without a real server; it decodes in no time because the demo is about TTFT."""

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
_CAPACITY_TOKENS = 500_000  # assumed of a real server, which does not report it
_ANSWER_TOKENS = 48  # the demo times the beginning of an answer
_TIMEOUT_SECONDS = 300.0

_Message = dict[str, str]


class DemoTurn(NamedTuple):
    """A question, and the blocks that the retriever found for it."""

    question: UserQuestion
    blocks: tuple[ContextBlock, ...]


class DemoText(NamedTuple):
    """The questions of a session, in order of arrival."""

    turns: tuple[DemoTurn, ...]
    documents: Documents | None
    """The user's own documents; None if the questions are about the standard library."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One request that was sent and answered."""

    turn: DemoTurn
    plan: ContextPlan | None
    """None without warmprefix."""
    planning_seconds: float
    messages: Sequence[_Message]
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
        return _retrieved(blocks, ask(entries, options.questions, _SEED), None)
    documents = read_documents(options.documents)
    about = subjects(documents.passages)
    least = 2 * PASSAGES  # with fewer, most questions retrieve the same passages
    if len(documents.passages) < least or len(about) < _LEAST_SUBJECTS:
        raise DemoError(
            f"{documents.name} is too little text: {counted(len(documents.passages), 'passage')},"
            f" {len(about)} of them with a sentence to ask about, in {counted(documents.files, 'file')}"
            f" (.txt, .md, .rst, .html); the demo needs {least} passages and {_LEAST_SUBJECTS} such sentences."
            f" A passage has {LEAST_TOKENS} to {MOST_TOKENS} tokens.{documents.remarks}"
        )
    questions = ask_about_documents(about, options.questions, _SEED)
    return _retrieved([passage.block for passage in documents.passages], questions, documents)


def _retrieved(
    blocks: Sequence[ContextBlock], questions: Sequence[UserQuestion], documents: Documents | None
) -> DemoText:
    retriever = Bm25Retriever(blocks)
    turns = tuple([DemoTurn(question, retriever.retrieve(question.query, PASSAGES)) for question in questions])
    return DemoText(turns, documents)


async def run_session(
    options: DemoOptions, text: DemoText, announce: Callable[[str, int], Callable[[], object]]
) -> DemoResult:
    """Serve every question once per arm and placement.

    Each of these runs has its own emulated engine, and they go on at the same time. A real server gets one run after
    the other; a cache salt and a line before the instructions, different for each run, keep runs from sharing a cache.

    Args:
        options: The server.
        text: The questions.
        announce: Takes a run's name and number of steps, and returns a function to call after each step.

    Raises:
        DemoError: The server does not answer.
    """
    placements: list[Placement] = ["head", "tail"]
    arms: list[tuple[Placement, bool]] = [(each, planned) for each in placements for planned in (False, True)]
    names = {False: "relevance order", True: "warmprefix"}
    ticks = [announce(f"{placement}: {names[is_planned]}", len(text.turns)) for placement, is_planned in arms]
    async with AsyncExitStack() as stack:
        if options.endpoint is None:
            servers = [await stack.enter_async_context(_emulated_server()) for _ in arms]
        else:
            servers = [await stack.enter_async_context(_real_server(options))] * len(arms)
        limit = asyncio.Semaphore(len(arms) if options.endpoint is None else 1)

        async def serve(run: int) -> list[ServedTurn]:
            async with limit:
                return await _serve(text, *arms[run], servers[run], ticks[run])

        tasks = [asyncio.create_task(serve(run)) for run in range(len(arms))]
        try:
            served = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return DemoResult(text, {placement: (served[2 * i], served[2 * i + 1]) for i, placement in enumerate(placements)})


async def _serve(
    text: DemoText, placement: Placement, is_planned: bool, server: _Server, tick: Callable[[], object]
) -> list[ServedTurn]:
    """Ask in order of arrival; each turn follows the conversation's turns before, as they were sent."""
    session = f"{secrets.randbelow(10**12):012}"  # digits, so that every session has the same number of tokens
    instructions = _ABOUT_PYTHON if text.documents is None else _ABOUT_DOCUMENTS
    if server.is_real:
        instructions = f"Session {session}. {instructions}"
    planner = ContextPlanner(capacity_tokens=_CAPACITY_TOKENS if server.is_real else EMULATOR.capacity_tokens)
    histories: dict[int, list[_Message]] = {}
    served: list[ServedTurn] = []
    for turn in text.turns:
        history = histories.get(turn.question.conversation, [])
        started, plan = time.perf_counter(), None
        context, salt = "\n\n".join([block.text for block in turn.blocks]), f"demo-{session}"
        if is_planned:
            plan = planner.plan(
                turn.blocks,
                placement=placement,
                tenant=salt,
                model=server.model,
                preamble=instructions,
                history=history if placement == "tail" else None,
            )
            context, salt = plan.render(), plan.cache_salt or ""
        messages = _chat(placement, instructions, history, context, turn.question.text)
        seconds = time.perf_counter() - started
        answer = await server.ask(messages, salt)
        if plan is not None:
            planner.commit(plan)
        histories[turn.question.conversation] = [*messages[1:], _message("assistant", answer.text or "")]
        served.append(ServedTurn(turn, plan, seconds, messages, answer))
        tick()
    return served


def _chat(
    placement: Placement, instructions: str, history: Sequence[_Message], context: str, question: str
) -> list[_Message]:
    """Return the messages of one request: fixed instructions come first, so that prefixes can be shared.

    `head`: the context follows the instructions, before the history, and changes with each turn.
    `tail`: the context comes with its question, and stays in the history.
    """
    if placement == "head":
        return [_message("system", f"{instructions}\n\n{context}"), *history, _message("user", question)]
    return [_message("system", instructions), *history, _message("user", f"{context}\n\nQuestion: {question}")]


def _message(role: str, content: str) -> _Message:
    return {"role": role, "content": content}


# -- servers ---------------------------------------------------------------------------------------------------------


class _Server:
    """One model of one server. Every failure is a `DemoError` of one line."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, is_real: bool) -> None:
        self.model = model
        self.is_real = is_real
        self._base_url = str(client.base_url).rstrip("/")
        self._asker = ChatAsker(client)

    async def ask(self, messages: Sequence[_Message], cache_salt: str | None) -> ChatAnswer:
        """Send one chat and read the whole of a short answer."""
        options = chat_options(self.model, messages, {"max_tokens": _ANSWER_TOKENS, "temperature": 0}, cache_salt)
        with _as_demo_error(self._base_url):
            answer = await self._asker.ask(options)
        if not answer.text and answer.prompt_tokens is None:
            raise DemoError(f"{self._base_url} answers, but not as an OpenAI-compatible server.")
        return answer


@asynccontextmanager
async def _emulated_server() -> AsyncIterator[_Server]:
    with EmulatorServer(EMULATOR) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            yield _Server(client, EMULATOR.model, is_real=False)


@asynccontextmanager
async def _real_server(options: DemoOptions) -> AsyncIterator[_Server]:
    """Enter with a server that has answered once, so that no measured request meets a cold engine."""
    url, key = options.endpoint, options.api_key or "none"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=_TIMEOUT_SECONDS) as client:
        model = options.model
        if model is None:
            with _as_demo_error(url):
                models = (await client.models.list()).data
            if not models:
                raise DemoError(f"{url} lists no model; name one with --model.")
            model = models[0].id
        server = _Server(client, model, is_real=True)
        await server.ask([_message("user", "Hello.")], None)
        yield server


@contextmanager
def _as_demo_error(url: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the SDK lets some errors of its transport and parser through
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(error, openai.APIStatusError):
            hint = " Should the URL end in /v1?" if error.status_code == 404 and "/v1" not in str(url) else ""
            reason = " ".join(error.message.split())
            raise DemoError(f"{url} refused a request ({error.status_code}): {reason}{hint}") from error
        raise DemoError(f"No answer from {url}: {reason}") from error
