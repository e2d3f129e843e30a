"""Placement "tail": what later turns refer to, as the engine received it, and which turns count."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer, ChatSummaryMemoryBuffer, Memory
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import RetrieverTool
from llama_index.core.workflow import Context, StartEvent, StopEvent, Workflow, step
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import instrument_tags

from redis_servers import Server
from warmprefix import Branch, Choice, ContextPlanner
from warmprefix_llamaindex import ContextReusePostprocessor
from warmprefix_redis.settings import SharedSettings

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]
OpenModel = Callable[[Any], AbstractAsyncContextManager[Any]]

NAMED = re.compile(r"Please also use the context labelled ((?:\[[^\]]+\](?:, )?)+) above in this conversation\.")
TEXTS = [
    (f"Passage {i} says that {word} matters. " + f"More about {word} follows here. " * 12).strip()
    for i, word in enumerate(["tides", "stars", "bees", "glass", "rivers", "iron", "salt", "clouds"])
]


def context_of(nodes: Sequence[NodeWithScore]) -> str:
    return "\n\n".join(scored.node.get_content(MetadataMode.LLM) for scored in nodes)


def texts_of(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [scored.node.get_content(MetadataMode.NONE) for scored in nodes]


def references(prompt: str, texts: Sequence[str] = TEXTS) -> list[str]:
    """Return the texts that a prompt's references name; each must stand in full, once labelled so, before them."""
    named: list[str] = []
    for note in NAMED.finditer(prompt):
        for label in re.findall(r"\[([^\]]+)\]", note[1]):
            headed = [found.end() for found in re.finditer(rf"(?m)^\[{re.escape(label)}\] ", prompt[: note.start()])]
            assert headed, f"{label} stands nowhere before the reference"
            [text] = {text for text in texts for end in headed if prompt.startswith(text.strip(), end)}
            named.append(text)
    return named


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with Server() as server:
        yield server.url


@pytest.fixture
def planner() -> Iterator[ContextPlanner]:
    with ContextPlanner(annotate="both") as planner:
        yield planner


def labelled(planner: ContextPlanner, **options: Any) -> ContextReusePostprocessor:
    return ContextReusePostprocessor(planner=planner, placement="tail", annotate="labels", **options)


class Loud(TextNode):
    """Node whose text can't show a label."""

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        return self.text.upper()


class Chat(Workflow):
    """Chat that keeps messages and turn id in its context, and retrieves in a step of its own."""

    def __init__(self, llm: Any, warm: ContextReusePostprocessor | None) -> None:
        super().__init__(timeout=30)
        self.llm = llm
        self.warm = warm

    @step
    async def answer(self, ctx: Context, event: StartEvent) -> StopEvent:
        messages = await ctx.store.get("messages", default=[])
        nodes = event.nodes
        if self.warm is not None:
            tags = {"after_turn": await ctx.store.get("turn", default=None), "tenant": event.get("tenant", None)}
            with instrument_tags(tags):
                nodes = await self.warm.apostprocess_nodes(nodes, query_str=event.question)
        messages = [*messages, ChatMessage(role="user", content=f"{context_of(nodes)}\n\n{event.question}")]
        if event.get("stream", False):
            chunks = [chunk async for chunk in await self.llm.astream_chat(messages)]
            answer = chunks[-1].message
        else:
            answer = (await self.llm.achat(messages)).message
        if event.get("fails", False):
            raise RuntimeError("after the answer")
        await ctx.store.set("messages", [*messages, ChatMessage(role="assistant", content=answer.content)])
        await ctx.store.set("turn", nodes[0].metadata.get("warmprefix_turn"))  # None without a postprocessor
        return StopEvent(result=str(answer.content))


async def run(chat: Chat, state: dict[str, Any] | None, question: str, nodes: Any, **options: Any) -> dict[str, Any]:
    """Run one turn on a persisted context, and return the context after it, as JSON keeps it."""
    ctx = Context(chat) if state is None else Context.from_dict(chat, state)
    await chat.run(ctx=ctx, question=question, nodes=nodes, **options)
    kept: dict[str, Any] = json.loads(json.dumps(ctx.to_dict()))
    return kept


