"""Chains whose documents stay in a history that the retriever does not see: two workers, one real Redis.

The model records its prompts. A turn is "full" if its prompt ends with the documents, "reference" if it names them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableGenerator, RunnableLambda, RunnablePassthrough
from pydantic import PrivateAttr

from redis_servers import Server
from warmprefix import Branch, ContextPlanner
from warmprefix.stores import Commit, MemorySeenStore, Operation, WriteTurn
from warmprefix_langchain import (
    ContextReuseCompressor,
    ContextReuseRetriever,
    context_prompt,
    context_reuse,
    thread_conversation,
)
from warmprefix_langchain.run_plans import RunPlans
from warmprefix_redis import RedisSeenStore

T = TypeVar("T")
Chain = Runnable[Any, Any]
Make = Callable[..., Chain]

SEA = Document("The sea is 3,688 metres deep on average. " + "It is wide, salty and cold. " * 9, id="sea")
SKY = Document("The sky looks blue since air scatters short waves. " + "It is red at night. " * 9, id="sky")
PLAIN = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
NOTE = "Please also use the context labelled"


class Library(BaseRetriever):
    """Retriever that finds both documents for every question."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [SEA, SKY]


class Model(BaseChatModel):
    """Chat model that answers in three chunks, or raises or waits as planned, and records every prompt."""

    _plans: list[Exception | asyncio.Event | None] = PrivateAttr(default_factory=list)
    _prompts: list[str] = PrivateAttr(default_factory=list)

    def then(self, *plans: Exception | asyncio.Event | None) -> Model:
        self._plans.extend(plans)
        return self

    @property
    def turns(self) -> list[str]:
        """What the last message of each prompt shows."""
        return [
            "reference" if NOTE in prompt else "full" if SEA.page_content in prompt else "?" for prompt in self._prompts
        ]

    @property
    def _llm_type(self) -> str:
        return "recording"

    def _ask(self, messages: list[BaseMessage]) -> asyncio.Event | None:
        self._prompts.append(str(messages[-1].content))
        plan = self._plans.pop(0) if self._plans else None
        if isinstance(plan, Exception):
            raise plan
        return plan

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self._ask(messages)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Because."))])

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        self._ask(messages)
        for text in ("Be", "cau", "se."):
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        event = self._ask(messages)
        yield ChatGenerationChunk(message=AIMessageChunk(content="Be"))
        if event is not None:
            event.set()
            await asyncio.Event().wait()
        yield ChatGenerationChunk(message=AIMessageChunk(content="cause."))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        event = self._ask(messages)
        if event is not None:
            event.set()
            await asyncio.Event().wait()
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Because."))])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
async def workers(server: Server) -> AsyncIterator[list[ContextPlanner]]:
    """Two workers that share only the server; on a busy machine a call may take long."""
    with server.client() as client:
        client.flushall()
    async with (
        ContextPlanner(store=RedisSeenStore(server.url, timeout=10)) as first,
        ContextPlanner(store=RedisSeenStore(server.url, timeout=10)) as second,
    ):
        yield [first, second]


@pytest.fixture
def model() -> Model:
    return Model()


def retriever_of(
    planner: ContextPlanner, conversation: Any = thread_conversation, **options: Any
) -> ContextReuseRetriever:
    return ContextReuseRetriever(
        retriever=Library(),
        planner=planner,
        placement="tail",
        annotate="labels",
        shown_in="content",
        conversation=conversation,
        **options,
    )


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def before(model: Runnable[Any, Any], planner: ContextPlanner, **options: Any) -> Chain:
    """Return a chain up to and including the model."""
    found = {"context": retriever_of(planner, **options) | joined, "input": RunnablePassthrough()}
    return found | PLAIN | model


def thread(name: object, **others: object) -> RunnableConfig:
    return {"configurable": {"thread_id": name, **others}}


# -- threads -------------------------------------------------------------------------------------------------------


