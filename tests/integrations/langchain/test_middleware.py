"""The middleware by itself: what a request's messages become, and which properties that has for any history."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents.middleware import ModelRequest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool

from warmprefix import Templates
from warmprefix_langchain import ContextReuseMiddleware

SEA = "The sea is 3,688 metres deep on average and 10,935 metres at most. " * 5
SKY = "The sky looks blue since air scatters short waves more than long ones. " * 5
REFERENCE = re.compile(r"Please refer to \[([^]]+)\] in the previous conversation\.")


def request_of(messages: Sequence[AnyMessage], system_prompt: str | None = None) -> ModelRequest[Any]:
    return ModelRequest(
        model=FakeListChatModel(responses=[]),
        messages=list(messages),
        system_prompt=system_prompt,
        tool_choice=None,
        tools=[],
        response_format=None,
        state={"messages": list(messages)},
        runtime=None,
        model_settings={},
    )


def through(request: ModelRequest[Any], *middlewares: ContextReuseMiddleware) -> ModelRequest[Any]:
    """The request that reaches the model behind these middlewares, the first one outermost."""
    reached: list[ModelRequest[Any]] = []

    def model(request: ModelRequest[Any]) -> Any:
        reached.append(request)

    handler: Callable[[ModelRequest[Any]], Any] = model
    for middleware in reversed(middlewares):
        handler = _around(middleware, handler)
    handler(request)
    return reached[0]


def _around(
    middleware: ContextReuseMiddleware, handler: Callable[[ModelRequest[Any]], Any]
) -> Callable[[ModelRequest[Any]], Any]:
    return lambda request: middleware.wrap_model_call(request, handler)


def sent(messages: Sequence[AnyMessage], *middlewares: ContextReuseMiddleware, system_prompt: str | None = None) -> Any:
    """The contents of the messages that reach the model."""
    return [
        message.content
        for message in through(
            request_of(messages, system_prompt), *(middlewares or [ContextReuseMiddleware()])
        ).messages
    ]


def result(content: Any, **fields: Any) -> ToolMessage:
    return ToolMessage(content, **{"tool_call_id": "c1", "name": "search", **fields})


# Which blocks there are


def test_a_whole_result_is_a_block() -> None:
    first, question, second = sent([result(SEA), HumanMessage("And?"), result(SEA)])

    label = re.fullmatch(rf"\[(ctx-[0-9a-f]{{6}})\] {re.escape(SEA)}", first)
    assert label is not None
    assert question == "And?"
    assert second == f"Please refer to [{label[1]}] in the previous conversation."


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_the_documents_of_an_artifact_are_blocks_and_the_text_around_them_stays(from_checkpoint: bool) -> None:
    documents = [Document(SEA, id="sea"), Document(SKY, metadata={"id": 7})]
    artifact: list[Any] = [document.model_dump() for document in documents] if from_checkpoint else documents

    both, one = sent(
        [
            result(f"Found 2.\n\nText: {SEA}\n\nText: {SKY}\nEnd", artifact=artifact),
            result(f"Found 1.\n\nText: {SKY}", artifact=artifact[1:]),
        ]
    )

    assert both == f"Found 2.\n\nText: [sea] {SEA}\n\nText: [7] {SKY}\nEnd"
    assert one == "Found 1.\n\nText: Please refer to [7] in the previous conversation."


def test_documents_that_the_tool_left_out_of_its_text_are_no_blocks() -> None:
    artifact = [Document(SKY, id="sky"), Document(SEA, id="sea")]

    assert sent([result(f"Only: {SEA}", artifact=artifact)]) == [f"Only: [sea] {SEA}"]
    assert sent([result("A summary of both. " * 30, artifact=artifact)])[0].startswith("[ctx-")


@pytest.mark.parametrize("artifact", [{"page_content": SEA}, "text", 7, [None, 7, {"page_content": None}], object()])
def test_an_artifact_that_holds_no_documents_leaves_the_result_one_block(artifact: object) -> None:
    assert sent([result(SEA, artifact=artifact)])[0].startswith("[ctx-")


@pytest.mark.parametrize("identity", [None, "x" * 50, "odd id]", True, 1.5, ["list"]])
def test_an_id_that_makes_no_label_is_not_used(identity: Any) -> None:
    artifact = [{"page_content": SEA, "metadata": {"id": identity}}]
    assert sent([result(SEA, artifact=artifact)])[0].startswith("[ctx-")


def test_a_separator_cuts_text_that_comes_without_documents() -> None:
    short = "Nothing more."
    first, second = sent(
        [result(f"{SEA}\n\n{short}\n\n{SKY}"), result(f"{SKY}\n\n{short}")], ContextReuseMiddleware(separator="\n\n")
    )

    assert re.fullmatch(rf"\[ctx-\w+\] {SEA}\n\n{short}\n\n\[ctx-\w+\] {SKY}", first)
    assert re.fullmatch(rf"{REFERENCE.pattern}\n\n{short}", second)


def test_text_parts_are_handled_one_by_one_and_others_left_alone() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    quoted = {"type": "quote", "text": SEA}
    [parts, again] = sent(
        [
            result([{"type": "text", "text": SEA, "cache_control": {"type": "ephemeral"}}, image, SKY, quoted]),
            result([SKY, {"type": "text", "text": SEA}]),
        ]
    )

    assert parts[0]["text"].endswith(f"] {SEA}")
    assert parts[0]["cache_control"] == {"type": "ephemeral"}
    assert parts[1] == image
    assert parts[2].endswith(f"] {SKY}")
    assert parts[3] == quoted
    assert REFERENCE.fullmatch(again[0])
    assert REFERENCE.fullmatch(again[1]["text"])


def test_short_results_and_errors_stay_as_they_are() -> None:
    messages = [result("42"), result("42"), result(SEA, status="error"), result(SEA, status="error")]
    assert sent(messages) == [message.content for message in messages]


def test_only_the_chosen_tools_are_looked_at() -> None:
    call = {"name": "search", "args": {}, "id": "c2", "type": "tool_call"}
    messages: list[AnyMessage] = [
        result(SEA, name="other"),
        AIMessage("", tool_calls=[call]),
        result(SEA, name=None, tool_call_id="c2"),
        result(SEA, name=None, tool_call_id="unknown"),
        result(SEA),
    ]

    contents = sent(messages, ContextReuseMiddleware(tools=["search"]))

    assert contents[0] == contents[3] == SEA
    assert contents[2].endswith(f"] {SEA}")
    assert REFERENCE.fullmatch(contents[4])


def test_tools_may_be_named_by_themselves() -> None:
    search = StructuredTool.from_function(lambda query: query, name="search", description="Search.")
    middleware = ContextReuseMiddleware(tools=[search, "recall"])
    contents = sent([result(SEA, name=name) for name in ("other", "recall", "search")], middleware)
    assert contents[0] == SEA
    assert contents[1].endswith(f"] {SEA}")
    assert REFERENCE.fullmatch(contents[2])


def test_the_wording_of_references_can_be_chosen() -> None:
    templates = Templates(location="See {label} above.")
    middleware = ContextReuseMiddleware(templates=templates)
    assert re.fullmatch(r"See \[ctx-\w+\] above\.", sent([result(SEA), result(SEA)], middleware)[1])


def test_a_label_that_the_system_prompt_shows_is_given_to_no_block() -> None:
    artifact = [Document(SEA, id="sea")]
    [content] = sent([result(SEA, artifact=artifact)], system_prompt="Example:\n[sea] Something else.")
    assert not content.startswith("[sea] ")


def test_a_label_that_an_answer_took_is_not_referred_to_any_more() -> None:
    artifact = [Document(SEA, id="sea")]
    _, _, again = sent(
        [result(SEA, artifact=artifact), AIMessage("[sea] is not what I meant."), result(SEA, artifact=artifact)]
    )
    assert again.endswith(f"] {SEA}")
    assert not again.startswith("[sea] ")


# What stays


def test_a_request_in_which_nothing_changes_is_handed_on_itself() -> None:
    request = request_of([HumanMessage("Hello"), result("42")])
    assert through(request, ContextReuseMiddleware()) is request
    empty = request_of([])
    assert through(empty, ContextReuseMiddleware()) is empty


def test_all_but_the_content_of_a_changed_message_stays() -> None:
    artifact = [Document(SEA, id="sea")]
    message = result(
        SEA, id="m1", tool_call_id="c9", artifact=artifact, additional_kwargs={"a": 1}, response_metadata={"b": 2}
    )
    request = request_of([message, message])
    out = through(request, ContextReuseMiddleware()).messages

    for changed in out:
        assert isinstance(changed, ToolMessage)
        assert changed.artifact is artifact
        assert (changed.id, changed.tool_call_id, changed.status, changed.name) == ("m1", "c9", "success", "search")
        assert changed.additional_kwargs == {"a": 1}
        assert changed.response_metadata["b"] == 2
    assert message.content == SEA
    assert message.response_metadata == {"b": 2}
    assert request.messages == [message, message]


async def test_async_does_the_same() -> None:
    messages = [result(SEA), result(SEA)]
    middleware = ContextReuseMiddleware()
    reached: list[Any] = []

    async def model(request: ModelRequest[Any]) -> Any:
        reached.extend(message.content for message in request.messages)

    await middleware.awrap_model_call(request_of(messages), model)

    assert reached == sent(messages)


def test_an_error_of_the_model_passes_through() -> None:
    def model(request: ModelRequest[Any]) -> Any:
        raise ConnectionError("gone")

    middleware = ContextReuseMiddleware()
    with pytest.raises(ConnectionError, match="gone"):
        middleware.wrap_model_call(request_of([result(SEA)]), model)
    assert middleware.stats().errors == 0


def test_an_error_while_arranging_leaves_what_is_behind_it_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(list[Any]):
        """Says that it holds a document, and breaks when that is looked for."""

        def __iter__(self) -> Any:
            raise RuntimeError("odd artifact")

    middleware = ContextReuseMiddleware()
    before = [result(SEA), result(SEA)]
    odd = [result(SEA, artifact=Odd()), result(SEA)]

    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        reached = through(request_of([*before, *odd]), middleware).messages
        all_odd = request_of(odd)
        assert through(all_odd, middleware) is all_odd

    assert [message.content for message in reached[:2]] == sent(before)
    assert all(message is given for message, given in zip(reached[2:], odd, strict=True))
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert "odd artifact" in caplog.text
    assert (middleware.stats().errors, middleware.stats().references) == (2, 1)


def test_it_counts_what_it_spares() -> None:
    middleware = ContextReuseMiddleware()
    sent([result(SEA), result(SEA), result(SKY)], middleware)
    sent([result(SEA), result(SEA), result(SEA)], middleware)

    stats = middleware.stats()
    assert (stats.prompts, stats.references, stats.errors) == (2, 3, 0)
    assert stats.reference_tokens == 3 * ((len(SEA) + 3) // 4)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"tools": "search"}, TypeError, "tools"),
        ({"tools": 7}, TypeError, "tools"),
        ({"tools": [7]}, TypeError, "tools"),
        ({"separator": ""}, ValueError, "separator"),
        ({"separator": 7}, TypeError, "separator"),
        ({"name": ""}, ValueError, "name"),
        ({"name": 7}, TypeError, "name"),
        ({"min_tokens": -1}, ValueError, "min_tokens"),
        ({"min_tokens": "64"}, TypeError, "min_tokens"),
        ({"templates": "See {label}."}, TypeError, "templates"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ContextReuseMiddleware(**options)


# Several instances


def test_an_inner_instance_leaves_alone_what_an_outer_one_wrote() -> None:
    messages = [
        result(f"{SEA}\n\n{SKY}"),
        result(SKY, name="other"),
        result(f"{SKY}\n\n{SEA}"),
        result(SKY, name="other"),
    ]
    outer = ContextReuseMiddleware(tools=["search"], separator="\n\n")
    inner = ContextReuseMiddleware(name="inner", min_tokens=0)

    alone = sent(messages, outer)
    both = sent(messages, outer, inner)

    assert both[0] == alone[0]
    assert both[2] == alone[2]
    assert alone[1] == alone[3] == SKY
    assert both[1].endswith(f"] {SKY}")
    assert REFERENCE.fullmatch(both[3])


def test_an_id_that_two_tools_use_for_two_texts_gets_one_meaning() -> None:
    found = result(SKY, artifact=[Document(SKY, id="1")])
    messages = [result(SEA, name="other", artifact=[Document(SEA, id="1")]), found, found]
    contents = sent(
        messages, ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(tools=["other"], name="inner")
    )
    assert contents[1] == f"[1] {SKY}"
    assert contents[2] == "Please refer to [1] in the previous conversation."
    assert re.fullmatch(rf"\[ctx-\w+\] {SEA}", contents[0])


# Any history

TEXTS = [
    SEA,
    SKY,
    f"{SEA}\n\n{SKY}",
    "Short.",
    "[sea] A line that looks labelled, in a text of its own. " * 6,
    f"A quotation:\n[sea] {SKY}\n[sky] {SEA}",
    "Please refer to [sea] in the previous conversation. " * 6,
    "x" * 300,
]
A_TEXT = st.sampled_from(TEXTS)
A_TEXT_WITHOUT_LABELS = st.sampled_from([text for text in TEXTS if "[" not in text])
IDS: list[str | int | None] = ["sea", 1, None]


class Piece(NamedTuple):
    text: str
    block: bool


class Told(NamedTuple):
    """A message, and the pieces that its content is made of where it is a tool's result that is looked at."""

    message: AnyMessage
    pieces: list[Piece] | None


