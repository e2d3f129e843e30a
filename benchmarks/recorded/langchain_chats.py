"""Chats of LangChain: chains whose history the application or a server keeps, and LangGraph graphs."""

from __future__ import annotations

import random
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypedDict

import aiosqlite
import httpx
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import PrivateAttr, SecretStr

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix.errors import StoreError
from warmprefix_langchain import ContextReuseRetriever, thread_conversation


class GivenPassages(BaseRetriever):
    """Retriever that finds what it is given."""

    _documents: list[Document] = PrivateAttr(default_factory=list)

    def give(self, passages: Sequence[ContextBlock]) -> None:
        self._documents = [Document(passage.text, id=passage.id) for passage in passages]

    def _get_relevant_documents(self, query: str, *, run_manager: object) -> list[Document]:
        return self._documents


class LangChainApplication(Application):
    """An application with a retriever and a chat model; a subclass says how the retriever knows the conversation."""

    needs = ("langchain_openai", "langgraph", "langgraph.checkpoint.sqlite")

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self.given = GivenPassages()
        self.retriever: Runnable[str, list[Document]] = self.given
        if planner is not None:
            self.retriever = ContextReuseRetriever(
                retriever=self.given,
                planner=planner,
                placement="tail",
                annotate="auto",
                shown_in="content",
                conversation=self.rule if arm == "record" else None,
            )
        self._client, self._async_client = httpx.Client(timeout=60), httpx.AsyncClient(timeout=60)
        self.model = ChatOpenAI(
            base_url=engine.base_url,
            api_key=SecretStr("none"),
            model=engine.model,
            max_retries=0,
            stream_usage=True,
            http_client=self._client,
            http_async_client=self._async_client,
            **self.model_options(),
        )

    @property
    def rule(self) -> Any:
        """How the retriever knows the conversation."""
        raise NotImplementedError

    def model_options(self) -> Mapping[str, Any]:
        """Return further arguments of the model."""
        return {}

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.aclose())
        super().close()


