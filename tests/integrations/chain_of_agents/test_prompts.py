"""The wording of prompts."""

from __future__ import annotations

import pytest

from warmprefix_chain_of_agents import Prompts
from warmprefix_chain_of_agents.prompts import Unit


def test_the_default_wording_is_that_of_the_paper() -> None:
    assert Prompts().for_worker("The text.", "A summary.", "Why?") == (
        "The text.\n\n"
        "Here is the summary of the previous source text: A summary.\n\n"
        "Question: Why?\n\n"
        "You need to read current source text and summary of previous source text (if any) and generate a summary to"
        " include them both. Later, this summary will be used for other agents to answer the Query, if any. So please"
        " write the summary that can include the evidence for answering the Query."
    )
    assert Prompts().for_manager([Unit("A summary.", ("d1",))], 0, "Why?") == (
        "The following are given passages. However, the source text is too long and has been summarized. You need to"
        " answer based on the summary: A summary.\n\nQuestion: Why?\n\nAnswer:"
    )


def test_several_units_are_numbered_and_name_their_documents() -> None:
    units = [Unit("First.", ("d1", "d2")), Unit("Second.", ("d3",))]
    prompt = Prompts().for_manager(units, 2, "Why?")
    assert "the summary: Summary 1 (of [d1], [d2]): First.\n\nSummary 2 (of [d3]): Second.\n\n2 of the" in prompt


def test_braces_in_what_is_filled_in_stay() -> None:
    prompt = Prompts().for_worker("{documents} {0}", "{unit} {question}", "{unit} {}?")
    assert "{documents} {0}" in prompt
    assert "text: {unit} {question}" in prompt
    assert "Question: {unit} {}?" in prompt


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"task": "Answer!"}, "task must hold {question} and no other placeholder, got 'Answer!'"),
        ({"answer": "{question} {unit}"}, "answer must hold {question} and no other placeholder, got "),
        ({"answer": "{question:d}"}, "answer must hold {question} and no other placeholder, got '{question:d}'"),
        ({"answer": "{question!r}"}, "answer must hold {question} and no other placeholder, got '{question!r}'"),
        ({"previous": "{unit"}, "previous has unbalanced braces: '{unit'"),
        ({"one_of_several": "{unit}"}, "one_of_several must hold {labels}, {number}, {unit} and no other"),
    ],
)
def test_templates_are_checked(template: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=r"must hold|unbalanced") as refused:
        Prompts(**template)
    assert str(refused.value).startswith(message)


def test_templates_are_text() -> None:
    with pytest.raises(TypeError, match="worker_role must be a str, got NoneType"):
        Prompts(worker_role=None)  # type: ignore[arg-type]
    assert Prompts(worker_role="Mind the {braces}.").worker_role == "Mind the {braces}."
