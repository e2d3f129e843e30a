"""Transcript: first occurrences keep their bytes, and every reference leads to the text that it replaces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_requests import Transcript

SEA = """\
The sea is 3,688 metres deep on average, and 10,935 metres at its deepest point, in the Mariana Trench. It covers seven
tenths of the planet and holds 97 % of its water. A quarter of its floor has been mapped in detail; the rest is measured
from satellites, which measure how the water's surface follows gravity."""
SKY = """\
The sky looks blue since the air scatters short waves more than long ones.

In the evening light comes a longer way through it, and what is left of it is red. On Mars it is the other way round:
dust scatters the long waves, so the sky is the colour of butterscotch by day, and blue around a setting sun.
"""
AGAIN = "[Ran again; word for word the result of the earlier call "
WHOLE, PART = "[Word for word the result of the earlier call ", "[Word for word in the result of the earlier call "


@dataclass
class Step:
    """A call or a result; the id is the call's."""

    id: str | None


@dataclass
class Call(Step):
    """A tool call."""

    name: str
    arguments: object


@dataclass
class Result(Step):
    """A tool's result: documents with the same text between them, or one text if `between` is None."""

    documents: list[str]
    between: str | None = None
    skipped: bool = False
    in_parts: bool = False

    @property
    def parts(self) -> list[str]:
        if self.in_parts:
            return [f"{text}\n\n" for text in self.documents]
        return [(self.between or "").join(self.documents)]


def run(steps: Sequence[Step], transcript: Transcript) -> list[str]:
    """Return the texts that the model receives for the results."""
    sent: list[str] = []
    for step in steps:
        if isinstance(step, Call):
            transcript.call(step.id, step.name, step.arguments)
            continue
        assert isinstance(step, Result)
        if step.skipped:
            transcript.skip(step.id)
            sent.append("".join(step.parts))
        else:
            documents = [] if step.between is None else step.documents
            sent.append("".join(part or "" for part in transcript.parts(step.id, step.parts, documents)))
    return sent


def read(*texts: str) -> list[Step]:
    """Return one call per text, all shown the same, each with its result."""
    return [step for i, text in enumerate(texts) for step in (Call(f"c{i}", "read", "{}"), Result(f"c{i}", [text]))]


def sent_for(*steps: Step, **options: Any) -> list[str]:
    return run(steps, Transcript(**options))


# -- A model's reading of a prompt ---------------------------------------------------------------------------------


@dataclass
class Reader:
    """Rebuilds the results from a prompt: its calls, the rewritten results, and where their passages begin."""

    calls: list[tuple[str | None, str]] = field(default_factory=list)
    results: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)
    """Call number: as sent, as rebuilt, and its passages."""
    is_certain: bool = True
    """True if the call of the latest result is the only one with its id that waits."""

    def call(self, call: Call) -> None:
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        line = " ".join(part.strip() for part in arguments.splitlines() if part.strip())
        self.calls.append((call.id, f"{call.name}({line if len(line) <= 200 else line[:199] + '…'})"))

    def result(self, result: Result, sent: str) -> str:
        waiting = [i for i, (id, _) in enumerate(self.calls) if id == result.id and i not in self.results]
        own = waiting[0] if waiting else None
        self.is_certain = len(waiting) == 1  # of calls with one id, the transcript does not choose
        rebuilt = sent if result.skipped else self.rebuild(sent, own)
        if own is not None:
            self.results[own] = ("", "", []) if result.skipped else (sent, rebuilt, result.documents)
        return rebuilt

    def rebuild(self, sent: str, own: int | None) -> str:
        whole = next((lead for lead in (WHOLE, AGAIN) if sent.startswith(lead)), None)
        if whole is not None:
            number, rest = self.named(sent[len(whole) :], own)
            assert rest == ".]"
            if own is not None and self.is_certain:
                shown = self.calls[own][1]
                others = [other for _, other in self.calls[number:own] if other != shown]
                assert (whole == AGAIN) == (self.calls[number][1] == shown and others != [])
            as_sent, rebuilt, _ = self.results[number]
            assert as_sent == rebuilt, "the result that it names is no first occurrence"
            return rebuilt
        before, found, after = sent.partition(PART)
        if not found:
            return sent
        number, rest = self.named(after, own)
        quotes = re.match(r': the passages? that begins? ((?:"(?:[^"\\]|\\.)*"(?:, )?)+)\.\]', rest)
        assert quotes is not None
        texts = [
            self.passage(number, json.loads(f'"{quote}"')) for quote in re.findall(r'"((?:[^"\\]|\\.)*)"', quotes[1])
        ]
        return before + "\n\n".join(texts) + self.rebuild(rest[quotes.end() :], own)

    def named(self, text: str, own: int | None) -> tuple[int, str]:
        """Return the call that a reference names, and what follows the name."""
        shown = max({shown for _, shown in self.calls if text.startswith(shown)}, key=len)
        rest = text[len(shown) :]
        alike = [i for i, (_, other) in enumerate(self.calls) if other == shown]
        numbered = re.match(r", number (\d+) of such calls", rest)
        if numbered:
            return alike[int(numbered[1]) - 1], rest[numbered.end() :]
        alike = [i for i in alike if i != own]
        rebuilt = {self.results[i][1] if i in self.results else None for i in alike}
        assert len(rebuilt) == 1, "several calls look like this and gave different results"
        return alike[0], rest

    def passage(self, number: int, quote: str) -> str:
        sent, _, passages = self.results[number]
        assert sent.count(quote) == 1
        place = sent.index(quote)
        stripped = [passage.strip("\r\n") for passage in passages]
        return max((text for text in stripped if text.startswith(quote) and sent.startswith(text, place)), key=len)


