"""The middleware in real agents, with a scripted model that records its prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
from langchain.agents import AgentState, create_agent
from langchain.agents import middleware as shipped
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    SummarizationMiddleware,
)
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, StructuredTool, create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from pydantic import BaseModel, PrivateAttr

from warmprefix_langchain import ContextReuseMiddleware

TEXTS = {
    "sea": "The sea is 3,688 metres deep on average, and 10,935 metres at most. " + "It is wide, salty and cold. " * 9,
    "sky": "The sky looks blue since air scatters short waves more than long ones. " + "It is red at night. " * 12,
    "sun": "The sun is 149.6 million kilometres away, or eight minutes as light goes. " + "It is hot. " * 20,
}
CALLS = count()
NAME = r'(\w+\(\{"query":"[^"]*"\}\))(?:, number (\d+) of such calls)?'
REFERENCE = re.compile(rf"\[(?:W|Ran again; w)ord for word the result of the earlier call {NAME}\.\]")
PART = "[Word for word in the result of the earlier call "


class ScriptedModel(BaseChatModel):
    """Chat model that returns or raises the next entry of its script, and records every prompt."""

    _script: list[AIMessage | Exception] = PrivateAttr(default_factory=list)
    _prompts: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    def script(self, *answers: AIMessage | Exception) -> ScriptedModel:
        self._script.extend(answers)
        return self

    @property
    def prompts(self) -> list[list[BaseMessage]]:
        return self._prompts

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self._prompts.append(list(messages))
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ChatResult(generations=[ChatGeneration(message=answer)])


def call(*queries: str, name: str = "search") -> AIMessage:
    """An answer that calls a tool once for each query, in parallel."""
    calls: list[Any] = [
        {"name": name, "args": {"query": query}, "id": f"call-{next(CALLS)}", "type": "tool_call"} for query in queries
    ]
    return AIMessage("", tool_calls=calls)


def look_up(query: str) -> str:
    """Look something up."""
    return TEXTS[query]


SEARCH = StructuredTool.from_function(look_up, name="search")


def agent_with(
    model: BaseChatModel,
    middleware: Sequence[AgentMiddleware[Any, Any]] | None = None,
    tools: Sequence[BaseTool] = (SEARCH,),
    **options: Any,
) -> Any:
    chosen = [ContextReuseMiddleware()] if middleware is None else middleware
    return create_agent(model, list(tools), middleware=chosen, **options)


def ask(agent: Any, question: str, thread: str | None = None) -> Any:
    return agent.invoke({"messages": [HumanMessage(question)]}, config(thread))


def config(thread: str | None) -> Any:
    return {"configurable": {"thread_id": thread}} if thread else None


def contents(prompt: Sequence[BaseMessage]) -> list[Any]:
    return [message.content for message in prompt]


def tool_results(prompt: Sequence[BaseMessage]) -> list[str]:
    return [str(message.content) for message in prompt if isinstance(message, ToolMessage)]


def assert_complete(prompt: Sequence[BaseMessage], expected: Sequence[str]) -> None:
    """The prompt's tool results, with every reference looked up in what stands before it, are the expected texts."""
    calls: list[tuple[str, str | None]] = []
    shown: dict[str | None, str] = {}
    found: list[str] = []
    for message in prompt:
        if isinstance(message, AIMessage):
            calls += [(f'{c["name"]}({{"query":"{c["args"]["query"]}"}})', c["id"]) for c in message.tool_calls]
        if not isinstance(message, ToolMessage):
            continue
        text = str(message.content)
        reference = REFERENCE.fullmatch(text)
        if reference is not None:
            alike = [id for looks, id in calls if looks == reference[1] and id != message.tool_call_id]
            text = shown[alike[int(reference[2] or 1) - 1]]
        else:
            shown[message.tool_call_id] = text
        found.append(text)
    assert found == list(expected)


def assert_growing(prompts: Sequence[Sequence[BaseMessage]]) -> None:
    """Each prompt begins with all of the one before it."""
    for earlier, later in pairwise(prompts):
        assert contents(later)[: len(earlier)] == contents(earlier)


def test_a_result_that_comes_again_is_a_reference_and_the_state_keeps_it_raw() -> None:
    model = ScriptedModel().script(call("sea"), call("sea"), AIMessage("Deep."))
    middleware = ContextReuseMiddleware()

    state = ask(agent_with(model, [middleware]), "How deep?")

    assert_growing(model.prompts)
    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)
    assert REFERENCE.fullmatch(tool_results(model.prompts[-1])[1])
    assert tool_results(state["messages"]) == [TEXTS["sea"]] * 2
    assert not any("warmprefix" in message.response_metadata for message in state["messages"])
    assert (middleware.stats().prompts, middleware.stats().references) == (3, 1)


