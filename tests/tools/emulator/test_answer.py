"""Answers depend on the prompt only, state that no model ran, and stop at the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.emulator import encode
from warmprefix_tools.emulator.answers import compose_answer
from warmprefix_tools.emulator.tokenizer import MESSAGE_END

prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@given(prompts)
def test_whole_answer_states_that_no_model_ran_and_stops(prompt: list[int]) -> None:
    answer = compose_answer(prompt, max_tokens=1000)
    assert answer.text.startswith("[warmprefix emulator: no model ran")
    assert f"{len(prompt)} tokens" in answer.text
    assert answer.finish_reason == "stop"
    assert list(answer.token_ids) == [*encode(answer.text), MESSAGE_END]


def test_different_prompts_have_different_answers() -> None:
    assert len({compose_answer([number], 1000).text for number in range(100)}) == 100