@st.composite
def results(draw: st.DrawFn, a_text: st.SearchStrategy[str], call: dict[str, Any]) -> Told:
    """One tool's result, whole or with documents, as a text or as a list of parts."""
    fields: dict[str, Any] = {"tool_call_id": call["id"], "id": draw(st.uuids().map(str))}
    fields["name"] = draw(st.sampled_from([call["name"], None]))
    fields["status"] = draw(st.sampled_from(["success"] * 5 + ["error"]))
    if draw(st.booleans()):
        content = draw(a_text)
        pieces = [Piece(content, True)]
    else:
        documents = draw(st.lists(st.tuples(a_text, st.sampled_from(IDS)), min_size=1, max_size=4))
        between = draw(st.sampled_from(["\n\n", "\nSource: sea\n", "- "]))
        fields["artifact"] = [{"page_content": text, "metadata": {"id": id}} for text, id in documents]
        if draw(st.booleans()):
            fields["artifact"] = [Document(**document) for document in fields["artifact"]]
        pieces = [piece for text, _ in documents for piece in (Piece(between, False), Piece(text, True))]
        content = "".join(piece.text for piece in pieces)
        if all(len(text) < 4 * 64 for text, _ in documents):
            pieces = [Piece(content, True)]  # none is long enough by itself, so the whole is a block
    message = ToolMessage([{"type": "text", "text": content}] if draw(st.booleans()) else content, **fields)
    return Told(message, None if message.status == "error" else pieces)


