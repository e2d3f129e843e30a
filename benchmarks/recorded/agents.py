"""A graph whose agents each keep a chat: `GraphFanOut`, with the last turn of each agent's chat.

One turn makes a prompt per agent, each with the agent's share of the passages.
"""

from __future__ import annotations

import operator
import random
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from openai import AsyncOpenAI, OpenAI
from typing_extensions import TypedDict

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix_chain_of_agents.langgraph import AgentDocuments, GraphFanOut
from warmprefix_routing import AgentRouter

AGENTS = ("ann", "ben")
Chat = Mapping[str, Any]
"""The messages of an agent, and the id of its last turn."""


class State(TypedDict):
    """The state of a graph, in one turn."""

    question: str
    documents: list[Any]
    chats: Mapping[str, Chat]
    how: How
    answered: Annotated[dict[str, Chat], operator.or_]


class Task(AgentDocuments):
    """The input of an agent's node."""

    question: str
    chats: Mapping[str, Chat]
    how: How


class AgentsApplication(Application):
    """Agents on one engine; the application keeps their messages, each answer with an id."""

    needs = ("langgraph", "openai")
    shares = True

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._client = OpenAI(base_url=engine.base_url, api_key="none", max_retries=0)
        self._async_client = AsyncOpenAI(base_url=engine.base_url, api_key="none", max_retries=0)
        self._router = AgentRouter(AGENTS) if planner is None else AgentRouter.from_url(engine.redis_url, AGENTS)
        self._fan_out = GraphFanOut(
            self._router, "read", placement="tail", carry=["question", "chats", "how"], planner=planner
        )
        builder: Any = StateGraph(State)
        builder.add_node("read", RunnableLambda(self._read, self._aread))
        builder.add_conditional_edges(START, _shared_out if planner is None else self._fan_out, ["read"])
        builder.add_edge("read", END)
        self._graph = builder.compile()

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
        chats = state or {}
        asked = {"question": question, "documents": list(passages), "chats": chats, "how": how, "answered": {}}
        config: Any = {"configurable": {"thread_id": conversation, "tenant": tenant}}
        if how == "cancel":
            answered = self.cancelled(self._graph.ainvoke(asked, config))
        else:
            answered = self._graph.invoke(asked, config)
        return None if answered is None else {**chats, **answered["answered"]}

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns of an agent; no turn stands for the history that remains."""
        agent = rng.choice(sorted(state))
        messages = state[agent]["messages"]
        if len(messages) < 3:
            return None
        place = 1 + 2 * rng.randrange(len(messages) // 2)
        kept = messages[:place] if rng.random() < 0.5 else [messages[0], *messages[place:]]
        return {**state, agent: {"messages": kept, "id": f"cut-{uuid.uuid4().hex}"}}

    def close(self) -> None:
        self._router.close()
        self._client.close()
        self.run(self._async_client.close())
        super().close()

    def _read(self, task: Task) -> dict[str, Any]:
        chat = _chat(task)
        if self.planner is None:
            messages = _asked(chat, "\n\n".join(block.text for block in task["documents"]), task["question"])
            return _answered(task, messages, self._answer(messages, task["how"]), None)
        with self._fan_out.planning(task, **self._known(chat)) as plan:
            messages = _asked(chat, plan.render(), task["question"])
            answer, turn = self._answer(messages, task["how"]), uuid.uuid4().hex
            self.planner.commit(plan, turn_id=turn)
        return _answered(task, messages, answer, turn)

    async def _aread(self, task: Task) -> dict[str, Any]:
        if self.planner is None:
            return self._read(task)
        chat = _chat(task)
        async with self._fan_out.aplanning(task, **self._known(chat)) as plan:
            messages: Any = _asked(chat, plan.render(), task["question"])
            made: Any = await self._async_client.chat.completions.create(model=self.engine.model, messages=messages)
            turn = uuid.uuid4().hex
            await self.planner.acommit(plan, turn_id=turn)
        return _answered(task, messages, str(made.choices[0].message.content), turn)

    def _known(self, chat: Chat) -> dict[str, Any]:
        return {"history": chat["messages"]} if self.arm == "shown" else {"conversation": Branch(after=chat["id"])}

    def _answer(self, messages: Any, how: How) -> str:
        options: dict[str, Any] = {"model": self.engine.model, "messages": messages}
        if how != "stream":
            return str(self._client.chat.completions.create(**options).choices[0].message.content)
        pieces = self._client.chat.completions.create(**options, stream=True)
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def _shared_out(state: State) -> list[Send]:
    """Give each agent every other passage."""
    shares = {agent: state["documents"][i :: len(AGENTS)] for i, agent in enumerate(AGENTS)}
    return [Send("read", {**state, "agent": agent, "documents": share}) for agent, share in shares.items() if share]


def _chat(task: Task) -> Chat:
    return task["chats"].get(task["agent"], {"messages": [{"role": "system", "content": INSTRUCTIONS}], "id": None})


def _asked(chat: Chat, context: str, question: str) -> list[dict[str, str]]:
    return [*chat["messages"], {"role": "user", "content": f"{context}\n\n{question}"}]


def _answered(task: Task, messages: list[dict[str, str]], answer: str, turn: str | None) -> dict[str, Any]:
    kept = {"messages": [*messages, {"role": "assistant", "content": answer}], "id": turn}
    return {"answered": {task["agent"]: kept}}
