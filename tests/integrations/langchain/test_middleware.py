"""The middleware alone: how it changes the messages of a request, for single cases and for any history."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool

from warmprefix_langchain import ContextReuseMiddleware

SEA = """\
The sea is 3,688 metres deep on average, and 10,935 metres at its deepest point, in the Mariana Trench. It covers seven
tenths of the planet and holds 97 % of its water. A quarter of its floor has been mapped in detail; the rest comes
from satellites, which measure how the water's surface follows gravity. """
SKY = """\
The sky looks blue since the air scatters short waves more than long ones. In the evening light comes a longer way
through it, and what is left of it is red. On Mars it is the other way round: dust scatters the long waves, so the sky
is the colour of butterscotch by day, and blue around a setting sun. """
SEA_QUOTE, SKY_QUOTE = '"The sea is 3,688 metres deep"', '"The sky looks blue since"'


def whole(n: int, name: str = "search") -> str:
    """The reference to the whole result of the n-th message."""
    return f'[Word for word the result of the earlier call {name}({{"n":{n}}}).]'


def part(n: int, quote: str) -> str:
    """The reference to one passage of that result."""
    return f'[Word for word in the result of the earlier call search({{"n":{n}}}): the passage that begins {quote}.]'


def request_of(messages: Sequence[AnyMessage], system_prompt: str | None = None) -> ModelRequest[Any]:
    state: Any = {"messages": list(messages)}  # the type of a state differs between versions
    return ModelRequest(
        model=FakeListChatModel(responses=[]),
        messages=list(messages),
        system_prompt=system_prompt,
        tool_choice=None,
        tools=[],
        response_format=None,
        state=state,
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


def with_calls(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """The messages, with a call in front of each result; its argument is the place of the result."""
    history: list[AnyMessage] = []
    for n, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            message = message.model_copy(update={"tool_call_id": f"c{n}"})
            call = {"name": message.name, "args": {"n": n}, "id": f"c{n}", "type": "tool_call"}
            history.append(AIMessage("", tool_calls=[call]))
        history.append(message)
    return history


def sent(messages: Sequence[AnyMessage], *middlewares: ContextReuseMiddleware) -> Any:
    """The contents of the messages that reach the model, without the calls put in front of results."""
    reached = through(request_of(with_calls(messages)), *(middlewares or [ContextReuseMiddleware()])).messages
    return [message.content for message in reached if not (isinstance(message, AIMessage) and message.tool_calls)]


def result(content: Any, **fields: Any) -> ToolMessage:
    return ToolMessage(content, **{"tool_call_id": "c1", "name": "search", **fields})


# What becomes a reference


def test_a_result_that_comes_again_names_the_earlier_call() -> None:
    assert sent([result(SEA), HumanMessage("And?"), result(SEA)]) == [SEA, "And?", whole(0)]


def test_a_result_whose_call_is_not_in_the_prompt_is_never_named() -> None:
    def call(n: int) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "search", "args": {"n": n}, "id": f"c{n}", "type": "tool_call"}])

    def answer(n: int) -> ToolMessage:
        return result(SEA, tool_call_id=f"c{n}")

    messages: list[AnyMessage] = [answer(0), call(1), answer(1), call(2), answer(2)]
    contents = [m.content for m in through(request_of(messages), ContextReuseMiddleware()).messages]
    assert contents == [SEA, "", SEA, "", whole(1)]


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_the_documents_of_an_artifact_are_passages_and_the_text_around_them_stays(from_checkpoint: bool) -> None:
    documents = [Document(SEA, id="sea"), Document(SKY, metadata={"id": 7})]
    artifact: list[Any] = [document.model_dump() for document in documents] if from_checkpoint else documents

    both, one = sent(
        [
            result(f"Found 2.\n\nText: {SEA}\n\nText: {SKY}\nEnd", artifact=artifact),
            result(f"Found 1.\n\nText: {SKY}", artifact=artifact[1:]),
        ]
    )

    assert both == f"Found 2.\n\nText: {SEA}\n\nText: {SKY}\nEnd"
    assert one == f"Found 1.\n\nText: {part(0, SKY_QUOTE)}"