async def invoke(chain: Chain, config: RunnableConfig) -> None:
    chain.invoke("Why?", config)  # on the thread of an event loop, as in a notebook


async def invoke_in_a_thread(chain: Chain, config: RunnableConfig) -> None:
    await asyncio.to_thread(chain.invoke, "Why?", config)


async def ainvoke(chain: Chain, config: RunnableConfig) -> None:
    await chain.ainvoke("Why?", config)


async def batch(chain: Chain, config: RunnableConfig) -> None:
    chain.batch(["Why?"], config)


async def abatch(chain: Chain, config: RunnableConfig) -> None:
    await chain.abatch(["Why?"], config)


async def stream(chain: Chain, config: RunnableConfig) -> None:
    assert len(list(chain.stream("Why?", config))) > 1


async def astream(chain: Chain, config: RunnableConfig) -> None:
    assert len([chunk async for chunk in chain.astream("Why?", config)]) > 1


async def astream_events(chain: Chain, config: RunnableConfig) -> None:
    assert [event async for event in chain.astream_events("Why?", config, version="v2")]


async def with_config(chain: Chain, config: RunnableConfig) -> None:
    await chain.with_config(config).ainvoke("Why?")


async def in_a_function(chain: Chain, config: RunnableConfig) -> None:
    """The chain, retriever included, runs on another thread than the event loop of its root run."""
    await RunnableLambda(lambda question: chain.invoke(question)).ainvoke("Why?", config)


CALLS = [
    invoke,
    invoke_in_a_thread,
    ainvoke,
    batch,
    abatch,
    stream,
    astream,
    astream_events,
    with_config,
    in_a_function,
]


@pytest.mark.parametrize("call", CALLS)
async def test_each_document_is_sent_once_per_thread(
    call: Callable[[Chain, RunnableConfig], Any], workers: list[ContextPlanner], model: Model
) -> None:
    first, second = (before(model, planner) | StrOutputParser() for planner in workers)
    for chain in (first, second, first):
        await call(chain, thread("chat-7"))
    await call(second, thread("chat-8"))
    assert model.turns == ["full", "reference", "reference", "full"]
    assert [planner.stats().open_plans for planner in workers] == [0, 0]


