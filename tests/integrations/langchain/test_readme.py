"""The README's code blocks for LangChain run as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda


def test_the_blocks_run(readme_blocks: Callable[[str], list[str]]) -> None:
    names: dict[str, Any] = {
        "your_retriever": RunnableLambda(lambda _: [Document("Passage.", id="a")]),
        "model": GenericFakeChatModel(messages=iter([AIMessage("An answer.")])),
        "tools": [],
    }
    blocks = readme_blocks("warmprefix_langchain")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["retriever"].invoke("question")[0].metadata["context_label"] == "a"
    assert names["agent"].invoke({"messages": [HumanMessage("Hello.")]})["messages"][-1].content == "An answer."