def test_neighbouring_documents_share_a_reference() -> None:
    artifact = [Document(SEA), Document(SKY)]
    new = "Nothing of this was found before. " * 10
    _, again = sent(
        [
            result(f"{SEA}\n\n{SKY}", artifact=artifact),
            result(f"{SKY}\n\n{SEA}\n\n{new}", artifact=[*artifact[::-1], Document(new)]),
        ]
    )
    assert again == (
        '[Word for word in the result of the earlier call search({"n":0}): '
        f"the passages that begin {SKY_QUOTE}, {SEA_QUOTE}.]\n\n{new}"
    )


def test_a_short_document_never_reads_as_part_of_another_one() -> None:
    """Nothing marks the longer one, so nothing marks the shorter one behind it as its own."""
    copying, locking = f"shutil.copy: {SEA}", "subprocess.fcntl: a short one."
    artifact = [Document(copying, id="shutil.copy"), Document(locking, id="subprocess.fcntl")]
    first, again = sent(
        [
            result(f"{copying}\n\n{locking}", artifact=artifact),
            result(f"{locking}\n\n{copying}", artifact=artifact[::-1]),
        ]
    )
    assert first == f"{copying}\n\n{locking}"
    quote = '"shutil.copy: The sea is 3,688"'
    assert again == f"{locking}\n\n{part(0, quote)}"


def test_documents_that_the_tool_left_out_of_its_text_are_no_passages() -> None:
    artifact = [Document(SKY, id="sky"), Document(SEA, id="sea")]
    found = [result(f"Only: {SEA}", artifact=artifact), result(f"Again: {SEA}", artifact=artifact)]
    assert sent(found)[1] == f"Again: {part(0, SEA_QUOTE)}"
    summary = result("A summary of both. " * 30, artifact=artifact)
    assert sent([summary, summary])[1] == whole(0)


@pytest.mark.parametrize("artifact", [{"page_content": SEA}, "text", 7, [None, 7, {"page_content": None}], object()])
def test_an_artifact_that_holds_no_documents_leaves_the_result_whole(artifact: object) -> None:
    assert sent([result(SEA, artifact=artifact)] * 2) == [SEA, whole(0)]
    assert sent([result(f"{n}. {SEA}", artifact=artifact) for n in range(2)]) == [f"0. {SEA}", f"1. {SEA}"]


def test_a_separator_cuts_text_that_comes_without_documents() -> None:
    short = "Nothing more."
    first, second = sent(
        [result(f"{SEA}\n\n{short}\n\n{SKY}"), result(f"{SKY}\n\n{short}")], ContextReuseMiddleware(separator="\n\n")
    )

    assert first == f"{SEA}\n\n{short}\n\n{SKY}"
    assert second == f"{part(0, SKY_QUOTE)}\n\n{short}"


def test_text_parts_are_handled_one_by_one_and_others_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    quoted = {"type": "quote", "text": SEA}
    cached = {"type": "text", "text": SEA, "cache_control": {"type": "ephemeral"}}
    first, again = sent([result([cached, image, SKY, quoted]), result([SKY, image, cached, quoted])])

    assert first == [cached, image, SKY, quoted]
    assert again == [part(0, SKY_QUOTE), image, {**cached, "text": part(0, SEA_QUOTE)}, quoted]


def test_one_text_part_is_a_result_of_its_own() -> None:
    assert sent([result([{"type": "text", "text": SEA}]), result(SEA)])[1] == whole(0)


def test_short_results_and_errors_stay_as_they_are() -> None:
    errors = [result(SEA, status="error"), result(SEA, status="error")]
    messages = [result("42"), result("42"), *errors, result(SEA), result(SEA)]
    assert sent(messages) == [*[message.content for message in messages[:-1]], whole(4)]


def test_only_the_chosen_tools_are_looked_at() -> None:
    call = {"name": "search", "args": {}, "id": "c2", "type": "tool_call"}
    messages: list[AnyMessage] = [
        *with_calls([result(SEA, name="other")]),
        AIMessage("", tool_calls=[call]),
        result(SEA, name=None, tool_call_id="c2"),
        result(SEA, name=None, tool_call_id="unknown"),
        result(SEA),
    ]

    contents = [m.content for m in through(request_of(messages), ContextReuseMiddleware(tools=["search"])).messages]

    assert contents[1] == contents[3] == contents[4] == SEA
    assert contents[5] == "[Word for word the result of the earlier call search({}).]"


def test_tools_may_be_named_by_themselves() -> None:
    search = StructuredTool.from_function(lambda query: query, name="search", description="Search.")
    middleware = ContextReuseMiddleware(tools=[search, "recall"])
    contents = sent([result(SEA, name=name) for name in ("other", "recall", "search")], middleware)
    assert contents == [SEA, SEA, whole(1, "recall")]


