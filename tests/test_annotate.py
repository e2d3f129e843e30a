"""Rendering: the same bytes always, and nothing in a text can pass for a header or an annotation."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner, Templates
from warmprefix.labels import LABEL_CHARACTERS

DEFAULT = Templates()
TEMPLATES = [
    DEFAULT,
    Templates(location="See {label}."),
    Templates(location="{{set}} see also: {label} {{above}}", order="Read {order}"),
    Templates(location="Refer to" + " " * 60 + "{label}"),
    Templates(location="Refer to the context at {label}", order="Refer to {order}, in this order"),
    Templates(location="Siehe STRAßE {label}", order="\u200bPriority: {order}"),
    Templates(location="Σ {label}", order="İn ǅ ﬁnal order: {order}"),
]
LABELS = ["Doc_1", "7", "ctx-2f235f9686cc", "a/b~0", "z" * 64]

_phrases = [phrase for t in TEMPLATES for phrase in (*t.order.split("{order}"), *t.location.split("{label}"))]
_pieces = [
    *("[", "]", "Doc_1", "[Doc_1]", "[Doc_1] ", "[7]", "[a b]", "[]", "\\", "\\\\", "x", " ", "  ", "\t", " > "),
    *("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\n\n"),
    *("\u200b", "\u200d", "\ufeff", "\u2060", "\xad", "\xa0", "\u3000", "\x00", "\x1f", "\ud800"),
    *("\u034f", "\u2800", "\u3164", "\ufe0f", "\U000e0100", "[\u200bDoc_1]", "[7\ufeff]", "[\u200b]"),
    *(*_phrases, *(phrase.strip() for phrase in _phrases), "PLEASE REFER TO", "please  refer\nto "),
    *(t.location_annotation("Doc_1") for t in TEMPLATES),
    *(t.order_annotation(["7", "Doc_1"]) for t in TEMPLATES),
]
texts = st.lists(st.sampled_from(_pieces), max_size=12).map("".join) | st.text(max_size=20)
templates = st.sampled_from(TEMPLATES)

MARKER = re.compile(r"\[[^\[\]]*\]")
HEADER = re.compile(rf"\[([{LABEL_CHARACTERS}]{{1,64}})\] ")


def escape(t: Templates, text: str) -> str:
    return t.block("L", text).removeprefix("[L] ")


def unescape(t: Templates, escaped: str) -> str:
    """The inverse of `escape`: from the left, drop each backslash that `escape` would put there again."""
    plain, copied = "", 0
    for marker in MARKER.finditer(escaped):
        plain += escaped[copied : marker.start()]
        copied = marker.start()
        if plain.endswith("\\") and escape(t, plain[:-1] + marker[0]) == escape(t, plain[:-1]) + "\\" + marker[0]:
            plain = plain[:-1]
    return plain + escaped[copied:]


# -- escaping ------------------------------------------------------------------------------------------------------


@given(templates, texts)
@example(DEFAULT, "[Doc_1] x\n\\[Doc_1]\\\\[Doc_1]")
@example(DEFAULT, "\\" * 50 + "[Doc_1]")
def test_escaping_can_be_undone(t: Templates, text: str) -> None:
    assert unescape(t, escape(t, text)) == text


@given(templates, texts, texts)
def test_distinct_texts_stay_distinct(t: Templates, a: str, b: str) -> None:
    assert (escape(t, a) == escape(t, b)) == (a == b)
    assert (escape(t, a) == escape(t, escape(t, a))) == (a == escape(t, a))


@given(templates, texts)
def test_escaping_only_adds_backslashes_before_brackets(t: Templates, text: str) -> None:
    escaped = escape(t, text)
    added = len(escaped) - len(text)
    assert 0 <= added <= text.count("[")
    assert escaped.replace("\\", "") == text.replace("\\", "")


@given(templates, st.sampled_from(LABELS), texts)
def test_rendering_depends_on_label_and_text_alone(t: Templates, label: str, text: str) -> None:
    again = Templates(order=t.order, location=t.location)
    assert t.block(label, text) == again.block(label, text) == f"[{label}] {escape(t, text)}"


@given(templates, texts, st.sampled_from(LABELS), st.lists(st.sampled_from(LABELS), min_size=1, max_size=3))
@example(TEMPLATES[3], TEMPLATES[3].location_annotation("7"), "7", ["7"])
@example(TEMPLATES[2], TEMPLATES[2].location_annotation("7"), "7", ["7"])
@example(TEMPLATES[6], "xΣ [7]", "7", ["7"])
def test_no_text_can_hold_an_annotation(t: Templates, text: str, label: str, labels: list[str]) -> None:
    notes = (t.location_annotation(label), t.order_annotation(labels))
    for tried in (text, *notes, text + notes[0], text + notes[1], unescape(t, notes[0]), unescape(t, notes[1])):
        for note in notes:
            assert note not in t.block(label, tried)


@given(templates, texts, st.sampled_from(["\n", "\r", "\u2028", " \n\u200b ", "", "\\"]))
def test_no_line_of_a_text_can_pass_for_a_header(t: Templates, text: str, before: str) -> None:
    for line in escape(t, f"{text}{before}[Doc_1] {text}").splitlines():
        assert not HEADER.match(line)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a list[int] and [1] in passing", "a list[int] and [1] in passing"),
        ("[1] At the start", "\\[1] At the start"),
        ("[a b] no label", "[a b] no label"),
        ("[" + "z" * 65 + "] too long for a label", "[" + "z" * 65 + "] too long for a label"),
        (" \t\u200b[1] after blanks", " \t\u200b\\[1] after blanks"),
        ("x\n\n[1] on a line", "x\n\n\\[1] on a line"),
        ("\\[1] escaped before", "\\\\[1] escaped before"),
        ("so please  REFER\tto [1]", "so please  REFER\tto \\[1]"),
        ("please\u200brefer \u2060to\ufeff [1]", "please\u200brefer \u2060to\ufeff \\[1]"),
        (
            "x\n\u3164\u034f[1] after characters that show nothing",
            "x\n\u3164\u034f\\[1] after characters that show nothing",
        ),
        ("[\u200b" * 2 + "1\ufe0f] with such characters in it", "[\u200b[\u200b1\ufe0f] with such characters in it"),
        (
            "[" + "\u200b" * 99 + "1\ufe0f] with such characters",
            "\\[" + "\u200b" * 99 + "1\ufe0f] with such characters",
        ),
        ("[\u200b] without a label", "[\u200b] without a label"),
        ("Please refer to the list [1]", "Please refer to the list [1]"),
    ],
)
def test_only_what_could_mislead_is_escaped(text: str, escaped: str) -> None:
    assert escape(DEFAULT, text) == escaped


# -- whole plans ---------------------------------------------------------------------------------------------------


@given(texts=st.lists(texts, max_size=6), again=st.permutations(range(6)), t=templates)
def test_a_parser_finds_the_planned_labels_and_nothing_else(texts: list[str], again: list[int], t: Templates) -> None:
    planner = ContextPlanner(templates=t)
    blocks = [ContextBlock(text, id=f"Doc_{i}" if i % 2 else None) for i, text in enumerate(texts)]
    for request in (blocks, [blocks[i] for i in again if i < len(blocks)]):
        with planner.planning(request, conversation="chat", placement="tail") as plan:
            found = [header[1] for line in plan.render().splitlines() if (header := HEADER.match(line))]
            assert found == [planned.label for planned in plan.blocks if planned.reference is None]


def test_the_papers_annotations() -> None:
    """ContextPilot, sections 4 and 5."""
    assert DEFAULT.order_annotation(["Doc_2", "Doc_1", "Doc_4"]) == (
        "Please read the context in the following priority order: [Doc_2] > [Doc_1] > [Doc_4] and answer the question."
    )
    assert DEFAULT.location_annotation("Doc_1") == "Please refer to [Doc_1] in the previous conversation."


# -- templates -----------------------------------------------------------------------------------------------------


def test_templates_can_be_reworded() -> None:
    t = Templates(order="Most relevant first: {order}.", location="{{See}} {label} above.")
    assert t.order_annotation(["a", "b"]) == "Most relevant first: [a] > [b]."
    assert t.location_annotation("a") == "{See} [a] above."
    assert t == Templates(order="Most relevant first: {order}.", location="{{See}} {label} above.") != DEFAULT


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Read on.", "must hold {label} once and no other field"),
        ("", "must hold {label} once and no other field"),
        ("See {label} and {label}.", "must hold {label} once and no other field"),
        ("See {label} of {rank}.", "must hold {label} once and no other field"),
        ("See {order}.", "must hold {label} once and no other field"),
        ("See {}.", "must hold {label} once and no other field"),
        ("See {0}.", "must hold {label} once and no other field"),
        ("See {label!r}.", "must hold {label} once and no other field"),
        ("See {label:>9}.", "must hold {label} once and no other field"),
        ("See {label.__class__}.", "must hold {label} once and no other field"),
        ("See {{label}}.", "must hold {label} once and no other field"),
        ("See {label.", "unbalanced braces"),
        ("See label}.", "unbalanced braces"),
        ("See\n{label}.", "must be one line"),
        ("See {label}.\n", "must be one line"),
        ("See {label}\u2028.", "must be one line"),
        ("{label} stands above.", "needs words before {label}"),
        ("  {label} stands above.", "needs words before {label}"),
        ("[Note] See {label}.", "needs words before {label}"),
        ("Refer to [context] at {label}", "needs words before {label}, no bracket"),
        ("See \\{label}.", "needs words before {label}"),
    ],
)
def test_a_bad_template_is_named(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^location template .*{re.escape(message)}"):
        Templates(location=template)
    message = message.replace("{label}", "{order}")
    swapped = template.replace("{order}", "{rank}").replace("{label", "{order").replace("label}", "order}")
    with pytest.raises(ValueError, match=f"^order template .*{re.escape(message)}"):
        Templates(order=swapped)


@pytest.mark.parametrize("template", [None, 3, b"See {label}."])
def test_a_template_of_another_type_is_named(template: str) -> None:
    with pytest.raises(TypeError, match=f"location template must be a str, got {type(template).__name__}"):
        Templates(location=template)
