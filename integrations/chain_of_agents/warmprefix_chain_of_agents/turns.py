"""One agent's turn: arrange its documents, ask it, and remember the turn only if it answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from openai import APIStatusError, AsyncOpenAI, BadRequestError

from warmprefix import Choice, ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.plan import Placement
from warmprefix_chain_of_agents.agents import Manager, Speaker
from warmprefix_chain_of_agents.crew import Crew
from warmprefix_chain_of_agents.memory import Chat, ChatKey, ChatMemory, ChatMessage
from warmprefix_chain_of_agents.prompts import Prompts
from warmprefix_openai import AnswerError, ChatAnswer, ChatAsker, Retries, ask_with_retries, chat_options, may_pass
from warmprefix_openai.salt_check import SaltCheck

__all__ = ["AgentTurn", "ChainQuestion", "ChainSetup", "Mode", "OnFailure", "Turns"]

Mode = Literal["chain", "map"]
OnFailure = Literal["skip", "raise"]

_QUESTION_SECONDS = 5.0
"""Longest time of a question about an engine's salts."""


@dataclass(frozen=True, slots=True)
class ChainSetup:
    """Parts and options of a chain, the same for all of its runs; `ChainOfAgents` documents them."""

    crew: Crew
    manager: Manager
    planner: ContextPlanner
    memory: ChatMemory
    mode: Mode
    on_failure: OnFailure
    together: bool | None
    order_locked: bool
    max_chat_tokens: int
    concurrency: int
    timeout: float | None
    retries: Retries
    prompts: Prompts
    salts: SaltCheck


class ChainQuestion(NamedTuple):
    """The arguments of one run."""

    text: str
    documents: Sequence[ContextBlock]
    """In relevance order; at least one, none of them blank. With `choose`, the candidates."""
    conversation: str | None
    tenant: str | None
    choose: Choice | None
    """Which of the documents are read; None for all."""


class NoTextError(AnswerError):
    """An answer was complete and is no text: a tool call, a refusal, or nothing."""


def _check_text(answer: ChatAnswer) -> None:
    message = answer.message
    if refusal := message.get("refusal"):
        raise NoTextError(f"the answer is no text but a refusal: {refusal}")
    if message.get("tool_calls") or message.get("function_call"):
        raise NoTextError("the answer is no text but a tool call")
    if not (answer.text or "").strip():
        raise NoTextError(f"the answer holds no text; it ended for the reason {answer.finish_reason!r}")


class AgentTurn(NamedTuple):
    """A turn that has an answer."""

    answer: ChatAnswer
    text: str
    attempts: int
    plan: ContextPlan
    report: EngineReport