# What stays


def test_a_request_without_repeats_is_passed_on_itself() -> None:
    documents = [Document(SEA, id="sea"), Document(SKY, id="sky")]
    rows = [result('[{"id": 0}]' * 50), result("[ERROR] failed\n" * 50), result("[1] Smith et al.\n" * 50)]
    messages: list[AnyMessage] = [
        HumanMessage("Hello"),
        result("42"),
        result(f"{SEA}\n\n{SKY}", artifact=documents),
        *rows,
    ]
    request = request_of(with_calls(messages))
    assert through(request, ContextReuseMiddleware(separator="\n\n")) is request
    empty = request_of([])
    assert through(empty, ContextReuseMiddleware()) is empty


def test_all_but_the_content_of_a_changed_message_stays() -> None:
    artifact = [Document(SEA, id="sea")]
    given = result(SEA, id="m1", artifact=artifact, additional_kwargs={"a": 1}, response_metadata={"b": 2})
    request = request_of(with_calls([given, given]))
    before = list(request.messages)
    _, first, _, changed = through(request, ContextReuseMiddleware()).messages

    assert first is before[1]
    assert isinstance(changed, ToolMessage)
    assert changed.content == whole(0)
    assert changed.artifact is artifact
    assert (changed.id, changed.tool_call_id, changed.status, changed.name) == ("m1", "c1", "success", "search")
    assert changed.additional_kwargs == {"a": 1}
    assert changed.response_metadata["b"] == 2
    assert before[3].content == SEA
    assert before[3].response_metadata == {"b": 2}
    assert request.messages == before


async def test_async_does_the_same() -> None:
    messages = [result(SEA), result(SEA)]
    middleware = ContextReuseMiddleware()
    reached: list[Any] = []

    async def model(request: ModelRequest[Any]) -> Any:
        reached.extend(message.content for message in request.messages)

    await middleware.awrap_model_call(request_of(with_calls(messages)), model)

    assert reached[1::2] == sent(messages)


def test_an_error_of_the_model_passes_through() -> None:
    def model(request: ModelRequest[Any]) -> Any:
        raise ConnectionError("gone")

    middleware = ContextReuseMiddleware()
    with pytest.raises(ConnectionError, match="gone"):
        middleware.wrap_model_call(request_of([result(SEA)]), model)
    assert middleware.stats().errors == 0


def test_error_while_arranging_leaves_later_messages_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(list[Any]):
        """List that fails when it is read."""

        def __iter__(self) -> Any:
            raise RuntimeError("odd artifact")

    middleware = ContextReuseMiddleware()
    before = [result(SEA), result(SEA)]
    messages = with_calls([*before, result(SKY, artifact=Odd()), result(SEA)])

    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        reached = through(request_of(messages), middleware).messages
        all_odd = request_of(messages[4:])
        assert through(all_odd, middleware) is all_odd

    assert [message.content for message in reached[1:4:2]] == sent(before)
    assert all(message is given for message, given in zip(reached[4:], messages[4:], strict=True))
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert "odd artifact" in caplog.text
    assert (middleware.stats().errors, middleware.stats().references) == (2, 1)


