"""The retriever as a Runnable: tenants, `k`, histories, sync and async calls, traces and threads."""

from __future__ import annotations

import asyncio
import copy
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnablePassthrough,
    ensure_config,
)
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field

from warmprefix import ContextPlanner
from warmprefix_langchain import ContextReuseRetriever

Make = Callable[..., Any]
Retriever = Runnable[str, list[Document]]

IN_A_THREAD: RunnableConfig = {"configurable": {"thread_id": "chat-7", "tenant": "acme"}}


@pytest.fixture
def retriever(planner: ContextPlanner, named: Make, shelf: Make) -> ContextReuseRetriever:
    return ContextReuseRetriever(
        retriever=shelf({"?": named("ab"), "!": named("ba")}), planner=planner, annotate="both"
    )


# -- whose call it is --------------------------------------------------------------------------------------------


async def stream(retriever: Retriever, config: RunnableConfig) -> None:
    assert len(list(retriever.stream("?", config))) == 1


async def astream(retriever: Retriever, config: RunnableConfig) -> None:
    assert len([found async for found in retriever.astream("?", config)]) == 1


async def invoke(retriever: Retriever, config: RunnableConfig) -> None:
    retriever.invoke("?", config)


async def ainvoke(retriever: Retriever, config: RunnableConfig) -> None:
    await retriever.ainvoke("?", config)


async def batch(retriever: Retriever, config: RunnableConfig) -> None:
    retriever.batch(["?"], config)


async def abatch(retriever: Retriever, config: RunnableConfig) -> None:
    await retriever.abatch(["?"], config)


async def with_config(retriever: Retriever, config: RunnableConfig) -> None:
    retriever.with_config(config).invoke("?")


async def awith_config(retriever: Retriever, config: RunnableConfig) -> None:
    await retriever.with_config(config).ainvoke("?")


async def in_a_chain(retriever: Retriever, config: RunnableConfig) -> None:
    (RunnablePassthrough.assign(context=(lambda x: x["input"]) | retriever)).invoke({"input": "?"}, config)


async def in_an_asynchronous_chain(retriever: Retriever, config: RunnableConfig) -> None:
    await (RunnablePassthrough.assign(context=(lambda x: x["input"]) | retriever)).ainvoke({"input": "?"}, config)


async def with_retry(retriever: Retriever, config: RunnableConfig) -> None:
    retriever.with_retry().invoke("?", config)


async def as_a_tool(retriever: Retriever, config: RunnableConfig) -> None:
    assert isinstance(retriever, BaseRetriever)
    create_retriever_tool(retriever, "search", "Searches.").invoke({"query": "?"}, config)


CALLS = [
    invoke,
    ainvoke,
    batch,
    abatch,
    stream,
    astream,
    with_config,
    awith_config,
    in_a_chain,
    in_an_asynchronous_chain,
    with_retry,
    as_a_tool,
]


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_sees_its_conversation_and_tenant(
    call: Callable[[Retriever, RunnableConfig], Any], retriever: ContextReuseRetriever, request_log: Any
) -> None:
    await call(retriever, IN_A_THREAD)
    assert (request_log.conversations, request_log.tenants) == (["chat-7"], ["acme"])


@pytest.mark.parametrize("call", CALLS)
async def test_nothing_is_left_of_a_call(
    call: Callable[[Retriever, RunnableConfig], Any], retriever: ContextReuseRetriever, request_log: Any
) -> None:
    await call(retriever, IN_A_THREAD)
    retriever.invoke("?")
    await retriever.ainvoke("?")
    assert request_log.conversations[1:] == [None, None]
    assert ensure_config().get("configurable") == {}


