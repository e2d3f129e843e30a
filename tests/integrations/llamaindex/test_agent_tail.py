"""`refer_to_repeats`: a pure function of one prompt's messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

from warmprefix import Templates, fingerprint
from warmprefix_llamaindex.tail import refer_to_repeats

SEPARATOR = "\n\n"
SEA = "The sea covers seven tenths of the planet and is 3,688 metres deep on average. " * 4
SKY = "The sky looks blue since the air scatters short waves more than long ones. " * 4
FORGER = f"Not evidence.\n[ctx-{fingerprint(SEA).hex()[:6]}] {SKY}"
TITLED = f"[Doc_1] {SKY}"
PASSAGES = [
    SEA,
    SKY,
    FORGER,
    TITLED,
    "A short one.",
    "[1] Short.",
    "Please refer to [Doc_1] in the previous conversation.",
]
ANNOTATION = re.compile(r"Please refer to \[([^\]]+)\] in the previous conversation\.")


def told_of(messages: Sequence[ChatMessage], **options: Any) -> list[ChatMessage]:
    return list(refer_to_repeats(messages, **options))


def tool_message(*passages: str, name: str = "search", in_blocks: bool = False) -> ChatMessage:
    kwargs = {"tool_call_id": f"call_{name}", "name": name}
    if in_blocks:
        blocks = [TextBlock(text=passage + SEPARATOR) for passage in passages]
        return ChatMessage(role="tool", blocks=blocks, additional_kwargs=kwargs)
    return ChatMessage(role="tool", content=SEPARATOR.join(passages), additional_kwargs=kwargs)


def concatenated(message: ChatMessage) -> str:
    """As clients for OpenAI's interface send it."""
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock))


passages = st.lists(st.sampled_from(PASSAGES), min_size=1, max_size=4)
retrievals = st.builds(lambda texts, in_blocks: (texts, in_blocks), passages, st.booleans())
others = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.sampled_from([*PASSAGES, "What now?", ""]))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[ChatMessage, list[str]]]:
    """Messages, each with the passages that it is made of, if it is a retrieval."""
    history: list[tuple[ChatMessage, list[str]]] = []
    for item in draw(st.lists(st.one_of(retrievals, others), max_size=10)):
        first, second = item
        if isinstance(first, str):
            history.append((ChatMessage(role=first, content=second), []))
        else:
            history.append((tool_message(*first, in_blocks=bool(second)), first))
    return history


@given(histories(), st.sampled_from([0, 64]))
def test_everything_is_there_in_full_or_named_where_it_stands_so(
    history: list[tuple[ChatMessage, list[str]]], min_tokens: int
) -> None:
    told = told_of([message for message, _ in history], separator=SEPARATOR, min_tokens=min_tokens)
    prompt = ""
    for message, (given_message, texts) in zip(told, history, strict=True):
        prompt += "\n\n"
        if not texts:
            assert message is given_message
            prompt += concatenated(message)
            continue
        said = concatenated(message)
        for text in texts:
            taken = the_part_for(text, said, prompt)
            prompt, said = prompt + taken, said[len(taken) :]
            blank = SEPARATOR if said.startswith(SEPARATOR) else ""
            prompt, said = prompt + blank, said[len(blank) :]
        assert not said


def the_part_for(text: str, said: str, prompt: str) -> str:
    """What stands for a passage at the start of a text: the passage, labelled or not, or a reference to it."""
    header = re.match(r"\[[^\]]+\] ", said)
    if header and said.startswith(text, header.end()):
        return header[0] + text
    reference = ANNOTATION.match(said)
    if reference and text != reference[0]:
        starts = [match.end() for match in re.finditer(rf"^\[{re.escape(reference[1])}\] ", prompt, re.MULTILINE)]
        assert starts, f"{reference[0]!r} dangles"
        assert all(prompt.startswith(text, start) for start in starts)
        return reference[0]
    assert said.startswith(text)
    return text


@given(histories(), st.sampled_from([None, SEPARATOR]))
def test_a_message_depends_on_those_before_it_alone(
    history: list[tuple[ChatMessage, list[str]]], separator: str | None
) -> None:
    messages = [message for message, _ in history]
    before = [message.model_dump() for message in messages]
    told = told_of(messages, separator=separator)
    for length in range(len(messages)):
        assert told_of(messages[:length], separator=separator) == told[:length]
    assert [message.model_dump() for message in messages] == before


def test_a_repeat_becomes_a_reference_and_the_first_time_gets_a_label() -> None:
    messages = [tool_message(SEA), ChatMessage(role="user", content="And the sky?"), tool_message(SKY, SEA)]
    label = f"ctx-{fingerprint(SEA).hex()[:6]}"
    told = told_of(messages, separator=SEPARATOR)
    assert told[0].content == f"[{label}] {SEA}"
    assert told[1] is messages[1]
    assert told[2].content == (
        f"[ctx-{fingerprint(SKY).hex()[:6]}] {SKY}\n\nPlease refer to [{label}] in the previous conversation."
    )
    assert told[2].additional_kwargs == messages[2].additional_kwargs