def test_stats_count_references_and_their_tokens() -> None:
    middleware = ContextReuseMiddleware()
    sent([result(SEA), result(SEA), result(SKY)], middleware)
    sent([result(SEA), result(SEA), result(SEA)], middleware)

    stats = middleware.stats()
    assert (stats.prompts, stats.references, stats.errors) == (2, 3, 0)
    assert stats.reference_tokens == 3 * ((len(SEA) + 3) // 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tools": "search"}, TypeError, "tools must be a collection of tools or names, or None, got str"),
        ({"tools": 7}, TypeError, "tools must be a collection of tools or names, or None, got int"),
        ({"tools": [7]}, TypeError, "tools must contain only tools and names, got int"),
        ({"separator": ""}, ValueError, "separator must "),
        ({"separator": 7}, TypeError, "separator must be a str or None, got int"),
        ({"name": ""}, ValueError, "name must be None or at least one character, got ''"),
        ({"name": 7}, TypeError, "name must be a str or None, got int"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be 0 or more, got -1"),
        ({"min_tokens": "64"}, TypeError, "min_tokens must be an int, got str"),
    ],
)
def test_errors_name_the_argument_the_value_and_the_allowed_ones(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        ContextReuseMiddleware(**options)


# Several instances


def test_an_inner_instance_leaves_alone_the_tools_of_an_outer_one() -> None:
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

    assert alone[1] == alone[3] == SKY
    assert both == [*alone[:3], whole(1, "other")]


def test_an_inner_instance_keeps_what_an_outer_one_may_refer_to_later() -> None:
    messages = [result(SEA, name="other"), result(SEA), result(SEA)]
    instances = ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(name="inner")
    assert sent(messages[:2], *instances) == [SEA, SEA]
    assert sent(messages, *instances) == [SEA, SEA, whole(1)]


# Any history

TEXTS = [
    SEA,
    SKY,
    f"{SEA}\n\n{SKY}",
    "Short.",
    "[sea] A line that looks labelled, in a text of its own. " * 6,
    f"A quotation:\n[sea] {SKY}\n[sky] {SEA}",
    "[Word for word the result of the earlier call search({}).] " * 6,
    "x" * 300,
]
A_TEXT = st.sampled_from(TEXTS)
NAME = r"(\w+\(\{\}\))(?:, number (\d+) of such calls)?"
WHOLE = re.compile(rf"\[(?:W|Ran again; w)ord for word the result of the earlier call {NAME}\.\]")
PART = re.compile(
    rf'\[Word for word in the result of the earlier call {NAME}: the passages? that begins? ("(?:[^"\\]|\\.)*".*?)\.\]'
)


class Piece(NamedTuple):
    text: str
    block: bool


class HistoryEntry(NamedTuple):
    """A message, and the pieces of its content if it is a tool result that may change."""

    message: AnyMessage
    pieces: list[Piece] | None


@st.composite
def results(draw: st.DrawFn, call: dict[str, Any]) -> HistoryEntry:
    """One tool's result, whole or with documents, as a text or as a list of parts."""
    fields: dict[str, Any] = {"tool_call_id": call["id"], "id": draw(st.uuids().map(str))}
    fields["name"] = draw(st.sampled_from([call["name"], None]))
    fields["status"] = draw(st.sampled_from(["success"] * 5 + ["error"]))
    if draw(st.booleans()):
        content = draw(A_TEXT)
        pieces = [Piece(content, True)]
    else:
        documents = draw(st.lists(A_TEXT, min_size=1, max_size=4))
        between = draw(st.sampled_from(["\n\n", "\nSource: sea\n", "- "]))
        fields["artifact"] = [{"page_content": text, "metadata": {}} for text in documents]
        if draw(st.booleans()):
            fields["artifact"] = [Document(**document) for document in fields["artifact"]]
        pieces = [piece for text in documents for piece in (Piece(between, False), Piece(text, True))]
        content = "".join(piece.text for piece in pieces)
    message = ToolMessage([{"type": "text", "text": content}] if draw(st.booleans()) else content, **fields)
    return HistoryEntry(message, None if message.status == "error" else pieces)


@st.composite
def histories(draw: st.DrawFn) -> list[HistoryEntry]:
    """Turns with up to three parallel tool calls each."""
    history: list[HistoryEntry] = []
    for turn in range(draw(st.integers(1, 4))):
        history.append(HistoryEntry(HumanMessage(draw(A_TEXT)), None))
        calls: list[Any] = [
            {"name": draw(st.sampled_from(["search", "recall"])), "args": {}, "id": f"{turn}.{i}", "type": "tool_call"}
            for i in range(draw(st.integers(0, 3)))
        ]
        history.append(HistoryEntry(AIMessage(draw(A_TEXT), tool_calls=calls), None))
        history += [draw(results(call)) for call in calls]
    return history


def texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


@dataclass
class Reader:
    """A reader of prompts that sees the calls, their results as sent, and the references."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    """Looks and id of each call."""
    results: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By the id of a call: its result as sent, and as the tool gave it."""

    def named(self, reference: re.Match[str], own: str) -> tuple[str, str]:
        alike = [id for shown, id in self.calls if shown == reference[1]]
        if reference[2]:
            return self.results[alike[int(reference[2]) - 1]]
        found = [self.results.get(id) for id in alike if id != own]
        assert len({None if result is None else result[1] for result in found}) == 1, "ambiguous"
        assert found[0] is not None
        return found[0]

    def check(self, sent: str, pieces: Sequence[Piece], own: str) -> None:
        given = "".join(piece.text for piece in pieces)
        whole = WHOLE.fullmatch(sent)
        if whole is not None:
            assert self.named(whole, own) == (given, given)
            sent = ""
            pieces = []
        rest, expected = sent, [piece.text for piece in pieces if piece.text]
        while expected:
            reference = PART.match(rest)
            if reference is None:
                assert rest.startswith(expected[0])
                rest = rest[len(expected.pop(0)) :]
                continue
            source, _ = self.named(reference, own)
            for n, quote in enumerate(json.loads(f"[{reference[3]}]")):
                assert n == 0 or expected.pop(0) == "\n\n"
                passage = expected.pop(0)
                assert source.count(quote) == 1
                assert source.startswith(passage, source.index(quote))
            rest = rest[reference.end() :]
        assert not rest


def check_prompt(history: Sequence[HistoryEntry], contents: Sequence[Any]) -> None:
    """Check that a reader finds every piece, in full or at the place that a reference names."""
    reader = Reader()
    for (message, pieces), content in zip(history, contents, strict=True):
        if isinstance(message, AIMessage):
            reader.calls += [(f"{call['name']}({{}})", str(call["id"])) for call in message.tool_calls]
        if not isinstance(message, ToolMessage) or pieces is None:
            assert content == message.content
            continue
        [text] = texts(content)
        reader.check(text, pieces, message.tool_call_id)
        reader.results[message.tool_call_id] = text, "".join(piece.text for piece in pieces)


def contents_of(history: Sequence[HistoryEntry], *middlewares: ContextReuseMiddleware) -> list[Any]:
    request = request_of([entry.message for entry in history])
    return [message.content for message in through(request, *(middlewares or [ContextReuseMiddleware()])).messages]


@given(histories())
def test_nothing_is_lost_and_every_reference_names_the_one_place_of_its_text(history: list[HistoryEntry]) -> None:
    check_prompt(history, contents_of(history))


@given(histories())
def test_two_instances_lose_nothing_and_stay_unambiguous(history: list[HistoryEntry]) -> None:
    outer, inner = ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(name="inner")
    check_prompt(history, contents_of(history, outer, inner))


@given(histories(), st.data())
def test_a_growing_history_keeps_its_bytes(history: list[HistoryEntry], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(history)))
    assert contents_of(history[:cut]) == contents_of(history)[:cut]
    two = ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(name="inner")
    assert contents_of(history[:cut], *two) == contents_of(history, *two)[:cut]


