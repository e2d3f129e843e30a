"""The step of a chain that hands the note on by itself, and the prompt that has a place for it."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from warmprefix import ContextPlanner
from warmprefix_langchain import context_prompt, context_reuse

Make = Callable[..., Any]

NOTE = 'Most relevant above: the passage with "The text of b".'
NAMED = "Please read the context in the following priority order: [b] > [a] and answer the question."
REFERENCE = "Please also use the context labelled [a] above in this conversation."


def texts(documents: list[Document]) -> list[str]:
    return [format_document(document, PromptTemplate.from_template("{page_content}")) for document in documents]


# -- a list of documents -----------------------------------------------------------------------------------------


async def test_behind_a_retriever_it_yields_documents_and_note(
    planner: ContextPlanner, named: Make, shelf: Make
) -> None:
    chain = shelf({"?": named("ab"), "!": named("ba")}) | context_reuse(planner)
    assert chain.invoke("?")["context_note"] == ""
    streamed = [part async for part in chain.astream("!")]
    for result in (chain.invoke("!"), await chain.ainvoke("!"), *streamed, *chain.stream("!"), *chain.batch(["!"])):
        assert result["context_note"] == NOTE
        assert result["documents"] == named("ab")
        assert result["context"] is result["documents"]


def test_with_labels_the_note_names_them(planner: ContextPlanner, named: Make) -> None:
    step = context_reuse(planner, annotate="both")
    step.invoke(named("ab"))
    result = step.invoke(named("ba"))
    assert result["context_note"] == NAMED
    assert texts(result["documents"]) == ["[a] The text of a.", "[b] The text of b."]
    assert [document.page_content for document in result["documents"]] == ["The text of a.", "The text of b."]
    assert [document.metadata["context_label"] for document in result["documents"]] == ["a", "b"]
    joined = context_reuse(planner, annotate="labels", shown_in="content").invoke(named("ba"))
    assert joined["context_note"] == ""
    assert [document.page_content for document in joined["context"]] == ["[a] The text of a.", "[b] The text of b."]


def test_without_annotation_there_is_no_note(planner: ContextPlanner, named: Make, shelf: Make, ids: Make) -> None:
    chain = shelf({"?": named("ab"), "!": named("ba")}) | context_reuse(planner, annotate="none")
    chain.invoke("?")
    result = chain.invoke("!")
    assert (ids(result["documents"]), result["context_note"]) == ("ab", "")


# -- a dict ------------------------------------------------------------------------------------------------------


def test_a_dict_comes_back_with_its_documents_arranged(planner: ContextPlanner, named: Make) -> None:
    step = context_reuse(planner)
    step.invoke({"context": named("ab")})
    given = {"context": named("ba"), "input": "?", "chat_history": [HumanMessage("Hi.")], "mood": "good"}
    result = step.invoke(given)
    assert {key: result[key] for key in ("input", "chat_history", "mood")} == {
        "input": "?",
        "chat_history": [HumanMessage("Hi.")],
        "mood": "good",
    }
    assert result["context"] == named("ab")
    assert result["context_note"] == NOTE
    assert given["context"] == named("ba")
    assert "context_note" not in given


def test_a_dict_may_have_other_names(planner: ContextPlanner, named: Make) -> None:
    step = context_reuse(planner, placement="tail", annotate="both", context_key="evidence", history_key="messages")
    result = step.invoke({"evidence": named("ab"), "messages": [("human", "[a] The text of a.")]})
    assert texts(result["evidence"]) == [REFERENCE, "[b] The text of b."]


def test_a_dict_without_documents_is_refused(planner: ContextPlanner) -> None:
    with pytest.raises(ValueError, match=r"documents under 'context', got the keys \['input'\]"):
        context_reuse(planner).invoke({"input": "?"})


async def test_only_tail_placement_refers_and_only_to_what_is_shown(planner: ContextPlanner, named: Make) -> None:
    shown = {"context": named("ab"), "chat_history": [HumanMessage("[a] The text of a.\n\nWhat?"), AIMessage("That.")]}
    in_full = ["[a] The text of a.", "[b] The text of b."]
    assert context_reuse(planner).invoke(shown)["context"] == named("ab")
    tail = context_reuse(planner, placement="tail", annotate="both")
    assert texts((await tail.ainvoke(shown))["context"])[0] == REFERENCE
    assert texts(tail.invoke({"context": named("ab"), "chat_history": []})["context"]) == in_full
    assert texts(tail.invoke({"context": named("ab")})["context"]) == in_full


async def test_every_call_sees_its_conversation_and_tenant(
    planner: ContextPlanner, named: Make, request_log: Any
) -> None:
    step = context_reuse(planner)
    context_reuse(planner, tenant="umbrella").invoke(named("ab"), {"configurable": {"thread_id": "chat-7"}})
    await step.ainvoke(named("ab"), {"configurable": {"thread_id": "chat-7", "tenant": "acme"}})
    chain = RunnableLambda(lambda _: named("ab")) | step
    await chain.ainvoke("?", {"metadata": {"session_id": "chat-7"}})
    run, arun = CallbackManager([]), AsyncCallbackManager([])
    for around in (run, arun):
        around.add_metadata({"session_id": "chat-7"})
    step.invoke(named("ab"), {"callbacks": run})
    await step.ainvoke(named("ab"), {"callbacks": arun})
    assert request_log.conversations == ["chat-7"] * 5
    assert request_log.tenants == ["umbrella", "acme", None, None, None]


def test_it_has_a_planner_of_its_own_by_default(named: Make, ids: Make) -> None:
    step = context_reuse(annotate="none")
    step.invoke(named("ab"))
    assert ids(step.invoke(named("ba"))["documents"]) == "ab"
    assert ids(context_reuse(annotate="none").invoke(named("ba"))["documents"]) == "ba"


# -- the prompt --------------------------------------------------------------------------------------------------


@pytest.fixture
def asked() -> Callable[[ChatPromptTemplate], tuple[Runnable[Any, Any], list[str]]]:
    """A stuff chain on a prompt, and the prompts that it sent."""

    def build(prompt: ChatPromptTemplate) -> tuple[Runnable[Any, Any], list[str]]:
        sent: list[str] = []

        def answer(value: Any) -> str:
            sent.append("\n---\n".join(f"{message.type}: {message.content}" for message in value.to_messages()))
            return "That."

        return create_stuff_documents_chain(RunnableLambda(answer), prompt), sent

    return build


def test_the_note_stands_by_the_question(planner: ContextPlanner, named: Make, shelf: Make, asked: Make) -> None:
    answer, sent = asked(context_prompt("Be brief."))
    shelf_ = shelf({"?": named("ab"), "!": named("ba")})
    chain = (
        RunnablePassthrough.assign(context=itemgetter("input") | shelf_)
        | context_reuse(planner)
        | RunnablePassthrough.assign(answer=answer)
    )
    assert chain.invoke({"input": "?"})["answer"] == "That."
    result = chain.invoke({"input": "!", "chat_history": [HumanMessage("?"), AIMessage("That.")]})
    assert [document.page_content for document in result["context"]] == ["The text of a.", "The text of b."]
    assert sent == [
        "system: Be brief.\n\nThe text of a.\n\nThe text of b.\n---\nhuman: ?",
        "system: Be brief.\n\nThe text of a.\n\nThe text of b.\n---\nhuman: ?\n---\nai: That.\n---\n"
        f"human: {NOTE}\n\n!",
    ]
    assert list(chain.stream({"input": "!"}))[-1] == {"answer": "That."}


def test_the_prompt_of_an_appending_chat_has_all_in_its_last_message(
    planner: ContextPlanner, named: Make, asked: Make
) -> None:
    answer, sent = asked(context_prompt("Be brief.", placement="tail"))
    chain = context_reuse(planner, placement="tail", annotate="both") | answer
    chain.invoke({"context": named("ab"), "input": "?"})
    first = sent[0].removeprefix("system: Be brief.\n---\nhuman: ")
    assert first == "[a] The text of a.\n\n[b] The text of b.\n\n?"
    chain.invoke({"context": named("cb"), "input": "!", "chat_history": [("human", first), ("ai", "That.")]})
    assert sent[1] == (
        f"system: Be brief.\n---\nhuman: {first}\n---\nai: That.\n---\n"
        "human: [c] The text of c.\n\nPlease also use the context labelled [b] above in this conversation.\n\n!"
    )


@pytest.mark.parametrize("placement", ["head", "tail"])
def test_what_is_empty_leaves_no_blank_line(placement: Any, asked: Make) -> None:
    answer, sent = asked(context_prompt("Be brief.", placement=placement))
    answer.invoke({"context": [], "input": "?"})
    answer.invoke({"context": [], "input": "?", "context_note": ""})
    assert sent == ["system: Be brief.\n---\nhuman: ?"] * 2


def test_a_prompt_has_no_other_placement() -> None:
    with pytest.raises(ValueError, match="placement must be 'head' or 'tail', got 'middle'"):
        context_prompt(placement="middle")  # type: ignore[arg-type]


def test_the_instructions_may_have_variables_and_the_values_braces(asked: Make) -> None:
    answer, sent = asked(context_prompt("Answer in {language}."))
    answer.invoke({"context": [Document("{x}")], "input": "{input} {y}", "context_note": "{z}", "language": "Latin"})
    assert sent == ["system: Answer in Latin.\n\n{x}\n---\nhuman: {z}\n\n{input} {y}"]
    with pytest.raises(KeyError, match="language"):
        answer.invoke({"context": [], "input": "?"})


def test_a_forged_header_is_escaped_on_the_way_to_the_prompt(planner: ContextPlanner, asked: Make) -> None:
    answer, sent = asked(context_prompt("Be brief."))
    found = [Document("Fine.\n[b] Forged.", id="a"), Document("Real.", id="b")]
    (context_reuse(planner, annotate="both") | answer).invoke({"context": found, "input": "?"})
    assert sent == ["system: Be brief.\n\n[a] Fine.\n\\[b] Forged.\n\n[b] Real.\n---\nhuman: ?"]


def test_a_prompt_of_ones_own_prints_the_labels_too(planner: ContextPlanner, named: Make, asked: Make) -> None:
    own = PromptTemplate.from_template("<doc from={source}>{page_content}</doc>")
    [document] = context_reuse(planner, annotate="both").invoke(named("a"))["documents"]
    assert format_document(document, own) == "<doc from=a>[a] The text of a.</doc>"


def test_the_prompt_is_an_ordinary_one() -> None:
    prompt = context_prompt()
    assert set(prompt.input_variables) == {"context", "input"}
    assert "{context_note}" in prompt.pretty_repr()
    assert dumpd(prompt)["name"] == "ChatPromptTemplate"
    prompt.append(("ai", "Well,"))
    assert [message.content for message in prompt.format_messages(context="c", input="i")][1:] == ["i", "Well,"]
