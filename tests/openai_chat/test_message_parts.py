"""Content parts of a planned prompt, between which cache marks can stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.openai.messages import messages_for

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