# -- a workflow with a persisted context ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_two_processes_alternate_turns_of_a_persisted_context(
    stream: bool,
    start_engine: Callable[[], Any],
    open_model: OpenModel,
    turns: list[Any],
    make_nodes: MakeNodes,
    redis_url: str,
) -> None:
    """Twelve turns, whose worker changes each time, find passages of their own turn and of the one before."""
    found = [[*turns[i].passages[:5], *turns[max(i - 1, 0)].passages[:3]] for i in range(12)]
    found = [list({passage.text.strip(): passage for passage in passages}.values()) for passages in found]
    texts = [passage.text.strip() for passages in found for passage in passages]
    tokens, lengths = {}, {}
    settings = SharedSettings(redis_url=redis_url, store_budget=5)  # seconds: a busy machine is no fault here
    async with AsyncExitStack() as stack:
        planners = [
            await stack.enter_async_context(ContextPlanner.from_url(settings=settings, annotate="labels"))
            for _ in range(2)
        ]
        for arm in ("record", "shown", "without"):
            server = start_engine()
            async with open_model(server) as llm:
                shown: list[ChatMessage] = []
                rule = (lambda query, shown=shown: shown) if arm == "shown" else None
                chats = [
                    Chat(llm, None if arm == "without" else labelled(planner, conversation=rule))
                    for planner in planners
                ]
                state = None
                for i, passages in enumerate(found):
                    state = await run(chats[i % 2], state, turns[i].question, make_nodes(passages), stream=stream)
                    ctx = Context.from_dict(chats[0], state)
                    shown[:] = await ctx.store.get("messages")
            for passages, prompt in zip(found, server.prompts, strict=True):
                assert all(passage.text.strip() in prompt.replace("\\[", "[") for passage in passages)
                if arm != "without":
                    references(prompt.replace("\\[", "["), texts)
            tokens[arm] = server.prompt_tokens
            lengths[arm] = sum(len(re.sub(r"\[p?\d+(~\w+)?\]", "", prompt)) for prompt in server.prompts)
            assert ("above in this conversation" in server.prompts[-1]) is (arm != "without")
    assert lengths["record"] <= 1.02 * lengths["shown"]
    assert max(tokens["record"], tokens["shown"]) < tokens["without"]


