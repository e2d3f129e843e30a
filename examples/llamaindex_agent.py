"""An agent that is sent nothing twice. Needs llama-index-core and llama-index-llms-openai-like.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike

from warmprefix_llamaindex import ContextReuseLLM, ContextReuseRetrieverTool

TEXTS = [value.__doc__ for value in vars(os).values() if callable(value) and value.__doc__]


class Search(BaseRetriever):
    """Stand in for your own retriever: the texts that share the most words with the query."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = set(query_bundle.query_str.lower().split())
        best = sorted(TEXTS, key=lambda text: -len(words & set(text.lower().split())))
        return [NodeWithScore(node=TextNode(text=text)) for text in best[:3]]


async def main() -> None:
    """Ask three questions on much the same documents."""
    model = OpenAILike(model=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], is_chat_model=True,
                       is_function_calling_model=True, context_window=32_000)  # fmt: skip
    search = ContextReuseRetrieverTool.from_defaults(Search(), name="search", description="Finds documentation.")
    agent = FunctionAgent(tools=[search], llm=ContextReuseLLM(llm=model))  # this line is all it takes
    memory = ChatMemoryBuffer.from_defaults(token_limit=30_000)
    for question in ["How do I rename a file?", "How do I remove a file?", "And a directory?"]:
        print(question, await agent.run(question, memory=memory))


asyncio.run(main())
