"""LangGraph threads, message histories and stored responses: what the retriever reads of them by itself."""

from __future__ import annotations

import logging
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from pydantic import PrivateAttr, SecretStr

from warmprefix import Branch, ContextPlanner
from warmprefix_langchain import ContextReuseRetriever, thread_conversation
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.emulator.tokenizer import ChatMessage

SEA = Document("The sea is 3,688 metres deep on average. " + "It is wide, salty and cold. " * 9, id="sea")
SKY = Document("The sky looks blue since air scatters short waves. " + "It is red at night. " * 9, id="sky")
NOTE = "Please also use the context labelled"


class Library(BaseRetriever):
    """Retriever that finds both documents for every question."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [SEA, SKY]


class Model(BaseChatModel):
    """Chat model that calls its tool `calls` times at once, then answers; records every prompt."""

    calls: int = 0
    _prompts: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def prompts(self) -> list[list[BaseMessage]]:
        return self._prompts

    @property
    def _llm_type(self) -> str:
        return "recording"

    def bind_tools(self, tools: Any, **_: Any) -> Model:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self._prompts.append(messages)
        made = len(self._prompts)
        calls: list[Any] = [{"name": "search", "args": {"query": "?"}, "id": f"{made}.{i}"} for i in range(self.calls)]
        is_answer = not calls or isinstance(messages[-1], ToolMessage)
        answer = AIMessage("Because.") if is_answer else AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=answer)])


@pytest.fixture
def retriever() -> ContextReuseRetriever:
    return retriever_with(thread_conversation)


def retriever_with(conversation: Any) -> ContextReuseRetriever:
    return ContextReuseRetriever(
        retriever=Library(),
        planner=ContextPlanner(),
        placement="tail",
        annotate="labels",
        shown_in="content",
        conversation=conversation,
    )


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def thread(name: object) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def check(prompt: list[BaseMessage]) -> str:
    """Return what the end of a prompt shows, once all that it refers to is found in front of that."""
    *earlier, last = prompt
    text = str(last.content)
    if NOTE not in text:
        assert SEA.page_content in text
        return "full"
    shown = [str(message.content) for message in earlier]
    for label, document in (("sea", SEA), ("sky", SKY)):
        if f"[{label}]" in text:
            assert any(f"[{label}] {document.page_content}" in message for message in shown)
    return "reference"


# -- a graph with a checkpointer ---------------------------------------------------------------------------------


class Chat:
    """A graph that puts the documents into the user's message."""

    def __init__(self, retriever: ContextReuseRetriever, saver: Any, steps: int | None = None) -> None:
        self.model: Any = Model()
        self.retriever = retriever
        self.steps = steps
        nodes = StateGraph(MessagesState).add_node("answer", self._answer).add_edge(START, "answer")
        self.graph = nodes.compile(checkpointer=saver)

    def _answer(self, state: MessagesState) -> dict[str, Any]:
        question = state["messages"][-1]
        content = f"{joined(self.retriever.invoke(question.text))}\n\n{question.text}"
        asked = HumanMessage(content, id=question.id)
        messages = [*state["messages"][:-1], asked]
        return {"messages": [asked, self.model.invoke(messages if self.steps is None else messages[-self.steps :])]}

    def ask(self, config: RunnableConfig) -> str:
        self.graph.invoke({"messages": [HumanMessage("Why?")]}, config)
        return check(self.model.prompts[-1])

    def states(self, config: RunnableConfig) -> dict[int, Any]:
        """Return the latest state of each length."""
        return {len(state.values.get("messages", [])): state for state in [*self.graph.get_state_history(config)][::-1]}


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemorySaver()
        return
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    yield SqliteSaver(connection)
    connection.close()


def test_a_thread_of_a_graph_refers_to_its_messages(retriever: ContextReuseRetriever, saver: Any) -> None:
    chat = Chat(retriever, saver)
    assert [chat.ask(thread(1)) for _ in range(10)] == ["full", *["reference"] * 9]
    assert chat.ask(thread(2)) == "full"
    another_process = Chat(retriever_with(thread_conversation), saver)
    assert another_process.ask(thread(1)) == "reference"


def test_a_branch_of_a_thread_refers_to_what_it_holds(retriever: ContextReuseRetriever, saver: Any) -> None:
    chat = Chat(retriever, saver)
    for _ in range(3):
        chat.ask(thread(1))
    states = chat.states(thread(1))
    assert chat.ask(states[0].config) == "full"  # forked in front of the first answer
    assert chat.ask(states[2].config) == "reference"
    chat.graph.invoke(None, states[1].config)  # the first turn again
    assert check(chat.model.prompts[-1]) == "full"
    chat.graph.invoke(None, states[5].config)
    assert check(chat.model.prompts[-1]) == "reference"


