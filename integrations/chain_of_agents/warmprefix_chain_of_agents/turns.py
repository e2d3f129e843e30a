"""One agent's turn: arrange its documents, ask it, and remember what it saw; or nothing, if it did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix_chain_of_agents.agents import Speaker
from warmprefix_chain_of_agents.calls import Call, Reply
from warmprefix_chain_of_agents.memory import Chat, ChatKey, ChatMemory, Message

__all__ = ["Turn", "Turns"]


class Turn(NamedTuple):
    """A turn that was taken."""

    reply: Reply
    plan: ContextPlan
    report: EngineReport
    """What the engine told of the reply."""


class _Prompt(NamedTuple):
    plan: ContextPlan
    chat: Chat
    """What stands in front of it."""
    text: str
    """The user's message."""


class Turns:
    """Takes turns for the agents of one chain, in any number of conversations at once.

    An agent's documents are planned in a scope of its own: its name stands for the model. In a conversation they are
    appended to the agent's chat, which the planner is shown, so that what the chat has in full is referred to, and
    nothing else is: a reference can't leave the prompt that it stands in.
    """

    def __init__(self, planner: ContextPlanner, memory: ChatMemory, max_chat_tokens: int) -> None:
        self._planner = planner
        self._memory = memory
        self._max_chat_tokens = max_chat_tokens

    async def take(
        self,
        speaker: Speaker,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        call: Call,
        *,
        conversation: str | None,
        tenant: str | None,
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """Plan, ask, and commit; abandon if there was no answer, for whatever reason.

        Of two turns of one chat at once, each is asked behind the chat as it was, and the one that ends first is
        remembered.

        Args:
            speaker: Whom to ask.
            role: Its system prompt.
            blocks: In relevance order.
            user_message: Makes the message around the arranged documents.
            call: Asks.
            conversation: Whose chat goes on; None for a single question.
            tenant: Whose request.
            on_text: As `Call` takes it.

        Raises:
            CallFailedError: There was no answer.
        """
        key = None if conversation is None else ChatKey(tenant, conversation, speaker.name)
        kept = None if key is None else self._memory.load(key)
        prompt = self._prompt(speaker, role, blocks, user_message, kept, tenant)
        try:
            messages = [_system(role), *prompt.chat.messages, {"role": "user", "content": prompt.text}]
            salt = prompt.plan.cache_salt if speaker.cache_salt else None
            reply = await call(speaker, messages, salt, on_text)
        except BaseException:
            self._planner.abandon(prompt.plan)
            raise
        report = EngineReport(reply.usage.cached_tokens, reply.usage.prompt_tokens, reply.ttft)
        self._planner.commit(prompt.plan, report=report)
        if key is not None and kept is not None:
            self._memory.save(key, prompt.chat.extended(prompt.text, reply.text), instead_of=kept)
        return Turn(reply, prompt.plan, report)

    def _prompt(
        self,
        speaker: Speaker,
        role: str,
        blocks: Sequence[ContextBlock],
        user_message: Callable[[str], str],
        chat: Chat | None,
        tenant: str | None,
    ) -> _Prompt:
        """The next prompt of this chat, or of a new one where it would get too long; or one outside any chat."""
        plan = self._planner.plan(
            blocks,
            placement="head" if chat is None else "tail",
            history=None if chat is None else [_system(role), *chat.messages],
            tenant=tenant,
            model=speaker.name,
            preamble=role,
        )
        try:
            text = user_message(plan.render())
            if chat is None:
                return _Prompt(plan, Chat(), text)
            if not chat.messages or chat.tokens + ContextBlock(text).tokens <= self._max_chat_tokens:
                return _Prompt(plan, chat, text)
        except BaseException:
            self._planner.abandon(plan)
            raise
        self._planner.abandon(plan)
        return self._prompt(speaker, role, blocks, user_message, Chat(), tenant)


def _system(role: str) -> Message:
    return {"role": "system", "content": role}