class BranchChain(LangChainApplication):
    """A chain whose application keeps the messages; it names the answer that each prompt continues."""

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        prompt = ChatPromptTemplate.from_messages(
            [MessagesPlaceholder("history"), ("human", "{context}\n\n{question}")]
        )
        self.chain = (
            RunnablePassthrough.assign(context=RunnableLambda(self._found, self._afound))
            | RunnablePassthrough.assign(sent=prompt)
            | RunnablePassthrough.assign(answer=RunnableLambda(self.asked))
        )

    @property
    def rule(self) -> Any:
        return lambda config: Branch(config["configurable"]["after"])

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
        state = {"messages": [{"role": "system", "content": INSTRUCTIONS}], "after": None} if state is None else state
        self.given.give(passages)
        given = {"question": question, "history": state["messages"], "after": state["after"]}
        config: RunnableConfig = {"configurable": {"thread_id": conversation, "after": state["after"]}}
        if tenant is not None:
            config["configurable"]["tenant"] = tenant
        if how == "cancel":
            answered = self.cancelled(self.chain.ainvoke(given, config))
            return None if answered is None else self.kept(answered, answered["answer"])
        if how == "plain":
            answered = self.chain.invoke(given, config)
            return self.kept(answered, answered["answer"])
        answered = {}
        parts = self.chain.stream(given, config)
        for part in parts:
            for key, value in part.items():
                answered[key] = answered[key] + value if key in answered else value
            if how == "close" and "answer" in part:
                parts.close()  # type: ignore[attr-defined]
                return None
        return self.kept(answered, answered["answer"])

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns. No recorded turn has the history that remains."""
        messages = state["messages"]
        if len(messages) < 3 or not self.may_cut(conversation, tenant):
            return None
        place = 1 + 2 * rng.randrange(len(messages) // 2)
        kept = messages[:place] if rng.random() < 0.5 else [messages[0], *messages[place:]]
        return {"messages": kept, "after": f"cut-{uuid.uuid4().hex}"}

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        """Return True if the history may be cut now."""
        return True

    def asked(self, given: dict[str, Any]) -> Runnable[Any, Any]:
        """Return what asks the model, for the input of the last step."""
        return itemgetter("sent") | self.model

    def kept(self, sent: dict[str, Any], answer: AIMessage) -> Any:
        """Return the next state."""
        asked = {"role": "user", "content": sent["sent"].to_messages()[-1].content}
        answered = {"role": "assistant", "content": str(answer.text)}
        return {"messages": [*sent["history"], asked, answered], "after": answer.id}

    def _found(self, given: dict[str, Any], config: RunnableConfig) -> str:
        return joined(self.retriever.invoke(given["question"], config, **self._history(given)))

    async def _afound(self, given: dict[str, Any], config: RunnableConfig) -> str:
        return joined(await self.retriever.ainvoke(given["question"], config, **self._history(given)))

    def _history(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"history": given["history"]} if self.arm == "shown" else {}


class ResponseChain(BranchChain):
    """A chain whose history is kept by the server, as a chain of stored responses."""

    arms = ("record", "without")

    def model_options(self) -> Mapping[str, Any]:
        return {"use_responses_api": True}

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        return None

    def asked(self, given: dict[str, Any]) -> Runnable[Any, Any]:
        return itemgetter("sent") | self.model.bind(previous_response_id=given["after"])

    def kept(self, sent: dict[str, Any], answer: AIMessage) -> Any:
        return {"messages": [], "after": answer.response_metadata["id"]}


class ThreadChain(BranchChain):
    """The same chain, whose conversations have names only."""

    forks = False

    @property
    def rule(self) -> Any:
        return thread_conversation

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        assert self.planner is not None
        try:
            self.planner.forget(conversation, tenant=tenant)
        except StoreError:
            return False
        return True


class State(TypedDict):
    """The state of a graph."""

    messages: Annotated[list[AnyMessage], add_messages]
    after: str | None
    """The name of the latest answer in the record."""


class GraphApplication(LangChainApplication):
    """A LangGraph graph, whose checkpoints are the states; the retriever reads its messages."""

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        path = folder / "checkpoints.sqlite"
        self._connection = sqlite3.connect(path, check_same_thread=False, timeout=60)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=OFF")
        nodes = StateGraph(State).add_node("answer", RunnableLambda(self._answer, self._aanswer))
        nodes.add_edge(START, "answer")
        self.graph = nodes.compile(checkpointer=SqliteSaver(self._connection))

        async def opened() -> Any:
            return await aiosqlite.connect(path, timeout=60)

        self._async_connection = self.run(opened())

        async def compiled() -> Any:
            return nodes.compile(checkpointer=AsyncSqliteSaver(self._async_connection))

        self.async_graph = self.run(compiled())

    @property
    def rule(self) -> Any:
        return thread_conversation

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
        self.given.give(passages)
        config = self._config(state or {"thread": f"{conversation}-{uuid.uuid4().hex}"}, tenant)
        given: Any = {"messages": [HumanMessage(question)]}
        answered: Any = None
        if how == "cancel":
            answered = self.cancelled(self.async_graph.ainvoke(given, config))
        elif how == "plain":
            answered = self.graph.invoke(given, config)
        else:
            parts: Any = self.graph.stream(given, config, stream_mode=["messages", "values"])
            for mode, part in parts:
                if mode == "values":
                    answered = part
                elif how == "close":
                    parts.close()
                    return None
        return None if answered is None else self._state_of(config, answered["messages"][-1].id)

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Remove or rewrite a message. No recorded turn has the history that remains."""
        config = self._config(state, tenant)
        messages = self.graph.get_state(config).values["messages"]
        one = rng.choice(messages[:-1])
        edit: Any = RemoveMessage(one.id) if rng.random() < 0.5 else one.model_copy(update={"content": "Redacted."})
        values = {"messages": [edit], "after": f"cut-{uuid.uuid4().hex}"}
        edited = self.graph.update_state(config, values, as_node="answer").get("configurable", {})
        return {"thread": edited["thread_id"], "checkpoint": edited["checkpoint_id"]}

    def close(self) -> None:
        self._connection.close()
        self.run(self._async_connection.close())
        super().close()

    def named(self, state: State, config: RunnableConfig) -> RunnableConfig:
        """Return the config of the retriever."""
        return config

    def _answer(self, state: State, config: RunnableConfig) -> dict[str, Any]:
        *earlier, question = state["messages"]
        found = self.retriever.invoke(str(question.content), self.named(state, config), **self._history(earlier))
        asked = HumanMessage(f"{joined(found)}\n\n{question.content}", id=question.id)
        answer = self.model.invoke([SystemMessage(INSTRUCTIONS), *earlier, asked])
        return {"messages": [asked, answer], "after": answer.id}

    async def _aanswer(self, state: State, config: RunnableConfig) -> dict[str, Any]:
        *earlier, question = state["messages"]
        found = await self.retriever.ainvoke(str(question.content), self.named(state, config), **self._history(earlier))
        asked = HumanMessage(f"{joined(found)}\n\n{question.content}", id=question.id)
        answer = await self.model.ainvoke([SystemMessage(INSTRUCTIONS), *earlier, asked])
        return {"messages": [asked, answer], "after": answer.id}

    def _history(self, earlier: Sequence[AnyMessage]) -> dict[str, Any]:
        return {"history": [SystemMessage(INSTRUCTIONS), *earlier]} if self.arm == "shown" else {}

    def _config(self, state: Mapping[str, str], tenant: str | None) -> RunnableConfig:
        names = {"thread_id": state["thread"], "checkpoint_id": state.get("checkpoint"), "tenant": tenant}
        named = {name: value for name, value in names.items() if value is not None}
        return {"configurable": {"checkpoint_ns": "", **named}}

    def _state_of(self, config: RunnableConfig, answer_id: str) -> Any:
        """Return the checkpoint behind an answer: another worker may have continued the thread meanwhile."""
        thread = {"thread_id": config.get("configurable", {})["thread_id"]}
        for state in self.graph.get_state_history({"configurable": thread}):
            messages = state.values.get("messages")
            if messages and messages[-1].id == answer_id:
                return {
                    "thread": thread["thread_id"],
                    "checkpoint": state.config.get("configurable", {})["checkpoint_id"],
                }
        raise RuntimeError(f"thread {thread} has no answer {answer_id}")


class BranchGraph(GraphApplication):
    """A graph whose state holds the name of the latest answer, and whose retriever reads nothing else of it."""

    @property
    def rule(self) -> Any:
        return lambda config: Branch(config["configurable"]["after"])

    def named(self, state: State, config: RunnableConfig) -> RunnableConfig:
        return {**config, "configurable": {**config.get("configurable", {}), "after": state.get("after")}}


def joined(documents: Sequence[Document]) -> str:
    """Return the text of documents in a prompt."""
    return "\n\n".join(document.page_content for document in documents)
