"""Chats of an application of its own, with the planner alone: known by a branch, or by a name."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix.errors import StoreError

Messages = list[dict[str, str]]


class PlannerApplication(Application):
    """A chat whose messages the application keeps, each answer with an id; a subclass names the conversation."""

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._url = f"{engine.base_url}/chat/completions"
        self._client = httpx.Client(timeout=60)
        self._async_client = httpx.AsyncClient(timeout=60)

    def turn(
        self,
        state: Any,
        question: str,
        passages: Sequence[ContextBlock],
        *,
        conversation: str,
        tenant: str | None,
        how: How,
    ) -> Any:
        history: Messages = state["messages"] if state else [{"role": "system", "content": INSTRUCTIONS}]
        after = state["id"] if state else None
        if self.planner is None:
            messages = _with(history, "\n\n".join(passage.text for passage in passages), question)
            return _kept(messages, self._answer(messages, how), None)
        options: dict[str, Any] = {"placement": "tail", "tenant": tenant, **self.named(conversation, after)}
        if self.arm == "shown":
            options["history"] = history
        if how == "cancel":
            return self.cancelled(self._aturn(history, question, passages, options))
        planning = self.planner.planning(passages, **options)
        try:
            with planning as plan:
                messages = _with(history, plan.render(), question)
                answer = self._answer(messages, how)
                planning.turn_id = uuid.uuid4().hex
        except _ClosedError:  # and the plan is abandoned
            return None
        return _kept(messages, answer, planning.turn_id)

    def named(self, conversation: str, after: str | None) -> dict[str, Any]:
        """Return how the planner knows the conversation."""
        raise NotImplementedError

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns. No recorded turn has the history that remains."""
        messages = state["messages"]
        if len(messages) < 3 or not self.may_cut(conversation, tenant):
            return None
        place = 1 + 2 * rng.randrange(len(messages) // 2)
        kept = messages[:place] if rng.random() < 0.5 else [messages[0], *messages[place:]]
        return {"messages": kept, "id": f"cut-{uuid.uuid4().hex}"}

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        """Return True if the history may be cut now."""
        return True

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.aclose())
        super().close()

    async def _aturn(
        self, history: Messages, question: str, passages: Sequence[ContextBlock], options: dict[str, Any]
    ) -> Any:
        assert self.planner is not None
        planning = self.planner.planning(passages, **options)
        async with planning as plan:
            messages = _with(history, plan.render(), question)
            answer = _text(await self._async_client.post(self._url, json=self._body(messages)))
            planning.turn_id = uuid.uuid4().hex
        return _kept(messages, answer, planning.turn_id)

    def _answer(self, messages: Messages, how: How) -> str:
        body = self._body(messages)
        if how in ("plain", "cancel"):
            return _text(self._client.post(self._url, json=body))
        answer = ""
        with self._client.stream("POST", self._url, json={**body, "stream": True}) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    answer += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if how == "close" and answer:
                    raise _ClosedError
        return answer

    def _body(self, messages: Messages) -> dict[str, Any]:
        return {"model": self.engine.model, "messages": messages}


class BranchApplication(PlannerApplication):
    """It names the turn that each prompt continues."""

    def named(self, conversation: str, after: str | None) -> dict[str, Any]:
        return {"conversation": Branch(after=after)}


class NameApplication(PlannerApplication):
    """It names the conversation, which has one history."""

    forks = False

    def named(self, conversation: str, after: str | None) -> dict[str, Any]:
        return {"conversation": conversation}

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        assert self.planner is not None
        try:
            self.planner.forget(conversation, tenant=tenant)
        except StoreError:
            return False
        return True


class _ClosedError(Exception):
    """The user has closed the stream."""


def _with(history: Messages, context: str, question: str) -> Messages:
    return [*history, {"role": "user", "content": f"{context}\n\n{question}"}]


def _kept(messages: Messages, answer: str, id: str | None) -> dict[str, Any]:
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "id": id}


def _text(answer: httpx.Response) -> str:
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])