def check(steps: Sequence[Step], sent: Sequence[str]) -> None:
    """Check that a reader gets every result from what was sent, with its own bytes."""
    reader, outputs = Reader(), iter(sent)
    for step in steps:
        if isinstance(step, Call):
            reader.call(step)
        elif isinstance(step, Result):
            assert reader.result(step, next(outputs)) == "".join(step.parts)


# -- Any session ---------------------------------------------------------------------------------------------------

TOML = '[tool.pytest]\naddopts = "-q"\n[Doc_1]\nvalue = "[tool.ruff]"\n' * 6
LOG = "[ERROR] 12:00:01 connection refused\n[ctx-0f0f0f] retry\n" * 6
CITED = "As was shown [1], and again in [2].\n\n[1] Smith et al.\n\n[2] Jones.\n" * 5
ROWS = json.dumps([{"id": number, "name": f"row {number}"} for number in range(12)])
TEXTS = [
    SEA,
    SKY,
    SEA + "And wet.",
    f"{SEA}\n\n{SKY}",
    SKY + SEA,
    TOML,
    LOG,
    CITED,
    ROWS,
    f"\n{ROWS}\r\n",
    "Short.",
    "",
]
TEXTS += ["Ü" * 300, "x" * 300, "# Title\n" + SEA, "# Title\n" + SKY, 'He wrote "so", \\ and\u2028went. ' * 12]
ARGUMENTS: list[object] = ["", "{}", {}, {"q": "sea"}, '{"q":"sea"}', '{\n  "q": "sea"\n}', {"q": "s" * 300 + "1"}]
ARGUMENTS += [{"q": "s" * 300 + "2"}, {"q": "), number 2 of such calls"}, ["Ü", None, 1.5], 'a "b" {call} \r\n c']
a_text = st.sampled_from(TEXTS)


@st.composite
def sessions(draw: st.DrawFn) -> list[Step]:
    """Turns of up to three parallel calls; some calls or results are missing, skipped, or share an id."""
    steps: list[Step] = []
    for turn in range(draw(st.integers(1, 6))):
        shared = draw(st.integers(0, 9)) == 0
        calls = [
            Call(
                "same" if shared else f"{turn}.{i}",
                draw(st.sampled_from(["read", "search"])),
                draw(st.sampled_from(ARGUMENTS)),
            )
            for i in range(draw(st.integers(1, 3)))
        ]
        cut = draw(st.integers(0, 9)) == 0
        steps += [] if cut else calls
        for call in calls:
            if draw(st.integers(0, 9)) > 0:
                between = draw(st.sampled_from([None, None, "\n\n", "\nSource: sea\n", ""]))
                documents = draw(st.lists(a_text, min_size=1, max_size=1 if between is None else 4))
                in_parts = between == "\n\n" and draw(st.booleans())
                steps.append(Result(call.id, documents, between, draw(st.integers(0, 9)) == 0, in_parts))
    return steps