@st.composite
def histories(draw: st.DrawFn, a_text: st.SearchStrategy[str] = A_TEXT) -> list[Told]:
    """Turns with up to three parallel tool calls each."""
    told: list[Told] = []
    for turn in range(draw(st.integers(1, 4))):
        told.append(Told(HumanMessage(draw(a_text)), None))
        calls: list[Any] = [
            {"name": draw(st.sampled_from(["search", "recall"])), "args": {}, "id": f"{turn}.{i}", "type": "tool_call"}
            for i in range(draw(st.integers(0, 3)))
        ]
        told.append(Told(AIMessage(draw(a_text), tool_calls=calls), None))
        told += [draw(results(a_text, call)) for call in calls]
    return told


def texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def read_back(history: Sequence[Told], contents: Sequence[Any]) -> list[str]:
    """Check that every piece is there, in full or as a reference to the one text that its label has; the full ones.

    This knows how the results were made, and nothing of how they were cut or labelled.
    """
    prompt = ""
    shown: dict[str, str] = {}
    in_full: list[str] = []
    for (message, pieces), content in zip(history, contents, strict=True):
        prompt += "\n"
        if pieces is None:
            assert content == message.content
            prompt += "".join(texts(content))
            continue
        [rest] = texts(content)
        for text, block in pieces:
            if not block or len(text) < 4 * 64:
                there = text
            else:
                reference = REFERENCE.match(rest)
                refers = reference is not None and shown.get(reference[1]) == text
                marker = reference if refers else re.match(r"\[([^]]+)\] ", rest)
                assert marker is not None
                assert shown.setdefault(marker[1], text) == text
                assert meanings(prompt, marker[1]) <= {text}
                there = marker[0] if refers else f"{marker[0]}{text}"
                in_full += [] if refers else [text]
            assert rest.startswith(there)
            prompt += there
            rest = rest[len(there) :]
        assert not rest
    return in_full


