"""`refer_to_repeats`: a pure function of one prompt's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

from warmprefix_llamaindex.agent_llm import refer_to_repeats

SEPARATOR = "\n\n"
SEA = "The sea covers seven tenths of the planet and is 3,688 metres deep on average. " + "It is wide and cold. " * 11
SKY = "The sky looks blue since the air scatters short waves more than long ones. " + "It is red at night. " * 12
SEA_QUOTE, SKY_QUOTE = '"The sea covers seven tenths"', '"The sky looks blue since"'
PASSAGES = [
    SEA,
    SKY,
    f"Not evidence.\n[ctx-0f0f0f] {SKY}",
    f"[Doc_1] {SKY}",
    "A short one.",
    "[1] Short.",
    "[Word for word the result of the earlier call search({}).]",
]
NAME = r'(search\((?:\{"n":\d\})?\))(?:, number (\d+) of such calls)?'
WHOLE = re.compile(rf"\[(?:W|Ran again; w)ord for word the result of the earlier call {NAME}\.\]")
PART = re.compile(
    rf'\[Word for word in the result of the earlier call {NAME}: the passages? that begins? ("(?:[^"\\]|\\.)*".*?)\.\]'
)


def sent_for(messages: Sequence[ChatMessage], **options: Any) -> list[ChatMessage]:
    return list(refer_to_repeats(messages, **options))


def asked(key: str, arguments: str = "", name: str = "search") -> ChatMessage:
    call = {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
    return ChatMessage(role="assistant", content=None, additional_kwargs={"tool_calls": [call]})


def tool_message(*passages: str, key: str = "a", in_blocks: bool = False) -> ChatMessage:
    kwargs = {"tool_call_id": key}
    if in_blocks:
        blocks = [TextBlock(text=passage + SEPARATOR) for passage in passages]
        return ChatMessage(role="tool", blocks=blocks, additional_kwargs=kwargs)
    return ChatMessage(role="tool", content=SEPARATOR.join(passages), additional_kwargs=kwargs)


def found(*results: ChatMessage) -> list[ChatMessage]:
    """The results, each behind a call `search({"n":i})` of its own."""
    messages: list[ChatMessage] = []
    for i, result in enumerate(results):
        messages.append(asked(str(i), json.dumps({"n": i}, separators=(",", ":"))))
        kwargs = {**result.additional_kwargs, "tool_call_id": str(i)}
        messages.append(result.model_copy(update={"additional_kwargs": kwargs}))
    return messages


def part(n: int, *quotes: str) -> str:
    words = "the passage that begins" if len(quotes) == 1 else "the passages that begin"
    return f'[Word for word in the result of the earlier call search({{"n":{n}}}): {words} {", ".join(quotes)}.]'


def whole(n: int) -> str:
    return f'[Word for word the result of the earlier call search({{"n":{n}}}).]'


def concatenated(message: ChatMessage) -> str:
    """As clients for OpenAI's interface send it."""
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock))


passages = st.lists(st.sampled_from(PASSAGES), min_size=1, max_size=4)
others = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.sampled_from([*PASSAGES, "What now?", ""]))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[ChatMessage, list[str]]]:
    """Messages, each with the passages that it is made of, if it is a retrieval."""
    history: list[tuple[ChatMessage, list[str]]] = []
    for i in range(draw(st.integers(0, 7))):
        if draw(st.integers(0, 3)) == 0:
            role, text = draw(others)
            history.append((ChatMessage(role=role, content=text), []))
            continue
        if draw(st.integers(0, 5)) > 0:
            history.append((asked(str(i), draw(st.sampled_from(["", '{"n":1}', '{"n":2}']))), []))
        texts = draw(passages)
        history.append((tool_message(*texts, key=str(i), in_blocks=draw(st.booleans())), texts))
    return history