def test_an_edited_thread_refers_to_what_is_left(retriever: ContextReuseRetriever, saver: Any) -> None:
    chat = Chat(retriever, saver)
    for _ in range(2):
        chat.ask(thread(1))
    state = chat.states(thread(1))[2]
    first = state.values["messages"][0]
    for edit in (RemoveMessage(first.id), HumanMessage("Why? (redacted)", id=first.id)):
        edited = chat.graph.update_state(state.config, {"messages": [edit]}, as_node="answer")
        assert chat.ask(edited) == "full"


def test_a_resumed_step_refers_to_what_it_holds(retriever: ContextReuseRetriever, saver: Any) -> None:
    model = Model()

    def answer(state: MessagesState) -> dict[str, Any]:
        found = joined(retriever.invoke("Why?"))
        interrupt("Shall I?")
        asked = HumanMessage(found, id=state["messages"][-1].id)
        return {"messages": [asked, model.invoke([*state["messages"][:-1], asked])]}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile(checkpointer=saver)
    for expected in ("full", "reference"):
        graph.invoke({"messages": [HumanMessage("Why?")]}, thread(1))
        graph.invoke(
            {"messages": [HumanMessage("Why not?")]}, thread(1)
        )  # dropped: a new question in place of an answer
        graph.invoke(Command(resume="yes"), thread(1))
        assert check(model.prompts[-1]) == expected


def test_a_state_without_messages_is_unknown(retriever: ContextReuseRetriever, saver: Any) -> None:
    class State(TypedDict):
        question: str
        found: str

    def answer(state: State) -> dict[str, Any]:
        return {"found": joined(retriever.invoke(state["question"]))}

    graph = StateGraph(State).add_node(answer).add_edge(START, "answer").compile(checkpointer=saver)
    for _ in range(2):
        assert NOTE not in graph.invoke({"question": "Why?", "found": ""}, thread(1))["found"]


def test_messages_that_are_no_list_are_unknown(retriever: ContextReuseRetriever) -> None:
    class State(TypedDict):
        messages: str

    def answer(state: State) -> dict[str, Any]:
        assert NOTE not in joined(retriever.invoke("Why?"))
        return {}

    graph = StateGraph(State).add_node(answer).add_edge(START, "answer").compile(checkpointer=InMemorySaver())
    for _ in range(2):
        graph.invoke({"messages": "chat-7"}, thread(1))


def test_a_prompt_without_the_messages_of_the_state_ends_all_references(
    retriever: ContextReuseRetriever, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()

    def answer(state: MessagesState) -> dict[str, Any]:
        task = HumanMessage(joined(retriever.invoke("Why?")))  # for a model that gets a task, and not the conversation
        return {"messages": [task, model.invoke([task])]}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile(checkpointer=InMemorySaver())
    with caplog.at_level(logging.WARNING, "warmprefix"):
        for _ in range(4):
            graph.invoke({"messages": [HumanMessage("Why?")]}, thread(1))
    assert [NOTE in str(prompt[-1].content) for prompt in model.prompts] == [False, True, False, False]
    assert len(caplog.records) == 1


def test_a_model_that_gets_only_the_latest_messages_ends_all_references(
    retriever: ContextReuseRetriever, caplog: pytest.LogCaptureFixture
) -> None:
    chat = Chat(retriever, InMemorySaver(), steps=2)
    with caplog.at_level(logging.WARNING, "warmprefix"):
        for _ in range(5):
            chat.graph.invoke({"messages": [HumanMessage("Why?")]}, thread(1))
    assert [NOTE in str(prompt[-1].content) for prompt in chat.model.prompts] == [False, True, False, False, False]
    assert len(caplog.records) == 1


def test_a_trimmed_history_is_searched_where_the_call_passes_it(retriever: ContextReuseRetriever) -> None:
    model = Model()

    def answer(state: MessagesState) -> dict[str, Any]:
        earlier = trim_messages(state["messages"][:-1], max_tokens=4, token_counter=len, strategy="last")
        found = retriever.invoke("Why?", history=earlier)
        asked = HumanMessage(joined(found), id=state["messages"][-1].id)
        return {"messages": [asked, model.invoke([*earlier, asked])]}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile(checkpointer=InMemorySaver())
    for _ in range(7):
        graph.invoke({"messages": [HumanMessage("Why?")]}, thread(1))
    shown = [check(prompt) for prompt in model.prompts]
    assert shown == ["full", "reference", "reference", "full", "reference", "reference", "full"]


# -- an agent whose tool is the retriever ------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_parallel_tool_calls_do_not_refer_to_each_other(is_async: bool, retriever: ContextReuseRetriever) -> None:
    tool = create_retriever_tool(retriever, "search", "Searches.", response_format="content_and_artifact")
    model = Model(calls=2)
    agent = create_agent(model, [tool], checkpointer=InMemorySaver())
    results: list[list[ToolMessage]] = []
    for _ in range(3):
        given: Any = {"messages": [HumanMessage("Why?")]}
        state = await agent.ainvoke(given, thread(1)) if is_async else agent.invoke(given, thread(1))
        results.append([message for message in state["messages"] if isinstance(message, ToolMessage)][-2:])
    shown = [[NOTE in str(message.content) for message in messages] for messages in results]
    assert shown == [[False, False], [True, True], [True, True]]
    assert [document.metadata["context_reference"] for document in results[-1][0].artifact] == [
        SEA.page_content,
        SKY.page_content,
    ]


# -- a history object ----------------------------------------------------------------------------------------------


class StoredHistory(BaseChatMessageHistory):
    """History of a session; its reads are counted as sync or async."""

    def __init__(self) -> None:
        self.messages: list[BaseMessage] = []
        self.awaited = 0

    async def aget_messages(self) -> list[BaseMessage]:
        self.awaited += 1
        return self.messages

    def add_messages(self, messages: Any) -> None:
        self.messages.extend(messages)

    def clear(self) -> None:
        self.messages = []


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("keeps_documents", [False, True])
async def test_a_message_history_decides(
    keeps_documents: bool, is_async: bool, retriever: ContextReuseRetriever
) -> None:
    history, model = StoredHistory(), Model()
    context = RunnablePassthrough.assign(context=(lambda given: given["question"]) | retriever | joined)
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{context}\n\n{question}")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = RunnableWithMessageHistory(
            context | prompt | model,
            lambda session_id: history,
            input_messages_key="question",
            history_messages_key="history",
        )
    config: RunnableConfig = {"configurable": {"session_id": "chat-7"}}
    for _ in range(3):
        answered = (
            await chain.ainvoke({"question": "Why?"}, config)
            if is_async
            else chain.invoke({"question": "Why?"}, config)
        )
        assert answered.content == "Because."
        if keeps_documents:  # what the chain stored is the question alone
            history.messages[-2] = model.prompts[-1][-1]
    assert [check(prompt) for prompt in model.prompts] == ["full", *["reference" if keeps_documents else "full"] * 2]
    assert bool(history.awaited) is is_async