def printed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the input of a prompt with the documents as one text, as a stuff chain prints them."""
    return {**given, "context": "\n\n".join(document.metadata["page_content"] for document in given["context"])}


@pytest.mark.parametrize("wrapped", ["compressor", "step"])
async def test_the_compressor_and_the_chain_step_remember_too(
    wrapped: str, workers: list[ContextPlanner], model: Model
) -> None:
    options: dict[str, Any] = {"placement": "tail", "annotate": "labels", "conversation": thread_conversation}
    chains: list[Chain] = []
    for planner in workers:
        if wrapped == "step":
            step = context_reuse(planner, **options)
            context = RunnablePassthrough.assign(context=(lambda given: given["input"]) | Library()) | step
            chains.append(context | RunnableLambda(printed) | context_prompt(placement="tail") | model)
        else:
            compressor = ContextReuseCompressor(planner=planner, shown_in="content", **options)
            found = ContextualCompressionRetriever(base_retriever=Library(), base_compressor=compressor)
            chains.append(
                RunnablePassthrough.assign(context=(lambda given: given["input"]) | found | joined) | PLAIN | model
            )
    for chain in (*chains, *chains):
        await chain.ainvoke({"input": "Why?"}, thread("chat-7"))
    chains[0].invoke({"input": "Why?"}, thread("chat-7"))
    assert model.turns == ["full", *["reference"] * 4]


def test_a_number_is_the_same_thread_as_its_digits(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0])
    name = uuid.uuid4()
    for config in (thread(5), thread("5"), thread(name), thread(str(name))):
        chain.invoke("Why?", config)
    assert model.turns == ["full", "reference", "full", "reference"]


@pytest.mark.parametrize("name", ["", None, [1], {"a": 1}, object(), b"x", 1.5])
def test_a_thread_without_a_usable_name_is_unknown(name: object, workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0])
    for _ in range(2):
        chain.invoke("Why?", thread(name))
    assert model.turns == ["full", "full"]


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\ud800", "a\0b\r\n{}:*"])
def test_any_text_names_a_thread(name: str, workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0])
    for _ in range(2):
        chain.invoke("Why?", thread(name))
    assert model.turns == ["full", "reference"]


def test_tenants_share_no_thread(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0])
    for tenant in ("acme", "globex", "acme"):
        chain.invoke("Why?", thread("chat-7", tenant=tenant))
    assert model.turns == ["full", "full", "reference"]


def test_a_fork_by_checkpoint_makes_the_thread_unknown(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0])
    chain.invoke("Why?", thread("chat-7"))
    chain.invoke("Why?", thread("chat-7", checkpoint_id="1f0"))
    assert model.turns == ["full", "full"]


def test_without_a_conversation_nothing_is_remembered(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0], conversation=None)
    for _ in range(2):
        chain.invoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full"]


@pytest.mark.parametrize("conversation", ["chat-7", lambda config: "chat-7"])
def test_a_conversation_may_be_a_name_or_a_function(
    conversation: Any, workers: list[ContextPlanner], model: Model
) -> None:
    for planner in workers:
        before(model, planner, conversation=conversation).invoke("Why?")
    assert model.turns == ["full", "reference"]


def test_two_retrievals_of_one_run_send_their_documents_again(workers: list[ContextPlanner], model: Model) -> None:
    retriever = retriever_of(workers[0])

    def found(question: str) -> str:
        return joined([*retriever.invoke(question), *retriever.invoke(question)])

    chain = {"context": RunnableLambda(found), "input": RunnablePassthrough()} | PLAIN | model
    for _ in range(3):
        chain.invoke("Why?", thread("chat-7"))
    assert model.turns == ["full"] * 3
    assert all(prompt.count(SEA.page_content) == 2 for prompt in model._prompts)


def test_a_run_of_any_length_is_bounded() -> None:
    def answered(question: str, config: RunnableConfig) -> int:
        retriever = retriever_of(planner)
        for _ in range(300):
            retriever.invoke(question, config)
        callbacks: Any = config.get("callbacks")
        followed = [handler for handler in callbacks.handlers if isinstance(handler, RunPlans)]
        return sum(len(handler._plans) for handler in followed)

    with ContextPlanner() as planner:
        retriever_of(planner)
        assert RunnableLambda(answered).invoke("Why?", thread("chat-7")) == 256
        assert planner.stats().open_plans == 0


def test_a_rule_that_fails_leaves_the_documents_as_found(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0], conversation=lambda config: config["configurable"]["nothing"])
    chain.invoke("Why?", thread("chat-7"))
    assert model._prompts == [f"{joined([SEA, SKY])}\n\nWhy?"]


@pytest.mark.parametrize(
    "make", [partial(ContextReuseRetriever, retriever=Library()), ContextReuseCompressor, context_reuse]
)
def test_a_conversation_needs_placement_tail(make: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="placement must be 'tail' with a conversation, got 'head'"):
        make(annotate="labels", conversation=thread_conversation)


# -- what fails ------------------------------------------------------------------------------------------------------


def failing_parser(*failures: bool) -> RunnableLambda[Any, Any]:
    plan = list(failures)

    def parse(answer: Any) -> Any:
        if plan and plan.pop(0):
            raise ValueError("no JSON")
        return answer

    return RunnableLambda(parse)


BROKEN = RuntimeError("503")


def retried_model(model: Model, planner: ContextPlanner) -> Chain:
    return before(model.then(BROKEN).with_retry(wait_exponential_jitter=False), planner)


def retried_chain(model: Model, planner: ContextPlanner) -> Chain:
    return before(model.then(BROKEN), planner).with_retry(wait_exponential_jitter=False)


def retried_parser(model: Model, planner: ContextPlanner) -> Chain:
    return (before(model, planner) | failing_parser(True)).with_retry(wait_exponential_jitter=False)


def other_model(model: Model, planner: ContextPlanner) -> Chain:
    return before(model.then(BROKEN).with_fallbacks([model]), planner)


def other_chain(model: Model, planner: ContextPlanner) -> Chain:
    return before(model.then(BROKEN), planner).with_fallbacks([before(model, planner)])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("make", [retried_model, retried_chain, retried_parser, other_model, other_chain])
async def test_a_second_attempt_gets_the_documents_in_full(
    make: Callable[[Model, ContextPlanner], Chain], is_async: bool, workers: list[ContextPlanner], model: Model
) -> None:
    chain = make(model, workers[0])
    for _ in range(2):
        if is_async:
            await chain.ainvoke("Why?", thread("chat-7"))
        else:
            await asyncio.to_thread(chain.invoke, "Why?", thread("chat-7"))
    assert model.turns == ["full", "full", "reference"]
    assert workers[0].stats().open_plans == 0


@pytest.mark.parametrize("step", ["model", "parser"])
async def test_a_failed_run_shows_nothing(step: str, workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model.then(*[BROKEN] * (step == "model")), workers[0]) | failing_parser(step == "parser")
    with pytest.raises((RuntimeError, ValueError)):
        await chain.ainvoke("Why?", thread("chat-7"))
    before(model, workers[1]).invoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full"]


def test_of_a_batch_only_the_answered_inputs_count(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model.then(None, BROKEN), workers[0])
    configs = [thread("one"), thread("two")]
    chain.batch(["Why?", "Why?"], [{**config, "max_concurrency": 1} for config in configs], return_exceptions=True)
    for config in configs:
        chain.invoke("Why?", config)
    assert sorted(model.turns) == ["full", "full", "full", "reference"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_cancelled_call_shows_nothing(is_streamed: bool, workers: list[ContextPlanner], model: Model) -> None:
    asked = asyncio.Event()
    chain = before(model.then(asked), workers[0]) | StrOutputParser()
    task = asyncio.create_task((astream if is_streamed else ainvoke)(chain, thread("chat-7")))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await chain.ainvoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full"]
    assert workers[0].stats().open_plans == 0


class SlowStore(MemorySeenStore):
    """Store that tells when a commit has begun, and ends it when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def aexecute(self, operation: Operation[T]) -> T:
        if isinstance(operation, Commit):
            self.begun.set()
            await self.may_end.wait()
        result: Any = self.execute(operation)
        return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_call_that_is_cancelled_during_its_commit_shows_nothing(is_cancelled: bool, model: Model) -> None:
    store = SlowStore()
    async with ContextPlanner(store=store) as planner:
        chain = before(model, planner) | StrOutputParser()
        task = asyncio.create_task(ainvoke(chain, thread("chat-7")))
        await store.begun.wait()  # LangChain lets the callback go on
        if is_cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        store.may_end.set()
        while planner.stats().commits == 0:
            await asyncio.sleep(0)
        if not is_cancelled:
            await task
        for _ in range(10):
            await asyncio.sleep(0)
        await ainvoke(chain, thread("chat-7"))
    assert model.turns == ["full", "full" if is_cancelled else "reference"]
    assert planner.stats().withdrawn_commits == is_cancelled