class Reader:
    """A reader of prompts that sees the calls, their results as sent, and the references."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.results: dict[str, tuple[str, str, list[str]]] = {}

    def named(self, reference: re.Match[str], own: str) -> tuple[str, str, list[str]]:
        alike = [key for looks, key in self.calls if looks == reference[1]]
        if reference[2]:
            return self.results[alike[int(reference[2]) - 1]]
        results = [self.results.get(key) for key in alike if key != own]
        assert len({result and result[1] for result in results}) == 1, "ambiguous"
        assert results[0] is not None
        return results[0]

    def check(self, sent: str, given: str, own: str) -> None:
        reference = WHOLE.fullmatch(sent)
        if reference is not None and sent != given:
            assert self.named(reference, own)[:2] == (given, given)
            return
        rest, expected = sent, given
        while rest:
            reference = None if expected.startswith("[Word") else PART.match(rest)
            if reference is None:
                assert rest[0] == expected[0]
                rest, expected = rest[1:], expected[1:]
                continue
            held, _, texts = self.named(reference, own)
            for n, quote in enumerate(json.loads(f"[{reference[3]}]")):
                expected = expected.removeprefix(SEPARATOR if n else "")
                assert held.count(quote) == 1
                place = held.index(quote)
                text = max([text for text in texts if held.startswith(text, place)], key=len)
                assert expected.startswith(text)
                expected = expected.removeprefix(text)
            rest = rest[reference.end() :]
        assert not expected


@given(histories(), st.sampled_from([None, SEPARATOR]), st.sampled_from([0, 64]))
def test_everything_is_there_in_full_or_named_where_it_stands_so(
    history: list[tuple[ChatMessage, list[str]]], separator: str | None, min_tokens: int
) -> None:
    sent = sent_for([message for message, _ in history], separator=separator, min_tokens=min_tokens)
    reader = Reader()
    for message, (given_message, texts) in zip(sent, history, strict=True):
        if not texts:
            assert message is given_message
            for call in message.additional_kwargs.get("tool_calls", ()):
                reader.calls.append((f"search({call['function']['arguments']})", call["id"]))
            continue
        key, given_text = message.additional_kwargs["tool_call_id"], concatenated(given_message)
        reader.check(concatenated(message), given_text, key)
        passages = texts if separator is not None or len(given_message.blocks) > 1 else [SEPARATOR.join(texts)]
        reader.results[key] = concatenated(message), given_text, passages


@given(histories(), st.sampled_from([None, SEPARATOR]))
def test_a_message_depends_on_those_before_it_alone(
    history: list[tuple[ChatMessage, list[str]]], separator: str | None
) -> None:
    messages = [message for message, _ in history]
    before = [message.model_dump() for message in messages]
    sent = sent_for(messages, separator=separator)
    for length in range(len(messages)):
        assert sent_for(messages[:length], separator=separator) == sent[:length]
    assert [message.model_dump() for message in messages] == before


def test_a_repeat_becomes_a_reference_and_the_first_occurrence_stays_as_it_is() -> None:
    messages = found(tool_message(SEA), tool_message(SKY, SEA), tool_message(SEA))
    sent = sent_for(messages, separator=SEPARATOR)
    assert all(after is before for after, before in zip(sent[:3], messages, strict=False))
    assert sent[3].content == f"{SKY}\n\n{part(0, SEA_QUOTE)}"
    assert sent[5].content == whole(0)
    assert sent[3].additional_kwargs == messages[3].additional_kwargs


def test_a_prompt_without_repeats_is_made_of_the_same_objects() -> None:
    rows, log, cited = '[{"id": 0}]' * 50, "[ERROR] failed\n" * 50, "[1] Smith et al.\n" * 50
    results = [tool_message("Done."), tool_message("Done."), tool_message(SEA, SKY, in_blocks=True)]
    messages = found(*results, tool_message(rows), tool_message(log), tool_message(cited))
    sent = sent_for(messages, separator=SEPARATOR)
    assert all(after is before for after, before in zip(sent, messages, strict=True))


def test_a_short_node_never_reads_as_part_of_another_one() -> None:
    """Nothing marks the longer one, so nothing marks the shorter one behind it as its own."""
    copying, locking = f"shutil.copy: {SEA}", "subprocess.fcntl: a short one."
    nodes = [tool_message(copying, locking, in_blocks=True), tool_message(locking, copying, in_blocks=True)]
    first, again = sent_for(found(*nodes))[1::2]
    assert concatenated(first) == f"{copying}\n\n{locking}\n\n"
    quote = '"shutil.copy: The sea covers"'
    assert concatenated(again) == f"{locking}\n\n{part(0, quote)}\n\n"


def test_neighbouring_nodes_share_a_reference_and_a_block() -> None:
    nodes = [tool_message(SEA, SKY, in_blocks=True), tool_message("New.", SKY, SEA, "End.", in_blocks=True)]
    blocks = sent_for(found(*nodes))[3].blocks
    assert [getattr(block, "text", None) for block in blocks] == [
        "New.\n\n",
        f"{part(0, SKY_QUOTE, SEA_QUOTE)}\n\n",
        "End.\n\n",
    ]


def test_all_nodes_again_are_one_reference() -> None:
    nodes = tool_message(SEA, SKY, in_blocks=True)
    assert [concatenated(message) for message in sent_for(found(nodes, nodes))[1::2]] == [
        f"{SEA}\n\n{SKY}\n\n",
        whole(0),
    ]


def test_without_a_separator_a_text_is_one_passage() -> None:
    sent = sent_for(found(tool_message(SEA), tool_message(SKY, SEA), tool_message(SKY, SEA)))
    assert sent[3].content == f"{SKY}\n\n{SEA}"
    assert sent[5].content == whole(1)


def test_a_text_of_short_parts_is_one_passage() -> None:
    rows = [f"{number}. A row of a table, too short for a reference of its own." for number in range(20)]
    sent = sent_for(found(tool_message(*rows), tool_message(*rows)), separator=SEPARATOR)
    assert sent[3].content == whole(0)


def test_line_breaks_around_a_passage_stay() -> None:
    sent = sent_for(found(tool_message(f"\n{SEA}\r\n"), tool_message(f"{SEA}\n\n\n")))
    assert sent[1].content == f"\n{SEA}\r\n"
    assert sent[3].content == f"{part(0, SEA_QUOTE)}\n\n\n"


def test_blocks_that_are_no_text_stay_and_so_do_empty_messages() -> None:
    image = ImageBlock(url="https://example.com/a.png")
    pictured = ChatMessage(role="tool", blocks=[image, TextBlock(text=SEA), image])
    empty = ChatMessage(role="tool", blocks=[])
    blank = ChatMessage(role="tool", content="\n\n")
    messages = found(pictured, empty, blank, pictured)
    sent = sent_for(messages, separator=SEPARATOR)
    assert all(after is before for after, before in zip(sent[:7], messages, strict=False))
    assert [block.block_type for block in sent[7].blocks] == ["image", "text", "image"]
    assert sent[7].content == part(0, SEA_QUOTE)


def test_a_result_whose_call_is_not_in_the_prompt_is_never_named() -> None:
    kept = found(tool_message(SEA), tool_message(SEA), tool_message(SEA))[1:]
    assert [message.content for message in sent_for(kept)[::2]] == [SEA, SEA, whole(1)]


CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"n": 0}'}}]},
    {"tool_calls": [SimpleNamespace(id="a", function=SimpleNamespace(name="search", arguments='{"n": 0}'))]},
    {"tool_calls": [SimpleNamespace(id="fc_1", call_id="a", name="search", arguments='{"n": 0}')]},
    {"tool_calls": [{"id": "a", "name": "search", "input": {"n": 0}}]},
]


@pytest.mark.parametrize("kwargs", CALLS, ids=["stored", "live", "responses", "flat"])
def test_calls_are_read_in_every_form(kwargs: dict[str, Any]) -> None:
    messages = [ChatMessage(role="assistant", content=None, additional_kwargs=kwargs), tool_message(SEA)]
    messages += [asked("b"), tool_message(SEA, key="b")]
    reference = sent_for(messages, tools=["search"])[3].content or ""
    assert reference.replace(": 0", ":0") == whole(0)
    assert sent_for(messages, tools=["calculator"])[3] is messages[3]
    assert sent_for(messages[1:], tools=["search"])[2] is messages[3]


def test_a_tool_call_block_is_read_too() -> None:
    call_block = getattr(types, "ToolCallBlock", None)
    if call_block is None:
        pytest.skip("this version of LlamaIndex has no tool call blocks")
    call = call_block(tool_call_id="a", tool_name="search", tool_kwargs={"n": 0})
    kwargs = asked("a", "{}").additional_kwargs  # some packages write both
    messages = [ChatMessage(role="assistant", blocks=[call], additional_kwargs=kwargs), tool_message(SEA)]
    messages += [asked("b"), tool_message(SEA, key="b")]
    assert sent_for(messages)[0] is messages[0]
    assert sent_for(messages, tools=["search"])[3].content == whole(0)


def test_results_of_other_tools_stay_and_are_never_named() -> None:
    messages = [asked("w", name="weather"), tool_message(SEA, key="w")]
    messages += found(tool_message(SEA), tool_message(SEA))
    assert [message.content for message in sent_for(messages, tools=["search"])[1::2]] == [SEA, SEA, whole(0)]


def test_a_message_may_name_its_tool_itself() -> None:
    messages = found(tool_message(SEA), tool_message(SEA))
    messages[3].additional_kwargs["name"] = "weather"
    assert sent_for(messages, tools=["search"])[3] is messages[3]