@dataclass(frozen=True, slots=True)
class Turns:
    """Takes the turns of the agents in one run.

    An agent's documents are planned in a scope of its own: its name stands for the model. In a conversation they are
    appended to the agent's chat. The planner sees that chat, so it refers only to documents that the chat has in full:
    a reference can't leave the prompt that it is in.
    """

    setup: ChainSetup
    question: ChainQuestion
    threads: Executor
    """Where blocking clients run."""
    on_retry: Callable[[str, Exception], None]
    """Called with the agent's name and each failure that another attempt follows."""

    async def take(
        self,
        speaker: Speaker,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        on_text: Callable[[str], None] | None = None,
    ) -> AgentTurn:
        """Plan, ask, and commit; abandon if there was no answer, for whatever reason.

        Of two turns of one chat at once, each is asked after the chat as it was, and the one that ends first is
        remembered. `user_message` makes the message around the arranged documents. `on_text` gets the text as it comes.

        Raises:
            CallFailedError: There was no answer.
        """
        planner, memory, conversation = self.setup.planner, self.setup.memory, self.question.conversation
        key = None if conversation is None else ChatKey(self.question.tenant, conversation, speaker.name)
        kept = None if key is None else memory.load(key)
        plan, chat, message = await self._prompt(speaker.name, role, blocks, user_message, kept)
        try:
            messages = [_system(role), *chat.messages, {"role": "user", "content": message}]
            salt = plan.cache_salt if speaker.cache_salt else None
            answer, attempts = await self._ask(speaker, messages, salt, on_text)
        except BaseException:
            planner.abandon(plan)
            raise
        text = answer.text or ""
        report = EngineReport(answer.cached_tokens, answer.prompt_tokens, answer.ttft)
        planner.commit(plan, report=report)
        if key is not None and kept is not None:
            memory.save(key, chat.extended(message, text), instead_of=kept)
        return AgentTurn(answer, text, attempts, plan, report)

    async def _ask(
        self,
        speaker: Speaker,
        messages: Sequence[ChatMessage],
        cache_salt: str | None,
        on_text: Callable[[str], None] | None,
    ) -> tuple[ChatAnswer, int]:
        """Return the answer, which has a text, and the number of attempts.

        A text that `on_text` got cannot be taken back, so after its first call no attempt follows.
        """
        asker = ChatAsker(speaker.client, timeout=self.setup.timeout, threads=self.threads)
        options = chat_options(speaker.model, messages, speaker.options, cache_salt)
        has_text = False

        def report(text: str) -> None:
            nonlocal has_text
            if on_text is not None:
                has_text = True
                on_text(text)

        async def attempt() -> ChatAnswer:
            if cache_salt is not None:
                await self._check_salt(speaker)
            answer = await asker.ask(options, on_text=report)
            _check_text(answer)
            return answer

        return await ask_with_retries(
            attempt,
            self.setup.retries,
            may_retry=lambda error: not has_text and may_pass(error),
            on_retry=lambda error: self.on_retry(speaker.name, error),
        )

    async def _check_salt(self, speaker: Speaker) -> None:
        """Find out whether the engine separates tenants by their salts, once a minute.

        Raises:
            BadRequestError: It ignores the salt on this route.
        """
        client: Any = speaker.client
        library = import_module(type(client.base_url).__module__.partition(".")[0])  # httpx, or what replaces it
        request = library.Request("POST", f"{client.base_url}chat/completions")
        headers = speaker.options.get("extra_headers") or {}
        answers, failure = list[bytes](), None
        try:
            for question in self.setup.salts.questions(request):
                options = {"headers": headers, "max_retries": 0, "timeout": _QUESTION_SECONDS}
                ask = partial(client.get, str(question.url), cast_to=library.Response, options=options)
                try:
                    response = await (ask() if isinstance(client, AsyncOpenAI) else self._in_thread(ask))
                except APIStatusError as error:
                    response = error.response
                answers.append(self.setup.salts.content(response))
        except Exception as error:
            answers, failure = [], error
        refused = self.setup.salts.decide(request, "chat", answers, failure)
        if refused is not None:
            body = json.loads(refused)["error"]
            raise BadRequestError(body["message"], response=library.Response(400, request=request), body=body)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    async def _prompt(
        self,
        agent: str,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        chat: Chat | None,
    ) -> tuple[ContextPlan, Chat, str]:
        """Return the plan, the chat in front of it, and the user's message. A chat that gets too long begins again."""
        placement: Placement = "head" if chat is None else "tail"
        # The prompts describe the documents as labelled, and name the labels.
        plan = await self.setup.planner.aplan(
            blocks,
            placement=placement,
            history=None if chat is None else [_system(role), *chat.messages],
            tenant=self.question.tenant,
            model=agent,
            preamble=role,
            order_locked=self.setup.order_locked,
            annotate="both",
        )
        earlier = Chat() if chat is None else chat
        try:
            text = user_message(plan.render())
            if not earlier.messages or earlier.tokens + ContextBlock(text).tokens <= self.setup.max_chat_tokens:
                return plan, earlier, text
        except BaseException:
            self.setup.planner.abandon(plan)
            raise
        self.setup.planner.abandon(plan)
        return await self._prompt(agent, role, blocks, user_message, Chat())


def _system(role: str) -> ChatMessage:
    return {"role": "system", "content": role}