@pytest.mark.parametrize("chunks", [1, 2, 3])
async def test_a_stream_that_is_closed_early_shows_nothing(
    chunks: int, workers: list[ContextPlanner], model: Model
) -> None:
    chain = before(model, workers[0]) | StrOutputParser()
    parts = chain.stream("Why?", thread("chat-7"))
    for _ in range(chunks):
        next(parts)
    parts.close()  # type: ignore[attr-defined]
    aparts = chain.astream("Why?", thread("chat-7"))
    await anext(aparts)
    await aparts.aclose()  # type: ignore[attr-defined]
    chain.invoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full", "full"]


def test_a_step_behind_the_model_that_is_closed_early_shows_nothing(
    workers: list[ContextPlanner], model: Model
) -> None:
    def words(answers: Iterator[Any]) -> Iterator[str]:
        yield from [answer.content for answer in answers]  # the model has ended before the first of them

    chain: Chain = before(model, workers[0]) | RunnableGenerator(words)
    parts = chain.stream("Why?", thread("chat-7"))
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    before(model, workers[0]).invoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full"]


def test_a_model_that_sees_only_the_question_is_no_answer(workers: list[ContextPlanner], model: Model) -> None:
    def asked(given: dict[str, Any]) -> Any:
        return model.invoke(given["input"])

    def answered(given: dict[str, Any]) -> Any:
        model.invoke("Is that a question?")  # it sees no document
        raise BROKEN

    found = {"context": retriever_of(workers[0]) | joined, "input": RunnablePassthrough()}
    with pytest.raises(RuntimeError):
        (found | RunnableLambda(answered)).invoke("Why?", thread("chat-7"))
    (found | RunnableLambda(asked)).invoke("Why?", thread("chat-7"))
    before(model, workers[0]).invoke("Why?", thread("chat-7"))
    assert model.turns == ["?", "?", "full"]


