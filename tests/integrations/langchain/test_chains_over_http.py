"""Chains on real text against an engine: its cache hits and its prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import PromptTemplate, format_document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from warmprefix import ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix_langchain import ContextReuseRetriever, context_prompt, context_reuse

Make = Callable[..., Any]

TURNS = 40

QUOTING = re.compile(r'Most relevant above: the passage with "[^"]+"\.')
REFERENCE = re.compile(r"Please also use the context labelled \[(.+)\] above in this conversation\.")


def referred(prompt: str) -> list[str]:
    """Return the labels that a prompt's references name."""
    return [label for reference in REFERENCE.finditer(prompt) for label in reference[1].split("], [")]


@pytest.fixture(scope="session")
def library(turns: Sequence[Any], shelf: Make) -> BaseRetriever:
    """Finds the passages of each turn."""
    found = {question(turn): [Document(passage.text, id=passage.id) for passage in turn.passages] for turn in turns}
    retriever: BaseRetriever = shelf(found)
    return retriever


@pytest.fixture(scope="session")
def talk(turns: Sequence[Any]) -> list[Any]:
    """Five turns of one conversation, the last of which finds all that the first did."""
    first = turns[0]
    overlapping = [turn for turn in turns[1:] if {*turn.passages} & {*first.passages}]
    return [first, *overlapping[:2], turns[-1], first]


def question(turn: Any) -> str:
    """Return the question, made unique: another turn may ask the same one and find other passages."""
    return f"{turn.question} ({turn.conversation}, turn {turn.turn})"


def rag(retriever: BaseRetriever, model: Any) -> Runnable[Any, Any]:
    chain: Runnable[Any, Any] = create_retrieval_chain(retriever, create_stuff_documents_chain(model, context_prompt()))
    return chain


def shown(text: str) -> str:
    """Return a passage as the prompt shows it behind its label: with its own bytes."""
    return f"] {text}"


def in_full(text: str, prompt: str, *, labelled: bool = False) -> bool:
    return (shown(text) if labelled else "\n" + text) + "\n" in f"{prompt}\n"


