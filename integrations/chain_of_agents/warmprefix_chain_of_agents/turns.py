"""One agent's turn: arrange its documents, ask it, and remember the turn only if it answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.plan import Placement
from warmprefix_chain_of_agents.agents import Speaker
from warmprefix_chain_of_agents.memory import Chat, ChatKey, ChatMemory, ChatMessage
from warmprefix_openai import AnswerError, ChatAnswer, ChatAsker, Retries, ask_with_retries, chat_options, may_pass

__all__ = ["AgentTurn", "Asking", "Turns"]


class NoTextError(AnswerError):
    """An answer was complete and is no text: a tool call, a refusal, or nothing."""


class Asking(NamedTuple):
    """How the agents of one run are asked."""

    threads: Executor
    """Where blocking clients run."""
    timeout: float | None
    """Seconds for a whole attempt; None leaves it to the client, which bounds each silence in any case."""
    retries: Retries
    on_retry: Callable[[str, Exception], None]
    """Called with the agent's name and each failure that another attempt follows."""

    async def ask(
        self,
        speaker: Speaker,
        messages: Sequence[ChatMessage],
        cache_salt: str | None,
        on_text: Callable[[str], None] | None,
    ) -> tuple[ChatAnswer, int]:
        """Return the answer, which has a text, and the number of attempts.

        `on_text` gets the text as it comes. It cannot be taken back, so after its first call no attempt follows.

        Raises:
            CallFailedError: There is no answer.
        """
        asker = ChatAsker(speaker.client, timeout=self.timeout, threads=self.threads)
        options = chat_options(speaker.model, messages, speaker.options, cache_salt)
        has_text = False

        def report(text: str) -> None:
            nonlocal has_text
            if on_text is not None:
                has_text = True
                on_text(text)

        async def attempt() -> ChatAnswer:
            answer = await asker.ask(options, on_text=report)
            _check_text(answer)
            return answer

        return await ask_with_retries(
            attempt,
            self.retries,
            may_retry=lambda error: not has_text and may_pass(error),
            on_retry=lambda error: self.on_retry(speaker.name, error),
        )


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


class Turns:
    """Takes turns for the agents of one chain, in any number of conversations at once.

    An agent's documents are planned in a scope of its own: its name stands for the model. In a conversation they are
    appended to the agent's chat. The planner sees that chat, so it refers only to documents that the chat has in full:
    a reference can't leave the prompt that it is in.
    """

    def __init__(
        self, planner: ContextPlanner, memory: ChatMemory, max_chat_tokens: int, *, order_locked: bool = False
    ) -> None:
        self._planner = planner
        self._order_locked = order_locked
        self._memory = memory
        self._max_chat_tokens = max_chat_tokens

    async def take(
        self,
        speaker: Speaker,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        asking: Asking,
        *,
        conversation: str | None,
        tenant: str | None,
        on_text: Callable[[str], None] | None = None,
    ) -> AgentTurn:
        """Plan, ask, and commit; abandon if there was no answer, for whatever reason.

        Of two turns of one chat at once, each is asked after the chat as it was, and the one that ends first is
        remembered. `user_message` makes the message around the arranged documents.

        Raises:
            CallFailedError: There was no answer.
        """
        key = None if conversation is None else ChatKey(tenant, conversation, speaker.name)
        kept = None if key is None else self._memory.load(key)
        plan, chat, message = await self._prompt(speaker.name, role, blocks, user_message, tenant, kept)
        try:
            messages = [_system(role), *chat.messages, {"role": "user", "content": message}]
            salt = plan.cache_salt if speaker.cache_salt else None
            answer, attempts = await asking.ask(speaker, messages, salt, on_text)
        except BaseException:
            self._planner.abandon(plan)
            raise
        text = answer.text or ""
        report = EngineReport(answer.cached_tokens, answer.prompt_tokens, answer.ttft)
        self._planner.commit(plan, report=report)
        if key is not None and kept is not None:
            self._memory.save(key, chat.extended(message, text), instead_of=kept)
        return AgentTurn(answer, text, attempts, plan, report)

    async def _prompt(
        self,
        agent: str,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        tenant: str | None,
        chat: Chat | None,
    ) -> tuple[ContextPlan, Chat, str]:
        """Return the plan, the chat in front of it, and the user's message. A chat that gets too long begins again."""
        history = None if chat is None else [_system(role), *chat.messages]
        placement: Placement = "head" if chat is None else "tail"
        # The prompts describe the documents as labelled, and name the labels.
        plan = await self._planner.aplan(
            blocks,
            placement=placement,
            history=history,
            tenant=tenant,
            model=agent,
            preamble=role,
            order_locked=self._order_locked,
            annotate="both",
        )
        try:
            text = user_message(plan.render())
            earlier = Chat() if chat is None else chat
            if not earlier.messages or earlier.tokens + ContextBlock(text).tokens <= self._max_chat_tokens:
                return plan, earlier, text
        except BaseException:
            self._planner.abandon(plan)
            raise
        self._planner.abandon(plan)
        return await self._prompt(agent, role, blocks, user_message, tenant, Chat())


def _system(role: str) -> ChatMessage:
    return {"role": "system", "content": role}