async def test_two_runs_from_one_context_are_two_branches(
    start_engine: Callable[[], Any], open_model: OpenModel, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    server = start_engine()
    async with open_model(server) as llm:
        chat = Chat(llm, labelled(planner))
        first = await run(chat, None, "1?", make_nodes(TEXTS[:2]))
        left = await run(chat, first, "left?", make_nodes(TEXTS[1:3]))
        right = await run(chat, first, "right?", make_nodes(TEXTS[2:4]))
        await run(chat, left, "left again?", make_nodes([TEXTS[2], TEXTS[3]]))
        await run(chat, right, "right again?", make_nodes([TEXTS[3], TEXTS[1]]))
        await run(chat, first, "resumed?", make_nodes(TEXTS[:4]))
    seen = [references(prompt)[-2:] for prompt in server.prompts]
    assert [len(named) for named in seen] == [0, 1, 0, 2, 2, 2]  # with those of the history
    assert all(text in server.prompts[2] for text in TEXTS[2:4])
    assert TEXTS[3] in server.prompts[3]
    assert references(server.prompts[4]) == [TEXTS[3], TEXTS[1]]
    assert references(server.prompts[5]) == TEXTS[:2]


async def test_a_recorded_turn_has_only_the_nodes_that_were_fed(
    start_engine: Callable[[], Any], open_model: OpenModel, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    server = start_engine()
    async with open_model(server) as llm:
        chat = Chat(llm, labelled(planner, choose=Choice(k=2)))
        state = await run(chat, None, "1?", make_nodes(TEXTS[:4]))
        state = await run(chat, state, "2?", make_nodes([TEXTS[1], TEXTS[3], TEXTS[0]]))
        await run(chat, state, "3?", make_nodes([TEXTS[3], TEXTS[2], TEXTS[1]]))
    shown = [[text in prompt for text in TEXTS[:4]] for prompt in server.prompts]
    assert shown == [[True, True, False, False], [True, True, False, True], [True, True, True, True]]
    assert [references(prompt) for prompt in server.prompts] == [[], [TEXTS[1]], [TEXTS[1], TEXTS[3]]]


@pytest.mark.parametrize("how", ["error", "cancelled", "after", "empty"])
async def test_a_turn_that_was_not_kept_is_not_seen(
    how: str, start_engine: Callable[[], Any], open_model: OpenModel, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    server = start_engine()
    async with open_model(server) as llm:
        chat = Chat(llm, labelled(planner))
        first = await run(chat, None, "1?", make_nodes(TEXTS[:1]))
        if how == "empty":
            server.script({"role": "assistant", "content": ""})
            dropped = await run(chat, first, "2?", make_nodes(TEXTS[:2]))
            assert planner.stats().commits == 1
            await run(chat, dropped, "3?", make_nodes(TEXTS[:2]))  # what the empty turn continued is unknown now
            assert TEXTS[0] in server.prompts[-1].rpartition("2?")[2]
        elif how == "cancelled":
            task = asyncio.ensure_future(run(chat, first, "2?", make_nodes(TEXTS[:2])))
            while len(server.bodies) < 2:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            server.fail_next(1 if how == "error" else 0)
            with pytest.raises(Exception, match=r"broken|after the answer"):
                await run(chat, first, "2?", make_nodes(TEXTS[:2]), fails=how == "after")
        await run(chat, first, "again?", make_nodes(TEXTS[:2]))
    assert references(server.prompts[-1]) == [TEXTS[0]]
    assert TEXTS[1] in server.prompts[-1].rpartition("again?")[0]
    assert planner.stats().open_plans == 0


@pytest.mark.parametrize("by_name", [False, True])
async def test_conversations_at_the_same_time_share_nothing(
    by_name: bool,
    start_engine: Callable[[], Any],
    open_model: OpenModel,
    make_nodes: MakeNodes,
    planner: ContextPlanner,
) -> None:
    """All of them find the same passages, and the calls of every third one fail in its second turn."""
    server = start_engine()
    warm = labelled(planner, conversation=(lambda query: query.query_str.partition(" ")[0]) if by_name else None)
    async with open_model(server) as llm:
        chat = Chat(llm, warm)
        states: list[Any] = [None] * 12
        for turn in range(4):
            failing = turn == 1
            runs = [
                run(chat, state, f"chat-{i} turn-{turn}?", make_nodes(TEXTS[: 2 + turn]), fails=failing and i % 3 == 0)
                for i, state in enumerate(states)
            ]
            ended = await asyncio.gather(*runs, return_exceptions=True)
            states = [
                state if isinstance(after, Exception) else after for state, after in zip(states, ended, strict=True)
            ]
    for i in range(12):
        last = next(prompt for prompt in server.prompts if f"chat-{i} turn-3?" in prompt)
        kept = [2, 4] if i % 3 == 0 else [2, 3, 4]
        assert references(last) == [text for count in kept for text in TEXTS[:count]]
    assert planner.stats().open_plans == 0


@pytest.mark.parametrize("how", ["cancelled", "failed", "good"])
async def test_a_name_waits_for_the_end_of_the_run(
    how: str, make_nodes: MakeNodes, planner: ContextPlanner, recording_llm: Any
) -> None:
    """Until then the application has stored nothing, whatever the model has answered."""
    llm, answered = recording_llm(), asyncio.Event()

    class Waiting(Chat):
        @step
        async def answer(self, ctx: Context, event: StartEvent) -> StopEvent:
            with instrument_tags({"conversation_id": "chat"}):
                nodes = await labelled(planner).apostprocess_nodes(event.nodes)
            await self.llm.acomplete(context_of(nodes))
            answered.set()
            if how == "cancelled":
                await asyncio.Event().wait()
            if how == "failed":
                raise RuntimeError("after the answer")
            return StopEvent(result="good")

    handler = Waiting(llm, None).run(nodes=make_nodes(TEXTS[:2]))
    await answered.wait()
    if how == "cancelled":
        await handler.cancel_run()
    await asyncio.gather(handler, return_exceptions=True)
    assert (planner.stats().commits, planner.stats().abandons) == ((1, 0) if how == "good" else (0, 1))


# -- chat engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sync", "async", "stream", "astream"])
@pytest.mark.parametrize("known", ["name", "memory"])
async def test_a_simple_chat_whose_messages_hold_the_context(
    how: str, known: str, recording_llm: Any, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    """The application puts what it retrieved into its messages, and LlamaIndex keeps these."""
    llm = recording_llm()
    memory = ChatMemoryBuffer.from_defaults(token_limit=20_000)
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    warm = labelled(planner, conversation="chat" if known == "name" else memory)
    for i in range(4):
        nodes = make_nodes(TEXTS[i : i + 3])
        if how in ("sync", "stream"):
            message = f"{context_of(warm.postprocess_nodes(nodes, query_str='q'))}\n\n{i}?"
        else:
            message = f"{context_of(await warm.apostprocess_nodes(nodes, query_str='q'))}\n\n{i}?"
        if how == "sync":
            chat.chat(message)
        elif how == "async":
            await chat.achat(message)
        elif how == "stream":
            assert "".join(chat.stream_chat(message).response_gen)
        else:
            response = await chat.astream_chat(message)
            assert "".join([token async for token in response.async_response_gen()])
            await asyncio.sleep(0)
        assert references(llm.prompts[-1])[-2:] == (TEXTS[i : i + 2] if i else [])
    assert planner.stats().commits == 4


@pytest.mark.parametrize(
    "kind",
    [RetrieverQueryEngine.from_args, ContextChatEngine.from_defaults, CondensePlusContextChatEngine.from_defaults],
)
def test_engines_that_rebuild_their_context_get_no_references_and_are_named(
    kind: Any,
    recording_llm: Any,
    retriever: Any,
    make_nodes: MakeNodes,
    planner: ContextPlanner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = recording_llm()
    options = {"llm": llm, "node_postprocessors": [labelled(planner, conversation="chat")]}
    if kind != RetrieverQueryEngine.from_args:
        options["memory"] = ChatMemoryBuffer.from_defaults(token_limit=50_000)
    engine = kind(retriever, **options)
    retriever.nodes = make_nodes(TEXTS[:3])
    with caplog.at_level(logging.WARNING, "warmprefix"):
        for question in ("1?", "2?", "3?"):
            response = engine.chat(question) if hasattr(engine, "chat") else engine.query(question)
            assert texts_of(response.source_nodes) == TEXTS[:3]
    assert all(text in prompt for prompt in llm.prompts[-1:] for text in TEXTS[:3])
    assert not any("above in this conversation" in prompt for prompt in llm.prompts)
    assert [record.args for record in caplog.records] in ([(type(engine).__name__,)], [])  # once in a process


def test_a_synthesizer_whose_template_holds_the_history_answers_a_turn(
    recording_llm: Any, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    llm = recording_llm(is_chat_model=True)
    warm = labelled(planner, conversation="chat")
    messages: list[ChatMessage] = []
    question = ChatMessage(role="user", content="{context_str}\n\n{query_str}")
    for i in range(3):
        synthesizer = get_response_synthesizer(llm, text_qa_template=ChatPromptTemplate([*messages, question]))
        nodes = warm.postprocess_nodes(make_nodes(TEXTS[i : i + 2]), query_str=f"{i}?")
        response = synthesizer.synthesize(f"{i}?", nodes)
        assert texts_of(response.source_nodes) == TEXTS[i : i + 2]
        messages += [
            ChatMessage(role="user", content=f"{context_of(nodes)}\n\n{i}?"),
            ChatMessage(role="assistant", content=str(response)),
        ]
    assert references(llm.prompts[-1]) == [TEXTS[1], TEXTS[2]]
    plain = get_response_synthesizer(llm)
    plain.synthesize("alone?", warm.postprocess_nodes(make_nodes(TEXTS[:3]), query_str="alone?"))
    assert all(text in llm.prompts[-1] for text in TEXTS[:3])
    assert "above in this conversation" not in llm.prompts[-1]


def test_a_prompt_without_what_a_reference_names_ends_references(
    recording_llm: Any, make_nodes: MakeNodes, planner: ContextPlanner, caplog: pytest.LogCaptureFixture
) -> None:
    """The application names one conversation, and keeps none: no postprocessor can see that before the prompt."""
    llm = recording_llm()
    warm = labelled(planner, conversation="chat")
    for i in range(4):
        nodes = warm.postprocess_nodes(make_nodes(TEXTS[:2]), query_str="q")
        llm.complete(f"{context_of(nodes)}\n\n{i}?")
    assert ["above in this conversation" in prompt for prompt in llm.prompts] == [False, True, False, False]
    assert "RecordingLLM" in caplog.text


@pytest.mark.parametrize("in_span", [True, False])
@pytest.mark.parametrize("one_block", [True, False])
def test_a_turn_that_retrieves_twice_gives_no_label_to_two_texts(
    in_span: bool, one_block: bool, recording_llm: Any, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    """Two tool calls of an agent find two versions of a document; a later turn finds the second one again."""
    llm, warm = recording_llm(), labelled(planner)
    history = ""

    def find(text: str) -> str:
        nonlocal history
        [scored] = make_nodes([text])
        scored.node.id_ = "Doc_0"
        [shown] = warm.postprocess_nodes([scored])
        history += f"{context_of([shown])}\n\n"
        llm.complete(history)
        return str(shown.metadata["warmprefix_turn"])

    def turn() -> str:
        if one_block:
            with instrument_tags({"after_turn": None}):
                return [find(text) for text in TEXTS[:2]][-1]
        ids = []
        for text in TEXTS[:2]:
            with instrument_tags({"after_turn": None}):
                ids.append(find(text))
        return ids[-1]

    after = get_dispatcher(__name__).span(turn)() if in_span else turn()
    with instrument_tags({"after_turn": after}):
        find(TEXTS[1])
    [named] = re.findall(r"context labelled \[(.+?)\] above", history)
    assert re.findall(rf"^\[{re.escape(named)}\] (.*)", history, re.MULTILINE) == [TEXTS[1]]


def test_each_turn_has_an_id_also_after_a_failure(
    recording_llm: Any, make_nodes: MakeNodes, planner: ContextPlanner
) -> None:
    """A history that was cut, then a node without a label: applications store the id of each turn, never None."""
    llm, warm = recording_llm(), labelled(planner)
    after: list[str | None] = [None]
    for i in range(5):
        nodes = make_nodes(TEXTS[:2]) if i < 4 else [NodeWithScore(node=Loud(text=TEXTS[0]))]
        with instrument_tags({"after_turn": after[-1]}):
            shown = warm.postprocess_nodes(nodes, query_str="q")
        llm.complete(f"{context_of(shown)}\n\n{i}?")
        after.append(shown[0].metadata["warmprefix_turn"])
        assert "warmprefix_turn" not in nodes[0].metadata
    assert ["above in this conversation" in prompt for prompt in llm.prompts] == [False, True, False, False, False]
    assert len(set(after)) == 6


# -- agents ------------------------------------------------------------------------------------------------------------


def asks(query: str, number: int) -> dict[str, Any]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "search", "arguments": query}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("known", ["name", "branch"])
async def test_an_agent_whose_tool_results_stay_in_its_memory(
    known: str,
    start_engine: Callable[[], Any],
    open_model: OpenModel,
    retriever: Any,
    make_nodes: MakeNodes,
    planner: ContextPlanner,
) -> None:
    """A run that fails after a model call has seen the passages leaves nothing in the memory."""
    server = start_engine()
    after: list[str | None] = [None]
    rule: Any = "chat" if known == "name" else lambda query: Branch(after=after[-1])
    tool = RetrieverTool.from_defaults(
        retriever, node_postprocessors=[labelled(planner, conversation=rule)], name="search", description="Searches."
    )
    async with open_model(server) as llm:
        agent = FunctionAgent(tools=[tool], llm=llm, streaming=False)
        memory = ChatMemoryBuffer.from_defaults(token_limit=50_000)
        for i in range(4):
            retriever.nodes = make_nodes(TEXTS[: 2 + i])
            if i == 1:
                server.script(asks('{"input": "x"}', i), asks('{"input": "y"}', 10))
                with pytest.raises(Exception, match="iterations"):
                    await agent.run(f"{i}?", memory=memory, max_iterations=2)
                continue
            server.script(asks('{"input": "x"}', i), {"role": "assistant", "content": f"Answer {i}."})
            output: Any = await agent.run(f"{i}?", memory=memory)
            nodes = output.tool_calls[-1].tool_output.raw_output
            assert texts_of(nodes) == TEXTS[: 2 + i]
            after.append(nodes[0].metadata["warmprefix_turn"])
    prompts = [prompt for prompt in server.prompts if "Answer 0." in prompt and "2?" in prompt]
    assert references(prompts[1]) == TEXTS[:2]
    assert references(server.prompts[-1]) == [*TEXTS[:2], *TEXTS[:4]]


# -- memories ----------------------------------------------------------------------------------------------------------


async def test_what_a_memory_will_cut_is_unseen(
    make_nodes: MakeNodes, planner: ContextPlanner, recording_llm: Any
) -> None:
    """No prompt of the chat holds a reference of its own turn to a text that the memory has cut."""
    flushing = Memory.from_defaults(token_limit=1_000, token_flush_size=200)
    for memory in (ChatMemoryBuffer.from_defaults(token_limit=700), flushing):
        llm = recording_llm()
        chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
        warm = labelled(planner, conversation=memory)
        made = 0
        for i in range(24):
            nodes = make_nodes([TEXTS[i % 8], TEXTS[i // 2 % 3]])
            message = f"{context_of(await warm.apostprocess_nodes(nodes, query_str='q'))}\n\n{i}?"
            await chat.achat(message)
            own = NAMED.findall(message)
            made += len(own)
            for label in re.findall(r"\[([^\]]+)\]", "".join(own)):
                assert f"[{label}] Passage" in llm.prompts[-1], (type(memory).__name__, i)
        assert made
    store: Any = flushing.sql_store
    await store._async_engine.dispose()


def test_a_memory_that_does_not_show_its_messages_is_refused(recording_llm: Any) -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=recording_llm(), token_limit=100)
    with pytest.raises(ValueError, match="ChatSummaryMemoryBuffer does not show which messages"):
        ContextReusePostprocessor(placement="tail", conversation=memory)


# -- bad input ---------------------------------------------------------------------------------------------------------


def raising(query: object) -> Any:
    raise LookupError("no conversation")


@pytest.mark.parametrize("rule", [raising, lambda query: 42, lambda query: ["a text"], lambda query: Branch])
def test_a_conversation_that_cannot_be_known_costs_tokens_only(
    rule: Any, make_nodes: MakeNodes, planner: ContextPlanner, caplog: pytest.LogCaptureFixture
) -> None:
    warm = labelled(planner, conversation=rule)
    for _ in range(3):
        assert context_of(warm.postprocess_nodes(make_nodes(TEXTS[:2]))) == "\n\n".join(TEXTS[:2])
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_an_async_function_reads_the_history_where_it_is(make_nodes: MakeNodes, planner: ContextPlanner) -> None:
    memory = ChatMemoryBuffer.from_defaults()

    async def history(query: object) -> list[ChatMessage]:
        return await memory.aget()

    warm = labelled(planner, conversation=history)
    for references_made in (False, True):
        shown = context_of(await warm.apostprocess_nodes(make_nodes(TEXTS[:2])))
        assert ("above in this conversation" in shown) is references_made
        await memory.aput(ChatMessage(role="user", content=shown))


@pytest.mark.parametrize("rule", [42, b"chat", ["chat"], Branch(after=None)])
def test_a_conversation_of_another_type_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match="conversation must be a name, a memory, or a function"):
        ContextReusePostprocessor(placement="tail", conversation=rule)


@pytest.mark.parametrize("after", [42, "", "never seen", "x" * 2_000])
def test_an_unknown_turn_has_shown_nothing(after: Any, make_nodes: MakeNodes, planner: ContextPlanner) -> None:
    warm = labelled(planner)
    with instrument_tags({"after_turn": after}):
        shown = context_of(warm.postprocess_nodes(make_nodes(TEXTS[:2])))
    assert all(text.strip() in shown for text in TEXTS[:2])


def test_an_id_of_another_tenant_is_unknown(make_nodes: MakeNodes, planner: ContextPlanner, recording_llm: Any) -> None:
    llm, warm = recording_llm(), labelled(planner)
    after: str | None = None
    for tenant in ("acme", "evil", "acme"):
        with instrument_tags({"after_turn": after, "tenant": tenant}):
            nodes = warm.postprocess_nodes(make_nodes(TEXTS[:2]))
        llm.complete(f"{llm.prompts[0] if llm.prompts else ''}\n\n{context_of(nodes)}")
        after = after or nodes[0].metadata["warmprefix_turn"]
    assert ["above in this conversation" in prompt for prompt in llm.prompts] == [False, False, True]


async def test_another_tenants_answer_to_the_same_texts_commits_nothing(
    make_nodes: MakeNodes, planner: ContextPlanner, recording_llm: Any
) -> None:
    """Two requests of one job hold the same passages at the same time, and only one is answered."""
    warm, planned, answered = labelled(planner), asyncio.Event(), asyncio.Event()
    span = get_dispatcher(__name__).span

    @span
    async def ask(tenant: str, llm: Any) -> None:
        with instrument_tags({"conversation_id": "chat", "tenant": tenant}):
            nodes = await warm.apostprocess_nodes(make_nodes(TEXTS[:2]))
            if tenant == "acme":
                planned.set()
                await answered.wait()
            else:
                await planned.wait()
            await llm.acomplete(context_of(nodes))
            answered.set()

    @span
    async def job() -> None:
        asked = (ask("acme", recording_llm(failures=1)), ask("evil", recording_llm()))
        failed, good = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(failed, ConnectionError)
        assert good is None

    await job()
    assert (planner.stats().commits, planner.stats().abandons) == (1, 1)


def test_nodes_may_be_planned_twice_and_keep_their_scores(make_nodes: MakeNodes, planner: ContextPlanner) -> None:
    warm, nodes = labelled(planner, conversation="chat"), make_nodes(TEXTS[:2])
    nodes[0].node.metadata["file"] = "{sea}.txt"
    once = warm.postprocess_nodes(nodes)
    twice = warm.postprocess_nodes(once)
    assert context_of(twice).replace("~", "") == context_of(once).replace("~", "")
    assert [scored.score for scored in twice] == [scored.score for scored in nodes]
    assert texts_of(twice) == TEXTS[:2]
    assert context_of(once).startswith("[Doc_0")
    assert "file: {sea}.txt" in context_of(once)


def test_a_node_that_shows_its_text_in_its_own_way_is_sent_as_it_is(planner: ContextPlanner) -> None:
    node: BaseNode = Loud(text=TEXTS[0])
    shown = labelled(planner, conversation="chat").postprocess_nodes([NodeWithScore(node=node)])
    assert context_of(shown) == TEXTS[0].upper()
    assert planner.stats().open_plans == 0
