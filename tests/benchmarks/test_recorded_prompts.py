"""The checker of `recorded_prompts` finds each mistake that is planted into a right prompt, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from recorded_prompts import Passage, PromptFindings, PromptMessage, answer_of, marked, number_of, without_labels

SKY = Passage("The sky is blue.\n[sea~123abc] It says so itself.", "acme")
SEA = Passage("The sea is deep.", "acme")
LONGER_SEA = Passage("The sea is deep.\nAnd more.", "acme")
ICE = Passage("Ice floats.\n\nWater does not.", "acme")

Prompt = list[PromptMessage]


def right_prompt() -> Prompt:
    """Return the second turn of a conversation: two passages are named, one is new."""
    first = "[sky~aaaaaa] The sky is blue.\n\\[sea~123abc] It says so itself.\n\n[sea~123abc] The sea is deep."
    answer = answer_of([PromptMessage("user", marked("What?", 1))])
    second = (
        "Please also use the context labelled [sky~aaaaaa], [sea~123abc] above in this conversation.\n\n"
        "[ice~bbbbbb] Ice floats.\n\nWater does not."
    )
    return [
        PromptMessage("system", "Answer from the context."),
        PromptMessage("user", f"{first}\n\n{marked('What is deep?', 1)}"),
        PromptMessage("assistant", answer),
        PromptMessage("user", f"{second}\n\n{marked('What else?', 2)}"),
    ]


def findings_of(prompt: Prompt, *, cut: bool = False) -> PromptFindings:
    findings = PromptFindings(asked={1: [SKY, SEA], 2: [SKY, ICE, SEA]})
    findings.check(2, [prompt], cut=cut)
    return findings


def changed(place: int, old: str, new: str) -> Callable[[Prompt], Prompt]:
    def change(prompt: Prompt) -> Prompt:
        message = prompt[place]
        assert old in message.text
        return [*prompt[:place], message._replace(text=message.text.replace(old, new, 1)), *prompt[place + 1 :]]

    return change


def test_right_prompt_has_no_mistake() -> None:
    findings = findings_of(right_prompt())
    assert (findings.references, findings.passages, findings.wrong) == (2, 3, 0)


@pytest.mark.parametrize(
    ("kinds", "spoil"),
    [
        ("dangling lost", changed(1, "[sea~123abc] The sea is deep.", "")),
        ("dangling lost", changed(1, "[sea~123abc] The sea is deep.", "[sea~123abc] The sea is dee")),
        ("dangling lost", changed(1, "[sea~123abc] The sea is deep.", "[sea~123abd] The sea is deep.")),
        ("dangling lost", lambda prompt: [prompt[0], *prompt[3:]]),
        ("dangling", changed(3, "[sea~123abc] above", "[sea~123abc], [sun] above")),
        ("lost", changed(3, ", [sea~123abc] above", " above")),
        ("lost", changed(3, "Water does not.", "")),
        ("lost", changed(3, "Please also use the context labelled", "\\Please also use the context labelled")),
        ("ambiguous", changed(1, "\\[sea~123abc]", "[sea~123abc]")),
        ("ambiguous", changed(0, "context.", "context.\n[sky~aaaaaa] Another sky.")),
        ("ambiguous", changed(3, "[ice~bbbbbb] Ice", "[sky~aaaaaa] Ice")),
        ("crossed", changed(0, "context.", "context. This is property of tenant globex.")),
    ],
)
def test_planted_mistake_is_found(kinds: str, spoil: Callable[[Prompt], Prompt]) -> None:
    findings = findings_of(spoil(right_prompt()), cut=True)
    assert {kind for kind in ("dangling", "lost", "ambiguous", "crossed") if getattr(findings, kind)} == set(
        kinds.split()
    )


def test_longer_passage_is_another_text() -> None:
    findings = PromptFindings(asked={1: [SKY, LONGER_SEA], 2: [SKY, ICE, SEA]})
    findings.check(2, [changed(1, "The sea is deep.", "The sea is deep.\nAnd more.")(right_prompt())])
    assert findings.dangling == 1


def test_mistake_in_an_earlier_turn_is_found_unless_the_history_was_cut() -> None:
    later: Sequence[PromptMessage] = [
        *right_prompt(),
        PromptMessage("assistant", answer_of(right_prompt())),
        PromptMessage("user", marked("And?", 3)),
    ]
    for cut in (False, True):
        findings = PromptFindings(asked={1: [SKY, SEA], 2: [SKY, ICE, SEA], 3: []})
        findings.check(3, [[later[0], *later[3:]]], cut=cut)
        assert findings.dangling == (0 if cut else 2)


def test_answer_repeats_the_last_question() -> None:
    assert number_of(right_prompt()) == 2
    assert answer_of(right_prompt()).endswith("(answered turn 2)")


def test_labels_of_blocks_and_references_are_left_out() -> None:
    text = right_prompt()[3].text
    assert "~" not in without_labels(text)
    assert "Ice floats." in without_labels(text)


def test_result_is_named_by_a_later_one_of_the_same_request() -> None:
    calls = [
        PromptMessage("assistant", f'{{"call_id": "{id}", "name": "fetch", "arguments": "{id}"}}') for id in ("a", "b")
    ]
    note = PromptMessage("tool", "b\n[Word for word the result of the earlier call fetch(a).]")
    whole, other = PromptMessage("tool", f"a\n{SEA.text}"), PromptMessage("tool", f"a\n{ICE.text}")
    question = PromptMessage("user", marked("What?", 1))
    for results, kinds in [([whole, note], ""), ([note, whole], "dangling"), ([other, note], "dangling lost")]:
        findings = PromptFindings(asked={1: [SEA]}, of_results=True)
        findings.check(1, [[*calls, *results, question]])
        assert {kind for kind in ("dangling", "lost", "ambiguous") if getattr(findings, kind)} == set(kinds.split())


def quoting_prompt() -> Prompt:
    """Return the second turn of a conversation without labels: two passages are named by their first words."""
    first = "The sky is blue.\n[sea~123abc] It says so itself.\n\nThe sea is deep."
    second = 'Also use the passages above that begin with "The sky is", "The sea is".\n\nIce floats.\n\nWater does not.'
    return [
        PromptMessage("user", f"{first}\n\n{marked('What is deep?', 1)}"),
        PromptMessage("assistant", answer_of([PromptMessage("user", marked("What?", 1))])),
        PromptMessage("user", f"{second}\n\n{marked('What else?', 2)}"),
    ]


@pytest.mark.parametrize(
    ("kinds", "spoil"),
    [
        ("", lambda prompt: prompt),
        ("", changed(0, "The sea is deep.", "[sea] The sea is deep.")),
        ("dangling lost", changed(0, "The sea is deep.", "The sea is dee")),
        ("dangling lost", changed(2, '"The sea is"', '"The sea was"')),
        ("dangling lost", lambda prompt: prompt[2:]),
        ("lost", changed(2, "Also use the passages", "\\Also use the passages")),
        ("lost", changed(2, ', "The sea is"', "")),
        ("ambiguous", changed(1, "That is so.", "**The sea is** flat.")),
        ("ambiguous", changed(2, "Ice floats.", "Ice floats.\n\nThe sky is green.\n\nIce floats.")),
    ],
)
def test_planted_mistake_is_found_without_labels(kinds: str, spoil: Callable[[Prompt], Prompt]) -> None:
    findings = findings_of(spoil(quoting_prompt()), cut=True)
    assert {kind for kind in ("dangling", "lost", "ambiguous", "crossed") if getattr(findings, kind)} == set(
        kinds.split()
    )