@pytest.mark.parametrize(
    ("config", "conversation"),
    [
        ({"configurable": {"thread_id": "a"}, "metadata": {"thread_id": "b"}}, "a"),
        ({"configurable": {"session_id": "a"}}, "a"),
        ({"metadata": {"thread_id": "a", "session_id": "b"}}, "a"),
        ({"metadata": {"session_id": "a"}}, "a"),
        ({"metadata": {"conversation_id": "a"}}, "a"),
        ({"configurable": {"thread_id": 7}}, "7"),
        ({"configurable": {"thread_id": ""}}, None),
        ({"configurable": {"thread_id": None}}, None),
        ({"metadata": {"user_id": "a"}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_where_the_conversation_is_looked_for(
    config: RunnableConfig | None, conversation: str | None, retriever: ContextReuseRetriever, request_log: Any
) -> None:
    retriever.invoke("?", config)
    assert request_log.conversations == [conversation]


def test_enclosing_run_names_the_conversation(retriever: ContextReuseRetriever, request_log: Any) -> None:
    """As in a node of a LangGraph graph, whose config reaches what it calls."""

    def node(question: str) -> list[Document]:
        return retriever.invoke(question)

    RunnableLambda(node).invoke("?", IN_A_THREAD)
    assert request_log.conversations == ["chat-7"]


def test_metadata_of_the_retriever_comes_last(planner: ContextPlanner, shelf: Make, request_log: Any) -> None:
    retriever = ContextReuseRetriever(
        retriever=shelf({"?": []}), planner=planner, metadata={"session_id": "its own", "tenant": "its own"}
    )
    retriever.invoke("?")
    retriever.invoke("?", IN_A_THREAD)
    assert request_log.conversations == ["its own", "chat-7"]
    assert request_log.tenants == ["its own", "acme"]


def test_no_call_gets_around_the_retrievers_tenant(planner: ContextPlanner, shelf: Make, request_log: Any) -> None:
    retriever = ContextReuseRetriever(retriever=shelf({"?": []}), planner=planner, tenant="umbrella")
    retriever.invoke("?")
    retriever.invoke("?", {"metadata": {"tenant": "acme"}})
    assert request_log.tenants == ["umbrella", "umbrella"]


def test_nothing_crosses_a_tenant(retriever: ContextReuseRetriever, ids: Make) -> None:
    retriever.invoke("?", {"configurable": {"tenant": "acme"}})
    assert ids(retriever.invoke("!", {"configurable": {"tenant": "umbrella"}})) == "ba"
    assert ids(retriever.invoke("!", {"configurable": {"tenant": "acme"}})) == "ab"


def test_nothing_crosses_a_model_or_a_preamble(planner: ContextPlanner, shelf: Make, named: Make, ids: Make) -> None:
    shelf_ = shelf({"?": named("ab"), "!": named("ba")})
    ContextReuseRetriever(retriever=shelf_, planner=planner, model="small", preamble="Hello.").invoke("?")
    others: list[dict[str, Any]] = [
        {"model": "large", "preamble": "Hello."},
        {"model": "small", "preamble": "Bye."},
        {},
    ]
    for other in others:
        assert ids(ContextReuseRetriever(retriever=shelf_, planner=planner, **other).invoke("!")) == "ba"


def test_the_inner_retriever_sees_the_config_but_not_the_name_of_our_run(planner: ContextPlanner) -> None:
    seen: list[dict[str, Any]] = []

    def find(question: str, config: RunnableConfig) -> list[Document]:
        seen.append({**config})
        return []

    run_id, runs = uuid.uuid4(), Runs()
    config: RunnableConfig = {"run_name": "ours", "run_id": run_id, "tags": ["t"], "metadata": {"m": 1}}
    retriever = ContextReuseRetriever(retriever=RunnableLambda(find), planner=planner)
    retriever.invoke("?", {**IN_A_THREAD, **config, "callbacks": [runs]})
    assert seen[0]["configurable"] == IN_A_THREAD.get("configurable")
    assert seen[0]["tags"] == ["t"]
    assert seen[0]["metadata"]["m"] == 1
    (name, _, _), (inner_name, inner, _) = runs.started
    assert (name, inner_name) == ("ours", "find")
    assert inner != run_id


# -- how many ----------------------------------------------------------------------------------------------------


class Counting(BaseRetriever):
    """Retriever that accepts `k` and records it."""

    given: list[int] = Field(default_factory=list)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int = 2
    ) -> list[Document]:
        self.given.append(k)
        return [Document(str(i), id=str(i)) for i in range(k)]


async def test_the_best_k_are_kept_before_they_are_ordered(retriever: ContextReuseRetriever, ids: Make) -> None:
    retriever.invoke("?")
    assert ids(retriever.invoke("!")) == "ab"
    assert ids(retriever.invoke("!", k=1)) == "b"
    assert ids(await retriever.ainvoke("!", k=1)) == "b"
    assert [ids(found) for found in retriever.batch(["?", "!"], k=1)] == ["a", "b"]
    assert ids(retriever.invoke("!", k=9)) == "ab"


def test_inner_retriever_that_accepts_k_receives_it(planner: ContextPlanner) -> None:
    inner = Counting()
    retriever = ContextReuseRetriever(retriever=inner.with_config(tags=["bound"]), planner=planner)
    assert [len(retriever.invoke("?")), len(retriever.invoke("?", k=5))] == [2, 5]
    assert len(ContextReuseRetriever(retriever=inner, planner=planner, k=4).invoke("?")) == 4
    assert len(ContextReuseRetriever(retriever=inner, planner=planner, k=4).invoke("?", k=3)) == 3
    assert inner.given == [2, 5, 4, 3]


async def test_vector_store_receives_k_and_other_arguments(planner: ContextPlanner) -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents([Document(f"Passage {i}.", id=str(i), metadata={"odd": i % 2}) for i in range(20)])
    retriever = ContextReuseRetriever(retriever=store.as_retriever(), planner=planner)
    assert [len(retriever.invoke("?")), len(retriever.invoke("?", k=9))] == [4, 9]

    def odd(document: Document) -> bool:
        return bool(document.metadata["odd"])

    for found in (retriever.invoke("?", k=9, filter=odd), await retriever.ainvoke("?", k=9, filter=odd)):
        assert [document.metadata["odd"] for document in found] == [1] * 9


class Backwards(BaseDocumentCompressor):
    """Reranker that reverses the order."""

    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> list[Document]:
        return list(documents)[::-1]


async def test_a_reranker_inside_has_all_of_its_candidates(planner: ContextPlanner, named: Make, ids: Make) -> None:
    """A compression retriever passes all arguments on to its base, which may not accept `k`."""
    reranked = ContextualCompressionRetriever(
        base_compressor=Backwards(), base_retriever=RunnableLambda(lambda _: named("abcdef"))
    )
    retriever = ContextReuseRetriever(retriever=reranked, planner=planner, k=2)
    assert [ids(retriever.invoke("?")), ids(await retriever.ainvoke("?", k=3))] == ["fe", "fed"]


@pytest.mark.parametrize("k", [0, -1])
def test_k_must_leave_something(k: int, retriever: ContextReuseRetriever, shelf: Make) -> None:
    with pytest.raises(ValueError, match=f"k must be 1 or more, got {k}"):
        retriever.invoke("?", k=k)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ContextReuseRetriever(retriever=shelf({}), k=k)


# -- tail placement ----------------------------------------------------------------------------------------------


@pytest.fixture
def tail(planner: ContextPlanner, named: Make, shelf: Make) -> ContextReuseRetriever:
    shelf_ = shelf({"?": named("ab"), "!": named("bca")})
    return ContextReuseRetriever(retriever=shelf_, planner=planner, placement="tail", annotate="both")


def printed(documents: list[Document]) -> list[str]:
    return [document.metadata["page_content"] for document in documents]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage("[a] The text of a.\n\n[b] The text of b.\n\nWhat?"),
        HumanMessage([{"type": "text", "text": "[a] The text of a.\n\n[b] The text of b.\n\nWhat?"}]),
        ("human", "[a] The text of a.\n\n[b] The text of b.\n\nWhat?"),
        {"role": "user", "content": "[a] The text of a.\n\n[b] The text of b.\n\nWhat?"},
    ],
)
async def test_what_the_history_shows_becomes_a_reference(message: Any, tail: ContextReuseRetriever) -> None:
    history = [SystemMessage("Be brief."), message, AIMessage("That.")]
    for found in (tail.invoke("!", history=history), await tail.ainvoke("!", history=history)):
        # The first of them names both, in one sentence.
        assert printed(found) == [
            "Please also use the context labelled [b], [a] above in this conversation.",
            "[c] The text of c.",
            "",
        ]
        assert [document.page_content for document in found] == [f"The text of {name}." for name in "bca"]


def test_a_history_may_be_a_prompt_or_one_text(tail: ContextReuseRetriever) -> None:
    text = "[b] The text of b.\n\nWhat?"
    history: Any
    for history in (ChatPromptValue(messages=[HumanMessage(text)]), text):
        assert printed(tail.invoke("!", history=history)) == [
            "Please also use the context labelled [b] above in this conversation.",
            "[c] The text of c.",
            "[a] The text of a.",
        ]


def test_content_mode_shows_the_reference_in_joined_texts(planner: ContextPlanner, named: Make, shelf: Make) -> None:
    found = named("ab")
    retriever = ContextReuseRetriever(
        retriever=shelf({"?": found}), planner=planner, placement="tail", annotate="labels", shown_in="content"
    )
    returned = retriever.invoke("?", history=["[a] The text of a."])
    assert [document.page_content for document in returned] == [
        "Please also use the context labelled [a] above in this conversation.",
        "[b] The text of b.",
    ]
    assert found == named("ab")


@pytest.mark.parametrize("history", [None, [], ["What?", "That."], ["[a] The text of a, cut"]])
def test_what_the_history_does_not_show_is_sent_in_full(history: Any, tail: ContextReuseRetriever) -> None:
    for _ in range(3):  # whatever was retrieved before, in this very conversation
        found = tail.invoke("?", IN_A_THREAD, history=history)
        assert all("Please refer" not in text for text in printed(found))


def test_invalid_history_leaves_the_documents_as_found(tail: ContextReuseRetriever, named: Make) -> None:
    assert tail.invoke("?", history=[object()]) == named("ab")


def test_head_placement_never_refers(retriever: ContextReuseRetriever) -> None:
    found = retriever.invoke("?", history=["[a] The text of a."])
    assert printed(found) == ["[a] The text of a.", "[b] The text of b."]


# -- both ways to call it, threads -------------------------------------------------------------------------------


async def test_asynchronous_calls_stay_asynchronous(retriever: ContextReuseRetriever) -> None:
    await retriever.ainvoke("?")
    retriever.invoke("?")
    assert isinstance(retriever.retriever, BaseRetriever)
    assert retriever.retriever.asked == ["async", "sync"]  # type: ignore[attr-defined]


async def test_many_threads_and_tasks_at_once_keep_their_conversations_apart(
    planner: ContextPlanner, named: Make, shelf: Make, request_log: Any, ids: Make
) -> None:
    names = [f"{i}{i + 1}{i + 2}" for i in range(7)]
    retriever = ContextReuseRetriever(retriever=shelf({name: named(name) for name in names}), planner=planner)

    def config(i: int) -> RunnableConfig:
        return {"configurable": {"thread_id": str(i), "tenant": names[i % 7]}}

    def call(i: int) -> str:
        return str(ids(retriever.invoke(names[i % 7], config(i))))

    with ThreadPoolExecutor(8) as pool:
        returned = list(pool.map(call, range(210)))
    found = await asyncio.gather(*(retriever.ainvoke(names[i % 7], config(i)) for i in range(210)))
    assert [sorted(name) for name in returned] == [list(names[i % 7]) for i in range(210)]
    assert [sorted(ids(documents)) for documents in found] == [list(names[i % 7]) for i in range(210)]
    assert sorted(map(int, request_log.conversations)) == sorted([*range(210)] * 2)
    for conversation, tenant, texts in zip(
        request_log.conversations, request_log.tenants, request_log.texts, strict=True
    ):
        assert tenant == names[int(conversation) % 7]
        assert texts == [f"The text of {name}." for name in tenant]


async def test_a_cancelled_call_cancels_the_inner_one(planner: ContextPlanner) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def find(question: str) -> list[Document]:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    retriever = ContextReuseRetriever(retriever=RunnableLambda(lambda _: [], find), planner=planner)
    call = asyncio.ensure_future(retriever.ainvoke("?"))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert cancelled.is_set()
    assert planner.stats().plans == 0


async def test_error_of_the_inner_retriever_passes_through(planner: ContextPlanner) -> None:
    def find(question: str) -> list[Document]:
        raise LookupError("no index")

    retriever = ContextReuseRetriever(retriever=RunnableLambda(find), planner=planner)
    with pytest.raises(LookupError, match="no index"):
        retriever.invoke("?")
    with pytest.raises(LookupError, match="no index"):
        await retriever.ainvoke("?")


# -- traces ------------------------------------------------------------------------------------------------------


class Runs(BaseCallbackHandler):
    def __init__(self) -> None:
        self.started: list[tuple[str, uuid.UUID, uuid.UUID | None]] = []
        self.ended: dict[uuid.UUID, list[Document]] = {}
        self.failed: list[uuid.UUID] = []

    def on_chain_start(self, serialized: Any, inputs: Any, **run: Any) -> None:
        self.on_retriever_start(serialized, inputs, **run)

    def on_retriever_start(self, serialized: Any, query: str, **run: Any) -> None:
        self.started.append((run["name"], run["run_id"], run["parent_run_id"]))

    def on_retriever_end(self, documents: Any, **run: Any) -> None:
        self.ended[run["run_id"]] = list(documents)

    def on_retriever_error(self, error: BaseException, **run: Any) -> None:
        self.failed.append(run["run_id"])


async def test_a_trace_shows_our_run_and_the_inner_one_below_it(retriever: ContextReuseRetriever, ids: Make) -> None:
    retriever.invoke("?")
    for call in (retriever.invoke, retriever.ainvoke):
        runs = Runs()
        result = call("!", {"callbacks": [runs], "run_name": "mine"})
        if asyncio.iscoroutine(result):
            await result
        (name, ours, parent), (inner_name, inner, inner_parent) = runs.started
        assert (name, parent, inner_name, inner_parent) == ("mine", None, "Shelf", ours)
        assert (ids(runs.ended[inner]), ids(runs.ended[ours])) == ("ba", "ab")


async def test_events_show_both_runs(retriever: ContextReuseRetriever) -> None:
    events = [event async for event in retriever.astream_events("?", version="v2")]
    assert [(event["event"], event["name"]) for event in events if "retriever" in event["event"]] == [
        ("on_retriever_start", "ContextReuseRetriever"),
        ("on_retriever_start", "Shelf"),
        ("on_retriever_end", "Shelf"),
        ("on_retriever_end", "ContextReuseRetriever"),
    ]


# -- as an object ------------------------------------------------------------------------------------------------


def test_its_text_and_its_serial_form_show_no_planner(retriever: ContextReuseRetriever) -> None:
    assert "planner" not in repr(retriever)
    assert "planner" not in retriever.model_dump()
    assert dumpd(retriever)["type"] == "not_implemented"


def test_copies_share_the_planner(retriever: ContextReuseRetriever, planner: ContextPlanner) -> None:
    assert copy.copy(retriever).planner is planner
    assert copy.deepcopy(retriever).planner is planner
    assert copy.deepcopy(retriever).retriever is not retriever.retriever
    assert retriever.model_copy(update={"k": 1}).planner is planner


def test_it_does_not_leave_its_process(retriever: ContextReuseRetriever) -> None:
    """A planner is one process's; another makes its own."""
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(retriever)


def test_each_has_a_planner_of_its_own_by_default(shelf: Make) -> None:
    first, second = ContextReuseRetriever(retriever=shelf({})), ContextReuseRetriever(retriever=shelf({}))
    assert isinstance(first.planner, ContextPlanner)
    assert first.planner is not second.planner


def test_its_fields_can_be_made_configurable(retriever: ContextReuseRetriever, planner: ContextPlanner) -> None:
    configurable = retriever.configurable_fields(k=ConfigurableField(id="most"))
    assert len(configurable.invoke("?")) == 2
    assert len(configurable.invoke("?", {"configurable": {"most": 1}})) == 1
    assert planner.stats().plans == 2