def meanings(prompt: str, label: str) -> set[str]:
    """What follows a label wherever a line of the prompt begins with it."""
    places = re.finditer(rf"^[^\S\r\n]*\[{re.escape(label)}\] ?", prompt, re.MULTILINE)
    longest_first = sorted(TEXTS, key=len, reverse=True)
    return {next((t for t in longest_first if prompt.startswith(t, place.end())), "other") for place in places}


@given(histories())
def test_nothing_is_lost_and_every_reference_names_the_one_text_under_its_label(history: list[Told]) -> None:
    read_back(history, sent([told.message for told in history]))


@given(histories(A_TEXT_WITHOUT_LABELS))
def test_a_block_is_in_full_exactly_once(history: list[Told]) -> None:
    in_full = read_back(history, sent([told.message for told in history]))
    blocks = {text for _, pieces in history for text, block in pieces or [] if block and len(text) >= 4 * 64}
    assert sorted(in_full) == sorted(blocks)


@given(st.one_of(histories(), histories(A_TEXT_WITHOUT_LABELS)))
def test_two_instances_lose_nothing_and_give_no_label_two_meanings(history: list[Told]) -> None:
    outer, inner = ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(tools=["recall"], name="inner")
    read_back(history, sent([told.message for told in history], outer, inner))


@given(histories(), st.data())
def test_a_growing_history_keeps_its_bytes(history: list[Told], data: st.DataObject) -> None:
    messages = [told.message for told in history]
    cut = data.draw(st.integers(0, len(messages)))
    assert sent(messages[:cut]) == sent(messages)[:cut]


@given(histories())
def test_the_state_is_not_touched_and_a_second_pass_changes_nothing(history: list[Told]) -> None:
    messages = [told.message for told in history]
    before = copy.deepcopy(messages)

    once = through(request_of(messages), ContextReuseMiddleware())
    twice = through(request_of(messages), ContextReuseMiddleware(), ContextReuseMiddleware(name="second"))

    assert messages == before
    assert twice.messages == once.messages


def test_threads_may_share_an_instance() -> None:
    middleware = ContextReuseMiddleware()
    histories = [[result(text), result(text)] for text in (SEA, SKY)] * 50
    expected = [sent(history) for history in histories]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda history: sent(history, middleware), histories)) == expected

    assert (middleware.stats().prompts, middleware.stats().references) == (100, 100)