async def test_async_agents_send_the_same_prompts() -> None:
    model, awaited = (ScriptedModel().script(call("sea"), call("sea", "sky"), AIMessage("Deep.")) for _ in range(2))

    ask(agent_with(model), "How deep?")
    await agent_with(awaited).ainvoke({"messages": [HumanMessage("How deep?")]})

    assert list(map(contents, awaited.prompts)) == list(map(contents, model.prompts))


async def test_tools_that_are_only_sync_or_only_async() -> None:
    async def recall(query: str) -> str:
        """Look something up, without a sync twin."""
        return TEXTS[query]

    model = ScriptedModel().script(call("sea"), call("sea", name="recall"), AIMessage("Deep."))
    agent = agent_with(model, tools=[SEARCH, StructuredTool.from_function(coroutine=recall, name="recall")])

    await agent.ainvoke({"messages": [HumanMessage("How deep?")]})

    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)


def test_parallel_calls_are_taken_in_the_order_of_their_messages() -> None:
    model = ScriptedModel().script(call("sea", "sky", "sea"), call("sky", "sun"), AIMessage("Deep."))

    ask(agent_with(model), "How deep?")

    assert_growing(model.prompts)
    assert_complete(model.prompts[-1], [TEXTS[name] for name in ("sea", "sky", "sea", "sky", "sun")])
    first = tool_results(model.prompts[-1])
    assert [bool(REFERENCE.fullmatch(content)) for content in first] == [False, False, True, True, False]


def test_streaming_sends_the_same_prompts() -> None:
    model, streamed = (ScriptedModel().script(call("sea"), call("sea"), AIMessage("Deep.")) for _ in range(2))

    ask(agent_with(model), "How deep?")
    list(agent_with(streamed).stream({"messages": [HumanMessage("How deep?")]}, stream_mode=["updates", "messages"]))

    assert list(map(contents, streamed.prompts)) == list(map(contents, model.prompts))


def test_repeated_tool_errors_stay_in_full() -> None:
    @tool
    def search(query: str) -> str:
        """Fail."""
        raise ValueError("no such thing. " * 40)

    middleware = shipped.wrap_tool_call(_errors_as_results)
    model = ScriptedModel().script(call("sea"), call("sea"), AIMessage("Sorry."))

    ask(agent_with(model, [middleware, ContextReuseMiddleware()], [search]), "How deep?")

    assert tool_results(model.prompts[-1]) == ["no such thing. " * 40] * 2


def _errors_as_results(request: Any, handler: Callable[[Any], Any]) -> Any:
    try:
        return handler(request)
    except ValueError as error:
        return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")


# Retrieval tools