def test_documents_in_the_system_prompt_do_not_stay_in_the_history(workers: list[ContextPlanner], model: Model) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
    found = {"context": retriever_of(workers[0]) | joined, "input": RunnablePassthrough()}

    def asked(sent: Any) -> Any:
        return model.invoke(sent.to_messages()[::-1])  # the recorded message is the last one

    chain = found | prompt | RunnableLambda(asked)
    for _ in range(3):
        chain.invoke("Why?", thread("chat-7"))
    assert model.turns == ["full", "full", "full"]


def test_a_retriever_called_on_its_own_shows_nothing(workers: list[ContextPlanner], model: Model) -> None:
    retriever = retriever_of(workers[0])
    for _ in range(2):
        assert NOTE not in joined(retriever.invoke("Why?", thread("chat-7")))
    assert workers[0].stats().open_plans == 0


def test_a_history_without_the_documents_ends_all_references(
    workers: list[ContextPlanner], model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{context}\n\n{input}")])
    context = RunnablePassthrough.assign(context=(lambda given: given["input"]) | retriever_of(workers[0]) | joined)
    chain = context | prompt | model
    with caplog.at_level(logging.WARNING, "warmprefix"):
        for turn in range(5):  # the application keeps questions and answers only
            history = [HumanMessage("Why?"), AIMessage("Because.")] * turn
            chain.invoke({"input": "Why?", "history": history}, thread("chat-7"))
    assert model.turns == ["full", "reference", "full", "full", "full"]
    assert len([record for record in caplog.records if "its reference names" in record.message]) == 1


# -- branches --------------------------------------------------------------------------------------------------------


def after(turn: BaseMessage | None) -> RunnableConfig:
    return {"configurable": {"after": None if turn is None else turn.id}}


def continued(config: RunnableConfig) -> Branch:
    return Branch(config.get("configurable", {})["after"])


async def test_a_branch_holds_what_led_to_its_answer(workers: list[ContextPlanner], model: Model) -> None:
    first, second = (before(model, planner, conversation=continued) for planner in workers)
    begun = first.invoke("Why?", after(None))
    forks = [second.invoke("Why?", after(begun)), await first.ainvoke("Why?", after(begun))]
    for fork in forks:
        await second.ainvoke("Why?", after(fork))
    second.invoke("Why?", after(None))
    second.invoke("Why?", after(AIMessage("Because.", id="never seen")))
    assert model.turns == ["full", *["reference"] * 4, "full", "full"]


async def test_an_answer_of_a_stream_can_be_continued(workers: list[ContextPlanner], model: Model) -> None:
    chain = before(model, workers[0], conversation=continued)
    answer: Any = None
    async for chunk in chain.astream("Why?", after(None)):
        answer = chunk if answer is None else answer + chunk
    await chain.ainvoke("Why?", after(answer))
    assert model.turns == ["full", "reference"]


def test_branches_of_another_tenant_are_unknown(workers: list[ContextPlanner], model: Model) -> None:
    acme, globex = (before(model, workers[0], conversation=continued, tenant=name) for name in ("acme", "globex"))
    answer = acme.invoke("Why?", after(None))
    globex.invoke("Why?", after(answer))
    acme.invoke("Why?", after(answer))
    assert model.turns == ["full", "full", "reference"]


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_turn_with_two_contexts_is_unknown(is_repeated: bool, model: Model) -> None:
    """Two retrievals give one label to two texts, so no record of only one of them may be trusted."""

    class Store(MemorySeenStore):
        def execute(self, operation: Operation[T]) -> T:
            answer = super().execute(operation)
            ids.extend([operation.conversation.id] if isinstance(operation, WriteTurn) else [])
            return answer

    class Shelf(BaseRetriever):
        text: str

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return [Document(self.text, id="sea")]

    ids: list[str] = []
    planner = ContextPlanner(store=Store())
    first, second = (
        retriever_of(planner, conversation=continued).model_copy(update={"retriever": Shelf(text=text)})
        for text in (SEA.page_content, SEA.page_content if is_repeated else SKY.page_content)
    )
    found = {"context": first | joined, "more": second | joined, "input": RunnablePassthrough()}
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{more}\n\n{input}")])
    answer = (found | prompt | model).invoke("Why?", after(None))
    before(model, planner, conversation=continued).invoke("Why?", after(answer))
    assert model.turns == ["full", "reference" if is_repeated else "full"]
    assert [id for id in ids if id == answer.id] == [answer.id] * 2 * is_repeated
    assert planner.stats().open_plans == 0


def test_a_chain_whose_parser_failed_may_still_be_continued(workers: list[ContextPlanner], model: Model) -> None:
    answers: list[AIMessage] = []

    def keep(answer: AIMessage) -> AIMessage:
        answers.append(answer)
        return answer

    kept = RunnableLambda(keep)
    chain = before(model, workers[0], conversation=continued) | kept | failing_parser(True)
    with pytest.raises(ValueError, match="no JSON"):
        chain.invoke("Why?", after(None))
    chain.invoke("Why?", after(None))
    chain.invoke("Why?", after(answers[0]))
    assert model.turns == ["full", "full", "reference"]


# -- what the application gets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shown_in", ["prompt", "content"])
def test_a_document_behind_a_reference_keeps_its_text(
    shown_in: Any, workers: list[ContextPlanner], model: Model
) -> None:
    retriever = ContextReuseRetriever(
        retriever=Library(), planner=workers[0], placement="tail", annotate="labels", shown_in=shown_in
    )

    def shown(documents: list[Document]) -> list[str]:
        return [d.metadata["page_content"] if shown_in == "prompt" else d.page_content for d in documents]

    full = retriever.invoke("Why?", history=[])
    again = retriever.invoke("Why?", history=[HumanMessage("\n\n".join(shown(full)))])
    assert [NOTE in text for text in shown(again)] == [True, False]
    assert [document.metadata["context_reference"] for document in again] == [SEA.page_content, SKY.page_content]
    assert not any("context_reference" in document.metadata for document in full)
    if shown_in == "prompt":
        assert [document.page_content for document in again] == [SEA.page_content, SKY.page_content]
        once_more = retriever.arranged(again, {}, None, [])
        assert not any("context_reference" in document.metadata for document in once_more.documents)
