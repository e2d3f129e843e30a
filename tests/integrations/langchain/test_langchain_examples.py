"""The examples and the README's code block for LangChain, run unchanged."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

RunExample = Callable[[str, Any], tuple[str, int]]


def test_readme_block_runs(readme_blocks: Callable[[str], list[str]]) -> None:
    names: dict[str, Any] = {
        "your_retriever": RunnableLambda(lambda _: [Document("Passage.", id="a")]),
        "model": GenericFakeChatModel(messages=iter([AIMessage("An answer.")])),
        "tools": [],
    }
    [block] = readme_blocks("warmprefix_langchain")
    exec(compile(block, "README.md", "exec"), names)
    assert names["retriever"].invoke("question") == [Document("Passage.", id="a")]
    assert names["agent"].invoke({"messages": [HumanMessage("Hello.")]})["messages"][-1].content == "An answer."


def test_agent_example_sends_the_passage_once(start_engine: Callable[[], Any], run_example: RunExample) -> None:
    engine = start_engine()
    for turn in range(2):
        function = {"name": "documentation", "arguments": json.dumps({"function": "dumps"})}
        call = {"id": f"call-{turn}", "type": "function", "function": function}
        engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
        engine.script({"role": "assistant", "content": f"That was turn {turn}."})
    printed, lines = run_example("langchain_agent.py", engine)
    passage = str(inspect.getdoc(json.dumps))
    assert "That was turn 1." in printed
    assert f"{(len(passage) + 3) // 4} tokens were spared" in printed
    assert engine.prompts[-1].count(passage) == 1
    assert engine.prompts[-1].count("[Word for word the result of the earlier call documentation(") == 1
    assert lines <= 40