def test_without_a_separator_a_text_is_one_block() -> None:
    told = told_of([tool_message(SEA), tool_message(SKY, SEA), tool_message(SKY, SEA)])
    assert ANNOTATION.search(told[1].content or "") is None
    assert ANNOTATION.fullmatch(told[2].content or "")


def test_a_text_of_short_parts_is_one_block() -> None:
    rows = [f"{number}. A row of a table, too short for a label of its own." for number in range(20)]
    told = told_of([tool_message(*rows), tool_message(*rows)], separator=SEPARATOR)
    assert (told[0].content or "").count("[ctx-") == 1
    assert ANNOTATION.fullmatch(told[1].content or "")


def test_line_breaks_around_a_block_stay() -> None:
    told = told_of([tool_message(f"\n{SEA}\r\n"), tool_message(f"{SEA}\n\n\n")])
    assert re.fullmatch(r"\n\[ctx-\w+\] .*\r\n", told[0].content or "", re.DOTALL)
    assert re.fullmatch(rf"{ANNOTATION.pattern}\n\n\n", told[1].content or "")


def test_every_label_begins_a_line_though_clients_glue_text_blocks() -> None:
    message = ChatMessage(role="tool", blocks=[TextBlock(text="Found:"), TextBlock(text=SEA), TextBlock(text=SKY)])
    [told] = told_of([message])
    assert re.fullmatch(r"Found:\n\[ctx-\w+\] The sea .*\n\[ctx-\w+\] The sky .*", concatenated(told), re.DOTALL)


def test_blocks_that_are_no_text_stay_and_so_do_empty_messages() -> None:
    image = ImageBlock(url="https://example.com/a.png")
    pictured = ChatMessage(role="tool", blocks=[image, TextBlock(text=SEA), image])
    empty = ChatMessage(role="tool", blocks=[])
    blank = ChatMessage(role="tool", content="\n\n")
    told = told_of([pictured, empty, blank, pictured], separator=SEPARATOR)
    assert [block.block_type for block in told[0].blocks] == ["image", "text", "image"]
    assert told[1] is empty
    assert told[2] is blank
    assert ANNOTATION.fullmatch(told[3].content or "")


def test_short_results_are_the_same_objects() -> None:
    messages = [tool_message("Done."), tool_message("Done.")]
    told = told_of(messages)
    assert all(after is before for after, before in zip(told, messages, strict=True))


CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]},
    {"tool_calls": [SimpleNamespace(id="call_1", function=SimpleNamespace(name="search", arguments="{}"))]},
    {"tool_calls": [{"id": "call_1", "name": "search", "input": {}}]},
]


@pytest.mark.parametrize("kwargs", CALLS, ids=["stored", "live", "flat"])
def test_the_call_tells_which_tool_a_message_is_of(kwargs: dict[str, Any]) -> None:
    asked = ChatMessage(role="assistant", content=None, additional_kwargs=kwargs)
    answered = ChatMessage(role="tool", content=SEA, additional_kwargs={"tool_call_id": "call_1"})
    assert told_of([asked, answered], tools=["search"])[1] is not answered
    assert told_of([asked, answered], tools=["calculator"])[1] is answered
    assert told_of([answered], tools=["search"])[0] is answered


def test_a_tool_call_block_tells_it_too() -> None:
    call_block = getattr(types, "ToolCallBlock", None)
    if call_block is None:
        pytest.skip("this version of LlamaIndex has no tool call blocks")
    call = call_block(tool_call_id="call_1", tool_name="search", tool_kwargs={})
    asked = ChatMessage(role="assistant", blocks=[call])
    answered = ChatMessage(role="tool", content=SEA, additional_kwargs={"tool_call_id": "call_1"})
    told = told_of([asked, answered], tools=["search"])
    assert told[0] is asked
    assert told[1] is not answered


def test_what_other_tools_say_is_only_read() -> None:
    told = told_of([tool_message(SEA, name="weather"), tool_message(SEA), tool_message(SEA)], tools=["search"])
    assert told[0].content == SEA
    assert ANNOTATION.fullmatch(told[1].content or "") is None
    assert ANNOTATION.fullmatch(told[2].content or "")


def test_a_question_that_shows_a_label_takes_it_away() -> None:
    told = told_of([tool_message(SEA), ChatMessage(role="user", content=FORGER), tool_message(SEA)])
    assert (told[2].content or "").endswith(SEA)
    assert (told[2].content or "").partition("]")[0] != (told[0].content or "").partition("]")[0]


def test_templates_say_how_a_reference_reads() -> None:
    templates = Templates(location="See {label} above.")
    told = told_of([tool_message(SEA), tool_message(SEA)], templates=templates)
    assert told[1].content == f"See [ctx-{fingerprint(SEA).hex()[:6]}] above."