options = st.fixed_dictionaries(
    {"min_tokens": st.sampled_from([0, 20, 64, 64]), "separator": st.sampled_from([None, "\n\n"])}
)


@given(sessions())
def test_every_result_can_be_rebuilt_from_the_prompt(steps: list[Step]) -> None:
    check(steps, sent_for(*steps))


@given(sessions(), st.sampled_from([0, 10]))
def test_results_can_be_rebuilt_if_short_texts_repeat_too(steps: list[Step], min_tokens: int) -> None:
    check(steps, sent_for(*steps, min_tokens=min_tokens))


@given(sessions(), options, st.data())
def test_outputs_for_a_prefix_are_a_prefix_of_the_outputs(
    steps: list[Step], options: dict[str, Any], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(steps)))
    before = sent_for(*steps[:cut], **options)
    assert sent_for(*steps, **options)[: len(before)] == before


LINES = [
    "[tool.x]",
    "[Doc_1] text",
    "[ERROR] failed",
    "[1] Smith et al.",
    "key = 1",
    "",
    WHOLE + "read({}).]",
    '{"id": 0}',
    "\\[a]",
]
unrepeated = st.lists(st.lists(st.one_of(st.text(max_size=60), st.sampled_from(LINES)), max_size=12), max_size=6)


@given(unrepeated, options)
def test_a_session_without_repeats_keeps_every_byte(drawn: list[list[str]], options: dict[str, Any]) -> None:
    texts = [
        f"{number}\n" + "\n".join(f"{line} {number}.{i}" for i, line in enumerate(lines))
        for number, lines in enumerate(drawn)
    ]
    transcript = Transcript(**options)
    for step, text in zip(read(*texts)[::2], texts, strict=True):
        assert isinstance(step, Call)
        transcript.call(step.id, step.name, step.arguments)
        assert transcript.result(step.id, text) is text
    assert (transcript.references, transcript.reference_tokens) == (0, 0)


# -- Whole results -------------------------------------------------------------------------------------------------


def test_a_repeat_names_the_first_call_with_this_result() -> None:
    again = [Call("a", "read", {"filePath": "/p/a.py"}), Result("a", [SEA]), Call("b", "run", "{}"), Result("b", [SEA])]
    assert sent_for(*again) == [SEA, '[Word for word the result of the earlier call read({"filePath":"/p/a.py"}).]']


def test_look_alikes_with_other_results_are_numbered() -> None:
    assert sent_for(*read(SEA, SKY, SKY, SEA))[2:] == [
        "[Word for word the result of the earlier call read({}), number 2 of such calls.]",
        "[Word for word the result of the earlier call read({}), number 1 of such calls.]",
    ]
    assert sent_for(*read(SEA, SEA, SEA))[2] == "[Word for word the result of the earlier call read({}).]"


def test_a_look_alike_without_a_result_yet_counts_as_different() -> None:
    calls = [Call("a", "read", "{}"), Call("b", "read", "{}"), Call("c", "run", "{}")]
    steps = [*calls, Result("a", [SEA]), Result("c", [SEA]), Result("b", [SKY])]
    assert sent_for(*steps)[1].endswith("read({}), number 1 of such calls.]")


def test_calls_that_are_shortened_to_the_same_text_are_look_alikes() -> None:
    steps: list[Step] = []
    for i, text in enumerate([SEA, SKY, SEA]):
        steps += [Call(str(i), "run", "x" * 300 + str(i)), Result(str(i), [text])]
    assert sent_for(*steps)[2] == f"{WHOLE}run({'x' * 199}…), number 1 of such calls.]"


def test_shown_arguments_stay_in_one_line_that_can_be_encoded() -> None:
    steps = [
        Call("a", "run\n", '{\n  "q": "\ud800"\x85\n}'),
        Result("a", [SEA]),
        Call("b", "run", ""),
        Result("b", [SEA]),
    ]
    assert sent_for(*steps)[1] == WHOLE + 'run({ "q": "\\ud800" }).]'


