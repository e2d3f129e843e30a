"""Chats through OpenAI's SDK whose history the server keeps: the application has the id of the newest response."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink

Items = list[dict[str, str]]

_CUT = "cut-"
"""Begins the ids of histories that no response ends."""


class ResponsesApplication(Application):
    """It continues responses by their ids; where the history is to be shown, it sends it all."""

    needs = ("openai",)

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._link = None if planner is None else EngineLink(planner)
        options: dict[str, Any] = {"base_url": engine.base_url, "api_key": "none", "max_retries": 0}
        http = [] if self._link is None else [self._link.http_client(), self._link.async_http_client()]
        self._client = openai.OpenAI(**options, http_client=http[0] if http else None)
        self._async_client = openai.AsyncOpenAI(**options, http_client=http[1] if http else None)

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
        items, after = (state["items"], state["id"]) if state else ([], None)
        if self.planner is None or self._link is None:
            call = self._call(items, after, "\n\n".join(passage.text for passage in passages), question)
            if how == "cancel":
                return self.cancelled(self._acreate(call, items))
            return self._create(call, items, how)
        options: dict[str, Any] = {"placement": "tail", "tenant": tenant, "conversation": Branch(after=after)}
        if self.arm == "shown":
            options["history"] = items
        plan = self.planner.plan(passages, **options)
        call = self._call(items, after, plan.render(), question)
        if how == "cancel":
            return self.cancelled(self._asend(plan, call, items))
        with self._link.sending(plan):
            return self._create(call, items, how)

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns: the next request begins a chain with those that remain.

        No recorded turn has that history, and the server has no response of it yet.
        """
        items = state["items"]
        if len(items) < 2:
            return None
        place = 2 * rng.randrange(len(items) // 2)
        return {"items": items[:place] if rng.random() < 0.5 else items[place:], "id": f"{_CUT}{uuid.uuid4().hex}"}

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.close())
        if self._link is not None:
            self._link.close()
        super().close()

    def _call(self, items: Items, after: str | None, context: str, question: str) -> dict[str, Any]:
        new = {"role": "user", "content": f"{context}\n\n{question}"}
        call = {"model": self.engine.model, "instructions": INSTRUCTIONS}
        if self.arm == "shown":
            return {**call, "input": [*items, new], "store": False}
        if after is None or after.startswith(_CUT):
            return {**call, "input": [*items, new]}
        return {**call, "input": [new], "previous_response_id": after}

    def _create(self, call: dict[str, Any], items: Items, how: How) -> Any:
        if how == "plain":
            return _kept(call, items, self._client.responses.create(**call))
        with self._client.responses.create(**call, stream=True) as events:
            for event in events:
                if event.type == "response.output_text.delta" and how == "close":
                    return None
                if event.type == "response.completed":
                    return _kept(call, items, event.response)
        return None

    async def _acreate(self, call: dict[str, Any], items: Items) -> Any:
        return _kept(call, items, await self._async_client.responses.create(**call))

    async def _asend(self, plan: Any, call: dict[str, Any], items: Items) -> Any:
        assert self._link is not None
        async with self._link.sending(plan):
            return await self._acreate(call, items)


def _kept(call: dict[str, Any], items: Items, response: Any) -> Any:
    answer = {"role": "assistant", "content": response.output_text}
    return {"items": [*items, call["input"][-1], answer], "id": response.id}
