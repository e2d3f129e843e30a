"""Tools that come late, in real agents: each prompt's list begins with that of the prompt before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import PrivateAttr

from warmprefix_langchain import ContextReuseMiddleware


class ListeningModel(BaseChatModel):
    """Chat model that records the names of the tools which it is bound to."""

    _lists: list[list[str]] = PrivateAttr(default_factory=list)

    @property
    def lists(self) -> list[list[str]]:
        return self._lists

    @property
    def _llm_type(self) -> str:
        return "listening"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        self._lists.append([tool["name"] if isinstance(tool, dict) else tool.name for tool in tools])
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Yes."))])


def tool_of(name: str) -> BaseTool:
    def read(path: str) -> str:
        return path

    return StructuredTool.from_function(read, name=name, description=f"Use {name}.")


KNOWN = [tool_of(name) for name in "abcd"]
"""What agents are made with: LangChain 1.0 takes no others from middleware."""


class ChangingTools(AgentMiddleware[Any, Any]):
    """Gives the model whatever tools are there now, sorted by name as clients of MCP do."""

    def __init__(self, tools: Sequence[BaseTool]) -> None:
        super().__init__()
        self.now = list(tools)

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request.override(tools=sorted(self.now, key=lambda tool: tool.name)))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return await handler(request.override(tools=sorted(self.now, key=lambda tool: tool.name)))

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return await handler(request)


def agent_of(names: str, **options: Any) -> tuple[Any, ListeningModel, ChangingTools]:
    model, changing = ListeningModel(), ChangingTools([tool_of(name) for name in names])
    middleware = [changing, ContextReuseMiddleware(**options)]
    return create_agent(model, KNOWN, middleware=middleware, checkpointer=InMemorySaver()), model, changing


def ask(agent: Any, thread: str = "one") -> None:
    agent.invoke({"messages": [HumanMessage("Read it.")]}, {"configurable": {"thread_id": thread}})


@pytest.mark.parametrize(("mode", "gone"), [("off", "abd"), ("order", "bda"), ("keep", "bdca")])
def test_lists_keep_their_beginning(mode: str, gone: str) -> None:
    agent, model, changing = agent_of("bcd", steady_tools=mode)
    ask(agent)
    changing.now = [tool_of(name) for name in "abcd"]
    ask(agent)
    changing.now = [tool_of(name) for name in "abd"]
    ask(agent)
    ask(agent, "another")
    assert ["".join(names) for names in model.lists] == (
        ["bcd", "abcd", "abd", "abd"] if mode == "off" else ["bcd", "bcda", {"bda": "bda", "bdca": "bcda"}[gone], "abd"]
    )


def test_without_a_thread_nothing_is_kept() -> None:
    model, changing = ListeningModel(), ChangingTools([tool_of("b"), tool_of("c")])
    agent: Any = create_agent(model, KNOWN, middleware=[changing, ContextReuseMiddleware(steady_tools="keep")])
    agent.invoke({"messages": [HumanMessage("Read it.", id="1")]})
    changing.now = [tool_of("a"), tool_of("b")]
    agent.invoke({"messages": [HumanMessage("Read it.", id="1")]})
    agent.invoke({"messages": [HumanMessage("Read it.", id="2")]})
    assert model.lists == [["b", "c"], ["b", "a"], ["a", "b"]]


def test_lists_that_cannot_be_compared_stay() -> None:
    agent, model, changing = agent_of("ab", steady_tools="order")
    ask(agent)
    changing.now = [tool_of("b"), tool_of("b"), tool_of("a")]
    ask(agent)
    assert model.lists[-1] == ["a", "b", "b"]
    with pytest.raises(ValueError, match="steady_tools"):
        ContextReuseMiddleware(steady_tools="behind")  # type: ignore[arg-type]


SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("late")


@server.tool()
def add(one: int, other: int) -> int:
    "Add two numbers."
    return one + other


server.run()
"""


async def test_a_real_mcp_server_connects_late(tmp_path: Path) -> None:
    clients = pytest.importorskip("langchain_mcp_adapters.client")
    script = tmp_path / "late.py"
    script.write_text(SERVER)
    agent, model, changing = agent_of("bc", steady_tools="order")
    config = {"configurable": {"thread_id": "one"}}
    await agent.ainvoke({"messages": [HumanMessage("Read it.")]}, config)
    connection = {"command": sys.executable, "args": [str(script)], "transport": "stdio"}
    late = await clients.MultiServerMCPClient({"late": connection}).get_tools()
    for _ in range(2):  # its definitions are read again when it connects again
        changing.now = [*late, *[tool_of(name) for name in "bc"]]
        await agent.ainvoke({"messages": [HumanMessage("Read it.")]}, config)
        late = await clients.MultiServerMCPClient({"late": connection}).get_tools()
    assert model.lists == [["b", "c"], ["b", "c", "add"], ["b", "c", "add"]]