def test_arguments_outside_json_are_shown_by_their_type() -> None:
    steps = [Call("a", "run", {"of": {1, 2}}), Result("a", [SEA]), Call("b", "run", ""), Result("b", [SEA])]
    assert sent_for(*steps)[1] == WHOLE + 'run({"of":"set"}).]'


def test_a_result_whose_call_was_cut_is_never_named() -> None:
    calls = [Call("b", "run", "{}"), Call("c", "run", "{}")]
    steps = [Result("a", [SEA]), *calls, Result("b", [SEA]), Result("c", [SEA]), Result("gone", [SEA])]
    assert sent_for(*steps) == [SEA, SEA, WHOLE + "run({}).]", WHOLE + "run({}).]"]


def test_an_id_of_several_open_calls_names_none_of_them() -> None:
    steps: list[Step] = [Call("a", "read", "1"), Call("a", "read", "2"), Result("a", [SEA]), Result("a", [SEA])]
    assert sent_for(*steps) == [SEA, SEA]
    one_by_one: list[Step] = [Call("a", "read", "1"), Result("a", [SEA]), Call("a", "read", "2"), Result("a", [SEA])]
    assert sent_for(*one_by_one)[1] == WHOLE + "read(1).]"


def test_a_call_that_got_two_results_is_never_named() -> None:
    steps = [Call("a", "read", ""), Result("a", [SEA]), Result("a", [SKY]), Call("b", "run", ""), Result("b", [SEA])]
    assert sent_for(*steps) == [SEA, SKY, SEA]
    assert sent_for(*steps, Result("c", [SEA]))[3] == WHOLE + "run().]"


def test_a_look_alike_of_a_call_that_got_two_results_is_named_by_number() -> None:
    steps = [Call("a", "read", ""), Result("a", [SEA]), Result("a", [SKY]), Call("b", "read", ""), Result("b", [SEA])]
    assert sent_for(*steps, Result("c", [SEA]))[3] == WHOLE + "read(), number 2 of such calls.]"


def test_a_skipped_result_is_neither_replaced_nor_named() -> None:
    first, again = Result("c0", [SEA], skipped=True), Result("c1", [SEA], skipped=True)
    c0, _, c1, _, *rest = read(SEA, SEA, SEA, SEA)
    assert sent_for(c0, first, c1, again, *rest) == [
        SEA,
        SEA,
        SEA,
        "[Word for word the result of the earlier call read({}), number 3 of such calls.]",
    ]


def test_short_texts_and_long_names_stay() -> None:
    assert sent_for(*read("42" * 100, "42" * 100)) == ["42" * 100] * 2
    assert sent_for(*read("42" * 130, "42" * 130))[1].startswith(WHOLE)
    wordy = [Call("a", "run", "Ü" * 200), Result("a", ["x" * 300]), Call("b", "run", ""), Result("b", ["x" * 300])]
    assert sent_for(*wordy) == ["x" * 300] * 2


def test_references_are_counted() -> None:
    transcript = Transcript()
    run(read("x" * 280, "x" * 280, "x" * 280), transcript)
    assert (transcript.references, transcript.reference_tokens) == (2, 140)


# -- Passages ------------------------------------------------------------------------------------------------------


def search(*found: Sequence[str], between: str = "\n\n", in_parts: bool = False) -> list[Step]:
    return [
        step
        for i, documents in enumerate(found)
        for step in (Call(f"c{i}", "search", {"n": i}), Result(f"c{i}", list(documents), between, in_parts=in_parts))
    ]


def test_a_short_passage_never_reads_as_part_of_another_one() -> None:
    copying, locking = "shutil.copy: " + SEA, "subprocess.fcntl: a short one."
    first, second = sent_for(*search([copying, locking], [locking, copying]))
    assert first == f"{copying}\n\n{locking}"
    assert second == f'{locking}\n\n{PART}search({{"n":0}}): the passage that begins "shutil.copy: The sea is 3,688".]'


