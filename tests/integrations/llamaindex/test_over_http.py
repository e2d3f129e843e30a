"""Real engines, a real client and real text: the requests that a server received, and its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore
from llama_index.llms.openai_like import OpenAILike

from warmprefix import ContextPlanner
from warmprefix_llamaindex import ContextReusePostprocessor

MakeNodes = Callable[[Sequence[Any]], list[NodeWithScore]]
ReadNote = Callable[[str, Sequence[str]], list[str]]

NOTE = "Most relevant above: the passage with "
REFERENCE = "above in this conversation"
TURNS = 24


@pytest.fixture
def connect() -> Callable[[Any], OpenAILike]:
    def llm(engine: Any) -> OpenAILike:
        return OpenAILike(
            model=engine.model,
            api_base=engine.base_url,
            api_key="none",
            is_chat_model=True,
            context_window=65_536,
            max_tokens=24,
            max_retries=0,
            reuse_client=False,
        )

    return llm


def query_engine(retriever: Any, llm: OpenAILike, postprocessors: list[Any]) -> Callable[[str, str], Any]:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=postprocessors)
    return lambda conversation, question: engine.query(question)


def citation_engine(retriever: Any, llm: OpenAILike, postprocessors: list[Any]) -> Callable[[str, str], Any]:
    splitter = TokenTextSplitter(chunk_size=4_096)
    engine = CitationQueryEngine(retriever, llm=llm, node_postprocessors=postprocessors, text_splitter=splitter)
    return lambda conversation, question: engine.query(question)


def chat_engine(retriever: Any, llm: OpenAILike, postprocessors: list[Any]) -> Callable[[str, str], Any]:
    chats: dict[str, ContextChatEngine] = {}

    def ask(conversation: str, question: str) -> Any:
        if conversation not in chats:
            memory = ChatMemoryBuffer.from_defaults(token_limit=50_000)
            chats[conversation] = ContextChatEngine.from_defaults(
                retriever, llm=llm, node_postprocessors=postprocessors, memory=memory
            )
        return chats[conversation].chat(question)

    return ask


@pytest.mark.parametrize("make_engine", [query_engine, citation_engine, chat_engine])
def test_more_is_cached_and_every_passage_is_in_every_prompt(
    make_engine: Callable[..., Callable[[str, str], Any]],
    start_engine: Callable[[], Any],
    connect: Callable[[Any], OpenAILike],
    turns: list[Any],
    retriever: Any,
    make_nodes: MakeNodes,
    read_note: ReadNote,
) -> None:
    served = {}
    for name, postprocessors in {"with": [ContextReusePostprocessor()], "without": []}.items():
        server = served[name] = start_engine()
        ask = make_engine(retriever, connect(server), postprocessors)
        for turn in turns[:TURNS]:
            retriever.nodes = make_nodes(turn.passages)
            response = ask(turn.conversation, turn.question)
            assert len(response.source_nodes) >= len(turn.passages)
            assert not any(NOTE in scored.node.get_content() for scored in response.source_nodes)
        assert len(server.prompts) == TURNS
        for turn, prompt in zip(turns, server.prompts, strict=False):
            assert all(passage.text.strip() in unescaped(prompt) for passage in turn.passages)
            assert REFERENCE not in prompt
    for turn, prompt in zip(turns, served["with"].prompts, strict=False):
        read_note(unescaped(prompt), [passage.text.strip() for passage in turn.passages])
    assert any(NOTE in prompt for prompt in served["with"].prompts)
    assert not any(NOTE in prompt for prompt in served["without"].prompts)
    ratios = {name: server.hit_ratio for name, server in served.items()}
    assert ratios["with"] > ratios["without"]


def unescaped(prompt: str) -> str:
    return prompt.replace("\\[", "[")


@pytest.mark.parametrize("streaming", [False, True])
def test_five_turns_hold_their_context_whatever_fails(
    streaming: bool,
    start_engine: Callable[[], Any],
    connect: Callable[[Any], OpenAILike],
    turns: list[Any],
    retriever: Any,
    make_nodes: MakeNodes,
    read_note: ReadNote,
) -> None:
    """The same passages come back in every turn, and the third turn's first attempt fails."""
    server = start_engine()
    llm = connect(server)
    chat = CondensePlusContextChatEngine.from_defaults(
        retriever,
        llm=llm,
        system_prompt="Be brief.",
        skip_condense=True,
        node_postprocessors=[ContextReusePostprocessor()],
        memory=ChatMemoryBuffer.from_defaults(token_limit=50_000),
    )

    def ask(question: str) -> str:
        if streaming:
            return "".join(chat.stream_chat(question).response_gen)
        return str(chat.chat(question))

    passages = list(turns[0].passages)
    answers, asked = [], []
    for turn in range(5):
        found = passages[turn:] + passages[:turn]
        retriever.nodes = make_nodes(found)
        question = f"{turns[turn].question} ({turn})"
        if turn == 2 and not streaming:
            server.fail_next(1)
            with pytest.raises(Exception, match="broken"):
                ask(question)
        asked.append(question)
        answers.append(ask(question))
    assert len(server.bodies) == (5 if streaming else 6)
    assert len(server.answered) == 5
    if not streaming:
        assert server.bodies[2] == server.bodies[3]
    for turn, (body, prompt) in enumerate(zip([a.body for a in server.answered], server.prompts, strict=True)):
        system, *messages = body["messages"]
        assert REFERENCE not in prompt
        assert all(passage.text.strip() in unescaped(system["content"]) for passage in passages)
        named = read_note(prompt, [passage.text.strip() for passage in passages])
        assert named == ([] if turn == 0 else [f"Doc_{turn % len(passages)}"])
        # The history holds the questions and answers, in the same bytes each time, and no context.
        earlier = [text for pair in zip(asked[:turn], answers[:turn], strict=True) for text in pair]
        assert [message["content"].strip() for message in messages] == [
            *(text.strip() for text in earlier),
            asked[turn],
        ]
    # Behind the first turn, the context before the note is the same to the byte.
    contexts = {body["messages"][0]["content"].partition("\n\nMost relevant")[0] for body in server.bodies[1:]}
    assert len(contexts) == 1


def test_one_planner_serves_two_engines(
    start_engine: Callable[[], Any],
    connect: Callable[[Any], OpenAILike],
    turns: list[Any],
    retriever: Any,
    make_nodes: MakeNodes,
) -> None:
    """An order learned from one engine's questions is used by the other."""
    planner = ContextPlanner()
    passages = turns[0].passages
    orders = []
    for kind in (query_engine, chat_engine):
        server = start_engine()
        ask = kind(retriever, connect(server), [ContextReusePostprocessor(planner=planner)])
        retriever.nodes = make_nodes(passages)
        ask("chat", turns[0].question)
        retriever.nodes = make_nodes(passages[::-1])
        orders.append([scored.node_id for scored in ask("chat", turns[1].question).source_nodes])
    assert orders[0] == orders[1] == [passage.id for passage in passages]
