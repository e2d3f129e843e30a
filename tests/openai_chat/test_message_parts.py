"""Content parts of a planned prompt, between which cache marks can stand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_requests.block_places import in_parts

_TEXTS = st.lists(st.text(max_size=30), max_size=8)


@given(turns=st.lists(_TEXTS, min_size=1, max_size=4), placement=st.sampled_from(["head", "tail"]))
def test_parts_join_to_the_rendered_prompt(turns: list[list[str]], placement: str) -> None:
    planner = ContextPlanner()
    for texts in turns:
        blocks = [ContextBlock(text) for text in texts]
        plan = planner.plan(blocks, conversation="chat", placement=placement)  # type: ignore[arg-type]
        assert "".join(plan.parts()) == plan.render()
        assert all(plan.parts())
        planner.commit(plan)


@pytest.mark.parametrize("placement", ["head", "tail"])
def test_message_parts_join_to_the_plain_message(placement: str) -> None:
    blocks = [ContextBlock("The sea is deep.", id="sea"), ContextBlock("The sky is high.", id="sky")]
    plan = ContextPlanner().plan(blocks, placement=placement)  # type: ignore[arg-type]
    plain, divided = messages_for(plan, "How deep?"), messages_for(plan, "How deep?", parts=True)
    parts = divided[-1]["content"]
    assert [part["type"] for part in parts] == ["text"] * (len(plan.parts()) + 1)
    assert "".join(part["text"] for part in parts) == plain[-1]["content"]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("route", ["chat", "messages", "responses"])
def test_a_text_with_the_context_is_sent_in_parts(route: Any, labels: bool) -> None:
    plan = ContextPlanner().plan([ContextBlock(f"passage {number}", id=str(number)) for number in range(3)])
    texts = [planned.render() if labels else planned.text for planned in plan.blocks]
    text = "Context:\n---\n" + "\n".join(texts) + "\n---\nWhy?"
    name = "input" if route == "responses" else "messages"
    body = {name: [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text, "name": "a"}]}
    first, second = in_parts(route, body, plan)[name]
    assert first == body[name][0]
    found = [part["text"] for part in second["content"]]
    assert found == [f"Context:\n---\n{texts[0]}", f"\n{texts[1]}", f"\n{texts[2]}", "\n---\nWhy?"]
    assert second["name"] == "a"
    assert {part["type"] for part in second["content"]} == {"input_text" if route == "responses" else "text"}


def test_other_texts_stay_as_they_are() -> None:
    plan = ContextPlanner().plan([ContextBlock(f"passage {number}", id=str(number)) for number in range(3)])
    for content in (plan.blocks[0].text, [{"type": "text", "text": plan.render()}], None):
        body = {"messages": [{"role": "user", "content": content}]}
        assert in_parts("chat", body, plan) is body
    (only,) = in_parts("responses", {"input": plan.render()}, plan)["input"]
    assert "".join(part["text"] for part in only["content"]) == plan.render()