@pytest.mark.parametrize("in_parts", [False, True])
def test_neighbouring_passages_share_a_reference(in_parts: bool) -> None:
    first, second = '"The sea is 3,688 metres deep"', '"[{\\"id\\": 0, \\"name\\": \\"row 0\\"},"'
    steps = search([SEA, SKY, ROWS], [TOML, SEA, ROWS, SKY, LOG], in_parts=in_parts)
    sent = sent_for(*steps)[1]
    assert sent.startswith(
        f'{TOML}\n\n{PART}search({{"n":0}}): the passages that begin {first}, {second}, "The sky looks'
    )
    assert sent.endswith(f'blue since".]\n\n\n{LOG}' + "\n\n" * in_parts)  # the sky's own line break stays
    check(steps, sent_for(*steps))


def test_passages_with_other_text_between_them_get_their_own_references() -> None:
    sent = sent_for(*search([SEA, ROWS], [TOML, SEA, ROWS], between="\nSource: sea\n"))[1]
    assert sent.count(PART) == 2
    assert sent.count("\nSource: sea\n") == 2


def test_a_part_without_text_stays_in_place() -> None:
    transcript = Transcript()
    transcript.call("a", "look", "")
    transcript.call("b", "look", "")
    assert transcript.parts("a", [SEA, None, ROWS]) == [SEA, None, ROWS]
    sea, image, rows = transcript.parts("b", [SEA, None, ROWS])
    assert image is None
    assert str(sea).startswith(PART)
    assert str(rows).startswith(PART)


def test_a_whole_result_in_parts_becomes_one_reference() -> None:
    steps = search([SEA, ROWS], [SEA, ROWS], in_parts=True)
    assert sent_for(*steps)[1] == WHOLE + 'search({"n":0}).]'


def test_a_result_with_references_is_named_for_its_own_passages_only() -> None:
    sent = sent_for(*search([SEA], [SEA, ROWS], [SEA, ROWS]))
    assert [text.count("earlier call") for text in sent] == [0, 1, 2]
    assert 'search({"n":1}): the passage that begins "[{' in sent[2]


def test_a_quote_grows_until_it_is_unique() -> None:
    one, two = "The same beginning of them all, then one. " + SEA, "The same beginning of them all, then two. " + SEA
    sent = sent_for(*search([one, two], [SKY, two]))
    assert sent[1].endswith(': the passage that begins "The same beginning of them all, then two. The sea".]')


def test_a_passage_without_a_unique_quote_stays_until_another_result_can_be_named() -> None:
    one, two = "\n".join([SEA, SKY, "One."]), "\n".join([SEA, SKY, "Two."])
    sent = sent_for(*search([one, two], [two, LOG], [ROWS, two]))
    assert sent[1] == f"{two}\n\n{LOG}"
    assert sent[2] == f'{ROWS}\n\n{PART}search({{"n":1}}): the passage that begins "The sea is 3,688 metres deep".]'


def test_a_separator_cuts_results_into_passages() -> None:
    steps = [*read(f"{SEA}\n\nShort.\n\n{ROWS}"), Call("b", "run", ""), Result("b", [f"{ROWS}\n\nShort."])]
    assert sent_for(*steps)[1] == f"{ROWS}\n\nShort."
    assert re.fullmatch(r"\[Word for word in .*\.\]\n\nShort\.", sent_for(*steps, separator="\n\n")[1])


def test_line_breaks_around_a_passage_stay() -> None:
    steps = [*read(f"\n{SEA}\r\n"), Call("b", "run", ""), Result("b", [f"{SEA}\n\n\n"])]
    assert re.fullmatch(r"\[Word for word in [^\n]*\.\]\n\n\n", sent_for(*steps)[1])


# -- Arguments ----------- -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"separator": 7}, TypeError, "separator must be a str or None, got int"),
        ({"separator": ""}, ValueError, "separator must have at least one character, got ''"),
        ({"min_tokens": True}, TypeError, "min_tokens must be an int, got bool"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens must be an int, got float"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be 0 or more, got -1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        Transcript(**arguments)


def test_names_results_and_passages_must_be_text() -> None:
    bad: Any = 7
    with pytest.raises(TypeError, match="name must be a str, got int"):
        Transcript().call("a", bad)
    with pytest.raises(TypeError, match="text must be a str, got int"):
        Transcript().result("a", bad)
    with pytest.raises(TypeError, match="passages must contain str only, got int"):
        Transcript().result("a", SEA, [bad])
