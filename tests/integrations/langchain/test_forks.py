"""Sub-agents in real agents: each of their prompts begins with the messages of their parent."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr

from warmprefix_langchain import fork_messages


def call_of(*ids: str, task: str = "Look.") -> AIMessage:
    return AIMessage("", tool_calls=[{"id": one, "name": "delegate", "args": {"task": task}} for one in ids])


def test_open_calls_are_cut() -> None:
    question, result = HumanMessage("What is new?"), ToolMessage("Nothing.", tool_call_id="1")
    for messages, kept in (
        ([], 0),
        ([question], 1),
        ([question, call_of("1")], 1),
        ([question, call_of("1"), result], 3),
        ([question, call_of("1", "2"), result], 1),
        ([question, call_of("1"), result, call_of("2")], 3),
    ):
        child = fork_messages(messages, "Look.")
        assert (child[:-1], child[-1].content) == (messages[:kept], "Look.")


class ScriptedModel(BaseChatModel):
    """Chat model that gives a fixed list of answers, and records its prompts."""

    answers: list[AIMessage]
    _prompts: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

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
        return ChatResult(generations=[ChatGeneration(message=self.answers[len(self._prompts) - 1])])


def test_a_child_begins_with_its_parents_prompt() -> None:
    @tool
    def delegate(task: str, runtime: ToolRuntime) -> str:
        """Have a copy do a task."""
        return str(agent.invoke({"messages": fork_messages(runtime.state["messages"], task)})["messages"][-1].content)

    model = ScriptedModel(answers=[call_of("1"), AIMessage("Found."), AIMessage("All is known.")])
    agent: Any = create_agent(model, [delegate], system_prompt="You help.")
    answer = agent.invoke({"messages": [HumanMessage("What is new?")]})["messages"]
    parent, child, later = [[(message.type, message.content) for message in prompt] for prompt in model.prompts]
    assert child == [*parent, ("human", "Look.")]
    assert later[:2] == parent
    assert [message.content for message in answer[2:]] == ["Found.", "All is known."]
