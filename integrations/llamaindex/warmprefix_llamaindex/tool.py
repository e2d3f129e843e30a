"""`ContextReuseRetrieverTool`: a retriever tool whose nodes can be told apart in the tool message."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import RetrieverTool, ToolOutput

__all__ = ["ContextReuseRetrieverTool"]


class ContextReuseRetrieverTool(RetrieverTool):
    """A `RetrieverTool` that gives each node in a text block of its own; joined, they are what that tool gives.

    Blocks of a message survive in the agent's memory, so `ContextReuseLLM` knows the nodes without being told what
    stands between them. Make it as you make the other one: `ContextReuseRetrieverTool.from_defaults(retriever)`.
    """

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return _node_by_node(super().call(*args, **kwargs))

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return _node_by_node(await super().acall(*args, **kwargs))


def _node_by_node(output: ToolOutput) -> ToolOutput:
    texts = [found.node.get_content(MetadataMode.LLM) + "\n\n" for found in output.raw_output]
    if "".join(texts) != output.content:  # a version that lays its nodes out in another way
        return output
    return output.model_copy(update={"blocks": [TextBlock(text=text) for text in texts]})
