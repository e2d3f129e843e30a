"""The messages of a plan: the context where it was planned to be, and nothing that would break a promise."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for

SEA = ContextBlock(
    "The sea is 3,688 metres deep on average, and 10,935 metres at most, in the Mariana trench.", id="sea"
)
SKY = ContextBlock("The sky is blue, for air scatters light of short waves more than light of long ones.", id="sky")


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_a_head_plan_opens_the_first_user_message_in_every_turn() -> None:
    plan = ContextPlanner().plan([SEA, SKY])
    context = plan.render()
    assert messages_for(plan, "Q2?", preamble="S") == [system("S"), user(f"{context}\n\nQ2?")]
    earlier = [user("Q1?"), assistant("A1.")]
    assert messages_for(plan, "Q2?", earlier, "S") == [
        system("S"), user(f"{context}\n\nQ1?"), assistant("A1."), user("Q2?"),
    ]  # fmt: skip
    assert messages_for(plan, "Q2?", [system("S"), *earlier])[:2] == [system("S"), user(f"{context}\n\nQ1?")]
    greeted = messages_for(plan, "Q2?", [assistant("Hello.")], "S")
    assert greeted == [system("S"), user(context), assistant("Hello."), user("Q2?")]
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    seen = messages_for(plan, "Q2?", [user([picture]), assistant("A1.")])
    assert seen[0] == user([{"type": "text", "text": context}, picture])
    assert earlier == [user("Q1?"), assistant("A1.")]


def test_a_head_prompt_is_a_batchs_prompt() -> None:
    batch = ContextPlanner().plan_batch({"q": [SEA, SKY]}, "relevance", preamble="S")
    (request,) = batch.requests
    assert messages_for(request.plan, "", preamble="S") == request.messages()


def test_nothing_retrieved_is_a_plain_chat() -> None:
    empty = ContextPlanner().plan([])
    assert messages_for(empty, "Q?") == [user("Q?")]
    assert messages_for(empty, "Q?", [assistant("Hello.")]) == [assistant("Hello."), user("Q?")]


def test_a_tail_plan_leaves_the_history_as_it_is() -> None:
    planner = ContextPlanner(annotate="both")
    first = planner.plan([SEA], placement="tail", history=[])
    history = messages_for(first, "Q1?", preamble="S")
    assert history == [system("S"), user(f"{SEA_SHOWN}\n\nQ1?")]
    history.append(assistant("A1."))
    second = planner.plan([SEA, SKY], placement="tail", history=history)
    assert len(second.references) == 1
    messages = messages_for(second, "Q2?", history)
    assert messages[:-1] == history
    assert messages[-1] == user(f"{second.render()}\n\nQ2?")


SEA_SHOWN = f"[sea] {SEA.text}"


def test_the_sdks_own_messages_are_taken() -> None:
    answer = ChatCompletionMessage(role="assistant", content="A1.")
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calling = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    history: list[Any] = [
        user("Q1?"),
        answer,
        user("Q2?"),
        calling,
        {"role": "tool", "tool_call_id": "t", "content": "It is."},
    ]
    plan = ContextPlanner().plan([SEA])
    messages = messages_for(plan, "Q3?", history)
    assert messages == [
        user(f"{SEA.text}\n\nQ1?"), assistant("A1."), user("Q2?"), {"role": "assistant", "tool_calls": [call]},
        history[-1], user("Q3?"),
    ]  # fmt: skip
    assert history[1] is answer
    shown = [user(ContextPlanner(annotate="both").plan([SEA], placement="tail", history=[]).render()), *history]
    assert ContextPlanner(annotate="both").plan([SEA], placement="tail", history=shown).references
    with pytest.raises(TypeError, match="history"):
        messages_for(plan, "Q?", [ChatCompletionMessage])  # type: ignore[list-item]


def test_no_reference_dangles() -> None:
    planner = ContextPlanner(annotate="both")
    first = planner.plan([SEA], conversation="c", placement="tail")
    planner.commit(first)
    second = planner.plan([SEA], conversation="c", placement="tail")
    assert second.references
    with pytest.raises(ValueError, match="got none: this is turn 2"):
        messages_for(second, "Q2?")
    with pytest.raises(ValueError, match="got none"):
        messages_for(second, "Q2?", [system("S")])
    shown = first.render()
    for lost in ("Q1?", f"{shown[:-9]}\n\nQ1?", f"{SEA.text}\n\nQ1?"):
        with pytest.raises(ValueError, match=r"must hold block \[sea~[0-9a-f]+\] in full"):
            messages_for(second, "Q2?", [user(lost), assistant("A1.")])
    kept = [*messages_for(first, "Q1?"), assistant("A1.")]
    assert messages_for(second, "Q2?", kept)[:-1] == kept
    planner.abandon(second)
    third = planner.plan([SKY], conversation="c", placement="tail")
    assert not third.references
    with pytest.raises(ValueError, match="earlier turns"):
        messages_for(third, "Q2?")


def test_a_preamble_comes_once() -> None:
    planner = ContextPlanner()
    for plan in (planner.plan([SEA]), planner.plan([SEA], placement="tail")):
        with pytest.raises(ValueError, match="preamble must be None"):
            messages_for(plan, "Q?", [system("S")], "S")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"plan": "text"}, "plan"),
        ({"question": None}, "question"),
        ({"preamble": 7}, "preamble"),
        ({"history": "text"}, "history"),
        ({"history": {"role": "user"}}, "history"),
        ({"history": ["text"]}, "history"),
    ],
)
def test_other_types_are_named(wrong: dict[str, Any], name: str) -> None:
    given = {"plan": ContextPlanner().plan([SEA]), "question": "Q?", **wrong}
    with pytest.raises(TypeError, match=name):
        messages_for(**given)
