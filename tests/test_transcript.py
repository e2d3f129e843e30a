"""Transcript: nothing lost, nothing dangling, and only the past decides."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, Templates, Transcript

LONG = "The sea is 3,688 metres deep on average, and 10,935 metres at most."
REFERENCE = re.compile(r"\APlease refer to \[([^\]]+)\] in the previous conversation\.\Z")

# Few texts and ids, so that they collide; some that imitate a labelled block, a reference, or another's label.
texts = st.sampled_from(
    [
        LONG,
        LONG + " And wet.",
        f"[sea] {LONG}",
        f"First line, which is long enough for a reference to pay.\n[sea] {LONG}",
        "  [ctx-0f0f0f] A line that begins with blanks, and goes on for long enough to be a block of its own.",
        f"Please refer to [sea] in the previous conversation.\n{LONG}",
        "short",
        "",
    ]
)
blocks = st.builds(ContextBlock, texts, st.sampled_from([None, "sea", "sky", "not a label"]))
foreign = st.sampled_from(["", "How deep?", "[sea] A forgery.", "As [sea] says.", "a\n \t[sky]\nb", f"[sea] {LONG}"])
steps = st.lists(st.one_of(blocks, foreign), max_size=14)


def told(messages: list[ContextBlock | str], min_tokens: int = 0) -> list[str]:
    """The prompt's messages; strings are read, blocks are written."""
    transcript = Transcript(min_tokens=min_tokens)
    prompt: list[str] = []
    for message in messages:
        if isinstance(message, str):
            transcript.read(message)
            prompt.append(message)
        else:
            prompt.append(transcript.write(message))
    return prompt


def is_reference(message: ContextBlock | str, shown: str) -> bool:
    return isinstance(message, ContextBlock) and not shown.endswith(message.text)


@given(steps, st.sampled_from([0, 10, 64]))
def test_every_block_is_in_full_or_refers_to_where_it_is(messages: list[ContextBlock | str], min_tokens: int) -> None:
    prompt = told(messages, min_tokens)
    for i, (message, shown) in enumerate(zip(messages, prompt, strict=True)):
        if isinstance(message, str):
            assert shown == message
        elif is_reference(message, shown):
            reference = REFERENCE.match(shown)
            assert reference is not None
            label = reference[1]
            assert f"[{label}] {message.text}" in prompt[:i]
            lines = [line.lstrip() for earlier in prompt[:i] for line in earlier.splitlines()]
            naming = [line for line in lines if line.startswith(f"[{label}]")]
            first_lines = {f"[{label}] {message.text}".splitlines()[0]}
            assert set(naming) == first_lines, "the label stands in front of another text too"
        else:
            assert shown == message.text or re.fullmatch(r"\[[^\]]+\] ", shown.removesuffix(message.text))


@given(steps, st.integers(0, 14))
def test_only_the_past_decides(messages: list[ContextBlock | str], n: int) -> None:
    assert told(messages[:n]) == told(messages)[:n]


@given(st.lists(blocks, max_size=14))
def test_two_texts_never_share_a_label(requested: list[ContextBlock]) -> None:
    owners: dict[str, str] = {}
    for block, shown in zip(requested, told(list(requested)), strict=True):
        if not is_reference(block, shown):
            label = shown.removesuffix(block.text)
            assert owners.setdefault(label, block.text) == block.text


def test_a_citation_takes_no_label_away() -> None:
    sea = ContextBlock(LONG, id="sea")
    assert told([sea, "It is deep, as [sea] says.", sea])[-1] == "Please refer to [sea] in the previous conversation."


def test_a_line_that_begins_with_a_label_does() -> None:
    sea = ContextBlock(LONG, id="sea")
    again = told([sea, "[sea] It is shallow.", sea, sea])
    assert again[2] == f"[sea~{sea.fingerprint.hex()[:8]}] {LONG}"
    assert again[3] == f"Please refer to [sea~{sea.fingerprint.hex()[:8]}] in the previous conversation."


@pytest.mark.parametrize(
    "before", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\r\n\t", "\n\xa0", "\n\u200b", "\n\ufeff \x00"]
)
def test_whatever_looks_like_the_start_of_a_line_is_one(before: str) -> None:
    sea = ContextBlock(LONG, id="sea")
    assert told([sea, f"Mark this:{before}[s\u200bea] It is shallow.", sea])[2].startswith("[sea~")


def test_a_short_block_stays_as_it_is() -> None:
    assert told([ContextBlock("42", id="a")] * 2, min_tokens=1) == ["[a] 42", "[a] 42"]
    assert told([ContextBlock("42", id="a")] * 2, min_tokens=2) == ["42", "42"]
    assert told([ContextBlock("[b] 42"), ContextBlock(LONG, id="b")], min_tokens=8)[1].startswith("[b~")


def test_what_references_spare_is_counted() -> None:
    transcript = Transcript()
    for _ in range(3):
        transcript.write(ContextBlock("Evidence. " * 20, tokens=70))
    assert (transcript.references, transcript.reference_tokens) == (2, 140)


def test_the_wording_is_the_templates() -> None:
    transcript = Transcript(templates=Templates(location="See {label}."), min_tokens=0)
    assert [transcript.write(LONG).partition("]")[2][:8] for _ in range(2)] == [" The sea", "."]


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"templates": "x"}, TypeError, "templates"),
        ({"min_tokens": True}, TypeError, "min_tokens"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens"),
        ({"min_tokens": -1}, ValueError, "min_tokens"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        Transcript(**arguments)


def test_a_block_must_be_one() -> None:
    bad: Any = 7
    with pytest.raises(TypeError, match="int"):
        Transcript().write(bad)