# -- a history on a server -----------------------------------------------------------------------------------------


class Reader:
    """Answers of the engine, and the prompts that it received with what it has stored."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        self.prompts.append("\n".join(message.text for message in messages))
        return "Because."

    def take(self, text: str) -> list[int]:
        """Return how often each prompt since the last call has this text."""
        prompts, self.prompts = self.prompts, []
        return [prompt.count(text) for prompt in prompts]


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def stored_model(reader: Reader) -> Iterator[Callable[..., ChatOpenAI]]:
    """Return a function that makes clients of an engine that stores responses."""
    with EmulatorServer(EmulatorConfig(), reader=reader) as server:
        yield lambda **options: ChatOpenAI(
            base_url=server.base_url,
            api_key=SecretStr("none"),
            model=server.config.model,
            use_responses_api=True,
            max_retries=0,
            **options,
        )


def continued(config: RunnableConfig) -> Branch:
    return Branch(config.get("configurable", {})["after"])


@pytest.mark.parametrize(
    ("conversation", "options", "sent"),
    [
        pytest.param(continued, {}, [1, 1, 1, 1], id="branch"),
        pytest.param(None, {}, [1, 2, 3, 4], id="without"),
        pytest.param(continued, {"truncation": "auto"}, [1, 2, 3, 4], id="cut by the server"),
    ],
)
def test_a_chain_of_stored_responses_has_each_document_once(
    conversation: Any, options: Any, sent: list[int], stored_model: Callable[..., ChatOpenAI], reader: Reader
) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
    found = {"context": retriever_with(conversation) | joined, "input": RunnablePassthrough()}
    model, after = stored_model(**options), None
    for _ in range(4):
        chain = found | prompt | model.bind(previous_response_id=after)
        after = chain.invoke("Why?", {"configurable": {"after": after}}).response_metadata["id"]
    assert reader.take(SEA.page_content) == sent


def test_a_graph_whose_history_is_stored_sends_each_document_once(
    retriever: ContextReuseRetriever, stored_model: Callable[..., ChatOpenAI], reader: Reader
) -> None:
    chat = Chat(retriever, InMemorySaver())
    chat.model = stored_model(use_previous_response_id=True)
    for _ in range(3):
        chat.graph.invoke({"messages": [HumanMessage("Why?")]}, thread(1))
    first, second = chat.states(thread(1))[2].config, chat.states(thread(1))[0].config
    for config in (first, second):
        chat.graph.invoke({"messages": [HumanMessage("Why?")]}, config)
    assert reader.take(SEA.page_content) == [1, 1, 1, 1, 1]
    assert retriever.planner.stats().references == 2 * 3
