"""`ChainOfAgents`: a question and documents in, the manager's answer out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any, get_args

from warmprefix import Choice, ContextPlanner, MissingExtraError
from warmprefix.errors import check_count, check_names
from warmprefix_chain_of_agents.agents import Manager, Speaker, Worker
from warmprefix_chain_of_agents.bridge import iterate
from warmprefix_chain_of_agents.crew import Crew
from warmprefix_chain_of_agents.documents import as_blocks, as_list, candidates_of, check_choice
from warmprefix_chain_of_agents.memory import ChatMemory, InMemoryChats
from warmprefix_chain_of_agents.prompts import Prompts
from warmprefix_chain_of_agents.results import ChainAnswer, ChainProgress
from warmprefix_chain_of_agents.runs import Run, RunEvent
from warmprefix_chain_of_agents.turns import ChainQuestion, ChainSetup, Mode, OnFailure
from warmprefix_openai import Retries
from warmprefix_openai.salt_check import SaltCheck
from warmprefix_requests.neighbours import PinRule
from warmprefix_routing import AgentRouter

try:
    from openai import OpenAI
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

__all__ = ["ChainOfAgents"]

_log = logging.getLogger("warmprefix")


class ChainOfAgents:
    """Agents that read documents too many for one of them, and a manager that answers from their summaries.

    The router gives each document to the agent that has read it before, and balances the load. Documents come first in
    a prompt, so the agent's engine has their prefix in its cache.

    In mode `"chain"` (Zhang et al. 2024, Algorithm 1) the workers read one after the other; each gets the summary of
    the one before, its communication unit, and the manager gets the last. In mode `"map"` (as ContextPilot evaluates
    it) they read at once, and the manager gets all summaries.

    In a conversation every agent has a chat of its own, to which each turn is appended: a document that the chat holds
    becomes a reference. An agent whose chat would get too long begins a new one.

        chain = ChainOfAgents([Worker("a", client_a, "qwen"), Worker("b", client_b, "qwen")], Manager(client_a, "qwen"))
        answer = chain.run("Who wrote it?", documents)
        print(answer.text, answer.usage.cached_tokens)

    One chain serves any number of threads and tasks. It opens nothing, so there is nothing to close: the clients, the
    router and the planner are their owner's.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        manager: Manager,
        *,
        router: AgentRouter | None = None,
        planner: ContextPlanner | None = None,
        mode: Mode = "chain",
        on_failure: OnFailure = "skip",
        together: bool | None = None,
        order_locked: bool = False,
        pinned: PinRule[Any] | None = None,
        choose: Choice | None = None,
        concurrency: int = 16,
        timeout: float | None = 120.0,
        retries: Retries | None = None,
        recovery: float = 30.0,
        prompts: Prompts | None = None,
        memory: ChatMemory | None = None,
        max_chat_tokens: int = 32_768,
        on_progress: Callable[[ChainProgress], object] | None = None,
    ) -> None:
        """Set up the chain. Agents that the router does not have join it.

        Args:
            workers: The agents that read. Names must differ.
            manager: The agent that answers.
            router: Assigns documents to agents; one of its own by default.
            planner: Arranges each prompt's documents; one of its own by default. Documents have labels whatever its
                `annotate` is, because the prompts name them.
            mode: See above.
            on_failure: For a document that no agent could read: `"skip"` it, and report the number of skipped ones to
                the manager, or `"raise"`.
            together: If True, an agent reads all its documents of a question in one prompt; if False, each in a prompt
                of its own, as ContextPilot's agents do, so that each is a warm prefix in any company. By default True
                in mode `"chain"` and in conversations, and False otherwise.
            order_locked: Keep the order of the documents in each prompt: it is a fact, such as time. Without it,
                documents of one prompt that follow each other in the list and in their source stay in order.
            pinned: Documents to keep at an end of their prompt: the metadata key of `"start"` or `"end"`, or a function
                that returns one of them or None.
            choose: Which of the documents are read, if more are given than agents are to read: the first `k`, or others
                that score about as well and that agents have read lately. In a conversation, the first `k`. Scores are
                those of blocks and nodes, or in the metadata of LangChain's documents, as `relevance_score`; without
                usable ones the first `k` are read. `version` and `twins` get the documents as they were given.
            concurrency: Most requests to workers at the same time, of one run.
            timeout: Seconds for one attempt, from sending it to the end of its answer; None leaves it to the clients,
                whose own time-outs, such as for connecting, hold in any case.
            retries: Attempts after a failed one: no connection, no answer in time, statuses 408, 409, 425, 429 and from
                500 on, an answer that broke off or is no text. 2 by default. The clients' own retries are off.
            recovery: Seconds after which an agent that could not be reached gets another chance.
            prompts: The wording.
            memory: Keeps the agents' chats; in this process by default.
            max_chat_tokens: Approximate limit of a conversation's prompt, history included, beyond which the agent's
                chat begins again; documents that an agent reads in one prompt may fill three quarters of it, and
                further ones get a prompt of their own. Must be below the smallest context window of the models, with
                room for the answer.
            on_progress: Called with every step, in the event loop's thread; `run` and `stream` have a thread of their
                own. Its exceptions are logged, the first one as a warning, and ignored.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: There is no worker; two agents have one name; or an argument is out of range.
        """
        if not isinstance(manager, Manager):
            raise TypeError(f"manager must be a Manager, got {type(manager).__name__}")
        for name, value, kind in (
            ("planner", planner, ContextPlanner),
            ("retries", retries, Retries),
            ("prompts", prompts, Prompts),
            ("memory", memory, ChatMemory),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, got {type(value).__name__}")
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress must be callable or None, got {type(on_progress).__name__}")
        for name, choice, choices in (("mode", mode, Mode), ("on_failure", on_failure, OnFailure)):
            if choice not in get_args(choices):
                raise ValueError(f"{name} must be {' or '.join(map(repr, get_args(choices)))}, got {choice!r}")
        check_choice(choose, order_locked=order_locked)
        check_count("concurrency", concurrency)
        check_count("max_chat_tokens", max_chat_tokens)
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be above 0 and finite, or None, got {timeout}")
        if not recovery >= 0:
            raise ValueError(f"recovery must be 0 or more, got {recovery}")
        self._setup = ChainSetup(
            crew=Crew(workers, router, recovery),
            manager=manager,
            planner=ContextPlanner() if planner is None else planner,
            memory=InMemoryChats() if memory is None else memory,
            mode=mode,
            on_failure=on_failure,
            together=together,
            order_locked=order_locked,
            max_chat_tokens=max_chat_tokens,
            concurrency=concurrency,
            timeout=timeout,
            retries=Retries(count=2, longest=30.0) if retries is None else retries,
            prompts=Prompts() if prompts is None else prompts,
            salts=SaltCheck(),
        )
        if manager.name in self._setup.crew.workers:
            raise ValueError(f"name of the manager must differ from the workers' names, got {manager.name!r}")
        self.router = self._setup.crew.router
        """Assigns documents to agents."""
        self.planner = self._setup.planner
        """Arranges each prompt's documents; an agent's name stands for the model."""
        self._pinned = pinned
        self._choose = choose
        self._on_progress = on_progress
        self._progress_failed = False

    def run(
        self, question: str, documents: Iterable[Any], *, conversation: str | None = None, tenant: str | None = None
    ) -> ChainAnswer:
        """Answer a question from documents.

        It runs in a thread of its own, so it may be called while an event loop runs; that loop waits, though.

        Args:
            question: The user's question, not blank.
            documents: In relevance order, one or more: blocks, texts, or documents of LangChain's and LlamaIndex's
                retrievers. Blank ones are left out.
            conversation: Name of a conversation, in which every agent has a chat; by default the question is single.
            tenant: The tenant of the question. Nothing is shared between tenants, prefix caches included.

        Raises:
            ManagerError: The manager did not answer.
            TypeError: An argument has another type than the above, or an agent's client can only be awaited.
            ValueError: `question` is blank, `conversation` is empty, or `documents` has no text. No agent is asked.
            WorkersFailedError: No document could be read; with `on_failure="raise"`, not every one could.
        """
        with closing(self._iterated(question, documents, conversation, tenant, streaming=False)) as events:
            *_, answer = events
        assert isinstance(answer, ChainAnswer)
        return answer

    async def arun(
        self, question: str, documents: Iterable[Any], *, conversation: str | None = None, tenant: str | None = None
    ) -> ChainAnswer:
        """Answer a question in a task; see `run`. Blocking clients run in threads.

        Cancellation ends all requests and withdraws those without an answer. The thread of a blocking client ends with
        the next piece of its answer or its time-out.
        """
        asked = self._question(question, documents, conversation, tenant)
        async with aclosing(self._events(asked, streaming=False)) as events:
            *_, answer = [event async for event in events]
        assert isinstance(answer, ChainAnswer)
        return answer

    def stream(
        self, question: str, documents: Iterable[Any], *, conversation: str | None = None, tenant: str | None = None
    ) -> Generator[ChainProgress | str | ChainAnswer, None, None]:
        """Yield the steps of a `run`, then the manager's text in pieces as it comes, and last the `ChainAnswer`.

        Closing it early cancels the run, as for `arun`. Once a piece of the text has come, a failing manager is not
        asked again. Arguments are checked at once.
        """
        return self._iterated(question, documents, conversation, tenant, streaming=True)

    def astream(
        self, question: str, documents: Iterable[Any], *, conversation: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[ChainProgress | str | ChainAnswer, None]:
        """Do the same as `stream`, in a task. Leave it early within `contextlib.aclosing`."""
        return self._events(self._question(question, documents, conversation, tenant), streaming=True)

    def forget(self, conversation: str, *, tenant: str | None = None) -> None:
        """Drop a conversation's chats with all agents."""
        self._setup.memory.forget(tenant, conversation)
        self.router.end(conversation, tenant)

    def _iterated(
        self, question: str, documents: Iterable[Any], conversation: str | None, tenant: str | None, *, streaming: bool
    ) -> Generator[ChainProgress | str | ChainAnswer, None, None]:
        speakers: list[Speaker] = [*self._setup.crew.workers.values(), self._setup.manager]
        if awaited := [speaker.name for speaker in speakers if not isinstance(speaker.client, OpenAI)]:
            raise TypeError(
                f"clients of {', '.join(awaited)} must be an openai.OpenAI for run and stream; use arun or astream"
            )
        asked = self._question(question, documents, conversation, tenant)
        return iterate(lambda: self._events(asked, streaming=streaming))

    async def _events(
        self, question: ChainQuestion, *, streaming: bool
    ) -> AsyncGenerator[ChainProgress | str | ChainAnswer, None]:
        news: asyncio.Queue[RunEvent | None] = asyncio.Queue()
        threads = ThreadPoolExecutor(self._setup.concurrency + 1, thread_name_prefix="warmprefix-agent")
        running = asyncio.ensure_future(Run(self._setup, question, threads, news.put_nowait, streaming=streaming)())
        running.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (event := await news.get()) is not None:
                if isinstance(event, ChainProgress):
                    self._report(event)
                yield event
            yield running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            threads.shutdown(wait=False, cancel_futures=True)

    def _question(
        self, question: str, documents: Iterable[Any], conversation: str | None, tenant: str | None
    ) -> ChainQuestion:
        """Check the arguments of a run before it starts."""
        if not isinstance(question, str):
            raise TypeError(f"question must be a str, got {type(question).__name__}")
        if not question.strip():
            raise ValueError(f"question must not be blank, got {question!r}")
        check_names(conversation=conversation, tenant=tenant)
        if conversation == "":
            raise ValueError("conversation must not be empty, got ''")
        listed = as_list(documents)
        blocks = as_blocks(listed, self._pinned)
        choose, blocks = candidates_of(self._choose, listed, blocks)
        read = [block for block in blocks if block.text.strip()]
        if not read:
            given = f"{len(blocks)} blank" if blocks else "none"
            raise ValueError(f"documents must be one or more that are not blank, got {given}")
        return ChainQuestion(question, read, conversation, tenant, choose)

    def _report(self, progress: ChainProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            level = logging.DEBUG if self._progress_failed else logging.WARNING
            self._progress_failed = True
            _log.log(level, "on_progress of a chain of agents failed", exc_info=True)