@given(histories())
def test_the_state_is_not_touched_and_a_second_pass_changes_nothing(history: list[HistoryEntry]) -> None:
    messages = [entry.message for entry in history]
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


# What the model copies from a reference


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("wraps", [False, True])
async def test_a_reference_in_a_tool_call_becomes_the_text(asynchronous: bool, wraps: bool) -> None:
    arguments = {"path": "copy.txt", "content": f"As {whole(0)}", "forged": whole(7)}
    call = {"name": "write", "args": arguments, "id": "w", "type": "tool_call"}
    function = {"name": "write", "arguments": json.dumps(arguments)}
    content: Any = [{"type": "tool_use", "id": "w", "name": "write", "input": arguments}]
    kwargs = {"tool_calls": [{"id": "w", "type": "function", "function": function}]}
    answer = AIMessage(content, tool_calls=[call], additional_kwargs=kwargs)
    response: Any = ModelResponse(result=[answer]) if wraps else answer
    middleware = ContextReuseMiddleware()
    request = request_of(with_calls([result(SEA), HumanMessage("And?"), result(SEA)]))

    async def model(_: ModelRequest[Any]) -> Any:
        return response

    if asynchronous:
        found: Any = await middleware.awrap_model_call(request, model)
    else:
        found = middleware.wrap_model_call(request, lambda _: response)
    message = found.result[0] if wraps else found
    meant = {**arguments, "content": f"As {SEA}"}
    assert message.tool_calls[0]["args"] == message.content[0]["input"] == meant
    assert json.loads(message.additional_kwargs["tool_calls"][0]["function"]["arguments"]) == meant
    assert answer.tool_calls[0]["args"] == arguments
    assert middleware.stats().restored == 1
    plain = request_of(with_calls([result(SEA)]))
    assert middleware.wrap_model_call(plain, lambda _: response) is response