# -- the hit ratio -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotate", ["note", "both"])
def test_retrieval_chain_finds_more_in_the_cache(
    annotate: Annotate, turns: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    plain, ours = start_engine(), start_engine()
    wrapped = ContextReuseRetriever(retriever=library, annotate=annotate)
    for engine, retriever in ((plain, library), (ours, wrapped)):
        chain = rag(retriever, chat_model(engine))
        for turn in turns[:TURNS]:
            result = chain.invoke({"input": question(turn)}, {"configurable": {"thread_id": turn.conversation}})
            assert {document.page_content for document in result["context"]} == {
                passage.text for passage in turn.passages
            }
            assert result["answer"]
    assert wrapped.planner.stats().reordered_plans > 0
    for turn, prompt in zip(turns[:TURNS], ours.prompts, strict=True):
        assert prompt.count(question(turn)) >= 1
        assert not REFERENCE.search(prompt)
        for passage in turn.passages:
            assert in_full(passage.text, prompt, labelled=annotate == "both")
        assert prompt.count("Most relevant above: ") <= (annotate == "note")
    print(f"hit ratio: {plain.hit_ratio:.3f} without, {ours.hit_ratio:.3f} with")  # noqa: T201
    assert ours.hit_ratio > plain.hit_ratio
    assert wrapped.planner.stats().resident_tokens > 0


async def test_chain_step_finds_more_in_the_cache(
    turns: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    plain, ours = start_engine(), start_engine()
    planner = ContextPlanner()
    steps: Mapping[Any, Runnable[Any, Any]] = {plain: RunnablePassthrough(), ours: context_reuse(planner)}
    for engine, step in steps.items():
        chain = (
            RunnablePassthrough.assign(context=itemgetter("input") | library)
            | step
            | RunnablePassthrough.assign(answer=create_stuff_documents_chain(chat_model(engine), context_prompt()))
        )
        for turn in turns[:TURNS]:
            assert (await chain.ainvoke({"input": question(turn)}))["answer"]
    for turn, answered in zip(turns[:TURNS], ours.answered, strict=True):
        system, human = answered.body["messages"]
        assert all(in_full(passage.text, system["content"]) for passage in turn.passages)
        note, _, asked = human["content"].rpartition("\n\n")
        assert asked == question(turn)
        assert note == "" or QUOTING.fullmatch(note)
    assert len(ours.answered) == TURNS
    assert ours.hit_ratio > plain.hit_ratio


# -- five turns of a conversation --------------------------------------------------------------------------------


def test_chain_that_rebuilds_its_context_never_refers(
    talk: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    engine = start_engine()
    chain = rag(ContextReuseRetriever(retriever=library, annotate="auto"), chat_model(engine)).with_retry(
        wait_exponential_jitter=False, stop_after_attempt=2
    )
    history: list[BaseMessage] = []
    for i, turn in enumerate(talk):
        engine.fail_next(i % 2)
        answer = chain.invoke(
            {"input": question(turn), "chat_history": history}, {"configurable": {"thread_id": "chat-1"}}
        )["answer"]
        history += [HumanMessage(question(turn)), AIMessage(answer)]
    assert len(engine.bodies) == 5 + 2
    assert len(engine.prompts) == 5
    for turn, prompt in zip(talk, engine.prompts, strict=True):
        assert not REFERENCE.search(prompt)
        assert all(in_full(passage.text, prompt) for passage in turn.passages)


def check_conversation(talk: Sequence[Any], engine: Any) -> None:
    """Check the prompts of an append-only chat: complete, without dangling references, and never rewritten."""
    assert len(engine.answered) == len(talk)
    sent = [answered.body["messages"] for answered in engine.answered]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before
    for turn, prompt in zip(talk, engine.prompts, strict=True):
        assert all(in_full(passage.text, prompt, labelled=True) for passage in turn.passages)
        for reference in REFERENCE.finditer(prompt):
            for label in referred(reference[0]):
                assert re.search(rf"^\[{re.escape(label)}\] ", prompt[: reference.start()], re.MULTILINE)
    assert len(referred(engine.prompts[-1])) >= len(talk[0].passages)
    assert len(REFERENCE.findall(engine.prompts[-1])) < len(talk), "one sentence per message"
    for text in {passage.text for turn in talk for passage in turn.passages}:
        assert engine.prompts[-1].count(shown(text)) == 1


def test_an_appending_chain_refers_to_what_its_prompt_holds(
    talk: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    engine = start_engine()

    def joined(inputs: dict[str, Any]) -> str:
        return "\n\n".join(
            format_document(document, PromptTemplate.from_template("{page_content}")) for document in inputs["context"]
        )

    def answered(prompt: Any) -> list[BaseMessage]:
        messages = prompt.to_messages()
        return [*messages, chat_model(engine).invoke(messages)]

    chain = (
        RunnablePassthrough.assign(context=itemgetter("input") | library)
        | context_reuse(placement="tail", annotate="labels")
        | RunnablePassthrough.assign(context=RunnableLambda(joined))
        | context_prompt(placement="tail")
        | RunnableLambda(answered)
    ).with_retry(wait_exponential_jitter=False, stop_after_attempt=2)
    history: list[BaseMessage] = []
    for i, turn in enumerate(talk):
        engine.fail_next(i % 2)
        messages = chain.invoke({"input": question(turn), "chat_history": history})
        history = messages[1:]
    assert len(engine.bodies) == 5 + 2
    check_conversation(talk, engine)


def test_retriever_in_an_appending_chat_refers_to_the_history(
    talk: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    engine = start_engine()
    model = chat_model(engine)
    retriever = ContextReuseRetriever(retriever=library, placement="tail", annotate="labels", shown_in="content")
    messages: list[BaseMessage] = []

    def ask(text: str) -> None:
        found = retriever.invoke(text, {"configurable": {"thread_id": "chat-1"}}, history=messages)
        context = "\n\n".join(document.page_content for document in found)
        prompt = [*messages, HumanMessage(f"{context}\n\n{text}")]
        messages[:] = [*prompt, model.invoke(prompt)]

    for i, turn in enumerate(talk):
        if i % 2:
            engine.fail_next(1)
            with pytest.raises(Exception, match="broken"):
                ask(question(turn))
        ask(question(turn))
    check_conversation(talk, engine)


def test_a_forked_history_gets_what_its_fork_lacks(
    talk: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    """The same conversation id, with its first turn edited away."""
    engine = start_engine()
    model = chat_model(engine)
    retriever = ContextReuseRetriever(retriever=library, placement="tail", annotate="labels", shown_in="content")
    messages: list[BaseMessage] = []
    for forked in (True, False, True):
        visible = [] if forked else messages
        found = retriever.invoke(question(talk[0]), {"configurable": {"thread_id": "chat-1"}}, history=visible)
        context = "\n\n".join(document.page_content for document in found)
        prompt = [*visible, HumanMessage(f"{context}\n\n{question(talk[0])}")]
        messages = [*prompt, model.invoke(prompt)]
    first, second, third = engine.prompts
    assert len(referred(second)) == len(talk[0].passages)
    assert third == first


# -- with a stream -----------------------------------------------------------------------------------------------


async def test_streamed_answer_has_every_passage_in_its_prompt(
    turns: Sequence[Any], library: BaseRetriever, start_engine: Make, chat_model: Make
) -> None:
    engine = start_engine()
    chain = rag(ContextReuseRetriever(retriever=library, annotate="auto"), chat_model(engine))
    parts = [part async for part in chain.astream({"input": question(turns[0])})]
    assert "".join(part.get("answer", "") for part in parts)
    assert all(in_full(passage.text, engine.prompts[0]) for passage in turns[0].passages)
