"""`ContextReuseRetrieverTool`: a retriever tool with one text block per node in its tool message."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import RetrieverTool, ToolOutput

__all__ = ["ContextReuseRetrieverTool"]


class ContextReuseRetrieverTool(RetrieverTool):
    """A `RetrieverTool` that returns each node in its own text block; joined, they are the text of that tool.

    Blocks of a message survive in the agent's memory, so `ContextReuseLLM` can refer to single nodes without a
    `separator`. Build it like a `RetrieverTool`: `ContextReuseRetrieverTool.from_defaults(retriever)`.
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