class TextRetriever(BaseRetriever):
    """Finds the texts that a query names."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(TEXTS[name], id=name) for name in query.split()]


def test_a_retriever_tool_that_hands_over_its_documents() -> None:
    search = create_retriever_tool(TextRetriever(), "search", "Search.", response_format="content_and_artifact")
    model = ScriptedModel().script(call("sea sky"), call("sky sun sea"), call("sky sea"), AIMessage("Deep."))

    ask(agent_with(model, tools=[search]), "How deep?")

    both = "the passages that begin"
    assert tool_results(model.prompts[-1]) == [
        f"{TEXTS['sea']}\n\n{TEXTS['sky']}",
        f'{PART}search({{"query":"sea sky"}}): the passage that begins "The sky looks blue since".]\n\n'
        f"{TEXTS['sun']}\n\n"
        f'{PART}search({{"query":"sea sky"}}): the passage that begins "The sea is 3,688 metres deep".]',
        f'{PART}search({{"query":"sea sky"}}): {both} "The sky looks blue since", "The sea is 3,688 metres deep".]',
    ]


def test_a_retriever_tool_that_hands_over_nothing_but_text() -> None:
    search = create_retriever_tool(TextRetriever(), "search", "Search.")
    model = ScriptedModel().script(call("sea sky"), call("sky sun sea"), AIMessage("Deep."))

    ask(agent_with(model, [ContextReuseMiddleware(separator="\n\n")], [search]), "How deep?")

    first, second = (content.split("\n\n") for content in tool_results(model.prompts[-1]))
    assert first == [TEXTS["sea"], TEXTS["sky"]]
    assert [part.startswith(PART) for part in second] == [True, False, True]


# Failures, forks, checkpoints


def test_a_retry_of_the_model_sends_the_same_prompt_again() -> None:
    class Retry(AgentMiddleware[Any, Any]):
        def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
            try:
                return handler(request)
            except ConnectionError:
                return self.wrap_model_call(request, handler)

    for middleware in ([Retry(), ContextReuseMiddleware()], [ContextReuseMiddleware(), Retry()]):
        model = ScriptedModel().script(call("sea"), call("sea"))
        model.script(ConnectionError(), ConnectionError(), AIMessage("Deep."))
        ask(agent_with(model, middleware), "How deep?")
        assert contents(model.prompts[2]) == contents(model.prompts[3]) == contents(model.prompts[4])
        assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)


@pytest.mark.skipif(not hasattr(shipped, "ModelRetryMiddleware"), reason="langchain 1.0 has no ModelRetryMiddleware")
def test_with_the_retry_middleware_of_langchain() -> None:
    model = ScriptedModel().script(call("sea"), ConnectionError(), call("sea"), ConnectionError(), AIMessage("Deep."))
    retry = shipped.ModelRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)

    ask(agent_with(model, [retry, ContextReuseMiddleware()]), "How deep?")

    assert_growing(model.prompts)
    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)


def test_a_conversation_goes_on_after_the_model_failed() -> None:
    model = ScriptedModel().script(call("sea"), call("sea"), ConnectionError(), AIMessage("Deep."))
    agent = agent_with(model, checkpointer=InMemorySaver())

    with pytest.raises(ConnectionError):
        ask(agent, "How deep?", "t")
    agent.invoke(None, config("t"))

    assert contents(model.prompts[3]) == contents(model.prompts[2])
    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)


def test_fork_never_refers_to_the_other_branch() -> None:
    model = ScriptedModel().script(call("sea"), call("sky"), AIMessage("One."))
    agent = agent_with(model, checkpointer=InMemorySaver())
    ask(agent, "First?", "t")
    [before_sky] = [
        snapshot
        for snapshot in agent.get_state_history(config("t"))
        if snapshot.next == ("model",) and len(snapshot.values["messages"]) == 3
    ]

    model.script(call("sun"), call("sky", "sea"), AIMessage("Two."))
    agent.invoke(None, before_sky.config)

    assert contents(model.prompts[3]) == contents(model.prompts[1])
    assert_growing(model.prompts[3:])
    assert_complete(model.prompts[-1], [TEXTS[name] for name in ("sea", "sun", "sky", "sea")])
    forked = tool_results(model.prompts[-1])
    assert [bool(REFERENCE.fullmatch(content)) for content in forked] == [False, False, False, True]


def test_result_removed_from_the_state_is_sent_in_full_again() -> None:
    model = ScriptedModel().script(call("sea"), AIMessage("Deep."))
    agent = agent_with(model, checkpointer=InMemorySaver())
    state = ask(agent, "How deep?", "t")
    agent.update_state(config("t"), {"messages": [RemoveMessage(id=str(m.id)) for m in state["messages"][1:3]]})

    model.script(call("sea"), AIMessage("Deep."))
    ask(agent, "Once more?", "t")

    assert_complete(model.prompts[-1], [TEXTS["sea"]])


def test_documents_that_come_back_from_a_checkpoint_are_the_same_blocks() -> None:
    search = create_retriever_tool(TextRetriever(), "search", "Search.", response_format="content_and_artifact")
    model = ScriptedModel().script(call("sea sky"), AIMessage("Deep."))
    saver = InMemorySaver()
    ask(agent_with(model, tools=[search], checkpointer=saver), "How deep?", "t")

    restarted = agent_with(model.script(call("sky"), AIMessage("Blue.")), tools=[search], checkpointer=saver)
    kept = restarted.get_state(config("t")).values["messages"][2]
    state = ask(restarted, "Which colour?", "t")

    assert isinstance(kept, ToolMessage)
    assert_growing([model.prompts[i] for i in (0, 1, 2, 3)])
    assert tool_results(model.prompts[-1])[1] == (
        f'{PART}search({{"query":"sea sky"}}): the passage that begins "The sky looks blue since".]'
    )
    assert len(state["messages"][2].artifact) == 2


class Passage(BaseModel):
    """A document class of the application."""

    page_content: str
    id: str


@dataclass
class Row:
    """Another document class of the application."""

    page_content: str
    id: str


@pytest.mark.parametrize("kind", [Passage, Row])
def test_documents_of_other_kinds_come_back_from_a_checkpoint_too(kind: type[Passage] | type[Row]) -> None:
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, list[Passage | Row]]:
        """Search."""
        found = [kind(page_content=TEXTS[name], id=name) for name in query.split()]
        return "\n\n".join(document.page_content for document in found), found

    model = ScriptedModel().script(call("sea sky"), AIMessage("Deep."), call("sky"), AIMessage("Blue."))
    agent = agent_with(model, tools=[search], checkpointer=InMemorySaver())
    ask(agent, "How deep?", "t")
    ask(agent, "Which colour?", "t")

    assert_growing(model.prompts)
    assert tool_results(model.prompts[-1])[1] == (
        f'{PART}search({{"query":"sea sky"}}): the passage that begins "The sky looks blue since".]'
    )


def test_in_a_subgraph() -> None:
    model = ScriptedModel().script(call("sea"), call("sea"), AIMessage("Deep."))
    graph: StateGraph[Any] = StateGraph(AgentState)  # the type of a state differs between versions
    graph.add_node("agent", agent_with(model))
    graph.add_edge(START, "agent")

    state = graph.compile().invoke({"messages": [HumanMessage("How deep?")]})

    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)
    assert tool_results(state["messages"]) == [TEXTS["sea"]] * 2


# With other middleware


def test_two_instances_in_one_agent() -> None:
    def recall(query: str) -> str:
        """Look something up elsewhere."""
        return TEXTS[query]

    tools = [SEARCH, StructuredTool.from_function(recall, name="recall")]
    both = [ContextReuseMiddleware(tools=["search"]), ContextReuseMiddleware(tools=["recall"], name="for recall")]
    script = [call("sea"), call("sea", name="recall"), call("sea"), call("sea", name="recall"), AIMessage("Deep.")]
    model = ScriptedModel().script(*script)

    ask(agent_with(model, both, tools), "How deep?")

    assert_growing(model.prompts)
    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 4)
    assert [middleware.stats().references for middleware in both] == [2, 1]  # summed over the prompts


def summarization(model: BaseChatModel) -> SummarizationMiddleware:
    """At nine messages, all but the last two calls and their results become a summary."""
    options: dict[str, Any] = {"trigger": ("messages", 9), "keep": ("messages", 4)}
    if not hasattr(shipped, "ModelRetryMiddleware"):  # langchain 1.0 counts tokens only
        options = {"max_tokens_before_summary": 9, "messages_to_keep": 4}
    return SummarizationMiddleware(model, token_counter=len, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ours_first", [True, False])
def test_on_either_side_of_summarization(ours_first: bool) -> None:
    summarizer = ScriptedModel().script(AIMessage("They asked how deep the sea is."))
    model = ScriptedModel().script(call("sea"), call("sea"), call("sky"), call("sea"), call("sky"), AIMessage("Deep."))
    middleware = [ContextReuseMiddleware(), summarization(summarizer)]

    ask(agent_with(model, middleware if ours_first else middleware[::-1]), "How deep?")

    assert len(summarizer.prompts) == 1
    assert TEXTS["sea"] in str(summarizer.prompts[0][0].content)  # what is summarized is no reference
    names = [[], ["sea"], ["sea", "sea"], ["sea", "sea", "sky"], ["sky", "sea"], ["sky", "sea", "sky"]]
    for prompt, expected in zip(model.prompts, names, strict=True):
        assert_complete(prompt, [TEXTS[name] for name in expected])
    assert_growing(model.prompts[:4])
    assert_growing(model.prompts[4:])
    references = [[bool(REFERENCE.fullmatch(content)) for content in tool_results(prompt)] for prompt in model.prompts]
    assert references[3:] == [[False, True, False], [False, False], [False, False, True]]


def clearing() -> ContextEditingMiddleware:
    """Clears all but the last two tool results, always."""
    return ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=0, keep=2)])


SCRIPT_TO_CLEAR = ("sea", "sky", "sea", "sky", "sea")


def test_behind_context_editing_no_reference_names_what_was_cleared() -> None:
    model = ScriptedModel().script(*map(call, SCRIPT_TO_CLEAR), AIMessage("Deep."))

    ask(agent_with(model, [clearing(), ContextReuseMiddleware()]), "How deep?")

    for n, prompt in enumerate(model.prompts):
        cleared = max(0, n - 2)
        assert tool_results(prompt)[:cleared] == ["[cleared]"] * cleared
        kept = [message for message in prompt if message.content != "[cleared]"]
        assert_complete(kept, [TEXTS[name] for name in SCRIPT_TO_CLEAR[cleared:n]])


def test_before_context_editing_a_reference_can_name_what_was_cleared() -> None:
    """Why the docstring asks for the other order."""
    model = ScriptedModel().script(*map(call, SCRIPT_TO_CLEAR), AIMessage("Deep."))

    ask(agent_with(model, [ContextReuseMiddleware(), clearing()]), "How deep?")

    assert all(REFERENCE.fullmatch(content) for content in tool_results(model.prompts[-1])[-2:])


def test_a_trimmer_before_it_leaves_no_reference_dangling() -> None:
    class LastFour(AgentMiddleware[Any, Any]):
        def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
            last: list[AnyMessage] = request.messages[-4:]
            return handler(request.override(messages=last))

    model = ScriptedModel().script(call("sea"), call("sky"), call("sea"), call("sea"), AIMessage("Deep."))

    ask(agent_with(model, [LastFour(), ContextReuseMiddleware()]), "How deep?")

    assert_complete(model.prompts[-1], [TEXTS["sea"]] * 2)
