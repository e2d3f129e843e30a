"""A chat whose prompts begin with what the engine has cached. Needs llama-index-core and llama-index-llms-openai-like.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import json
import os

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike

from warmprefix import ContextPlanner
from warmprefix_llamaindex import ContextReusePostprocessor

TEXTS = {name: value.__doc__ for name, value in vars(json).items() if callable(value) and value.__doc__}
QUESTIONS = ["How do I deserialize a JSON document?", "How do I serialize to a JSON stream?", "And to a str?"]


class Search(BaseRetriever):
    """Stand in for your own retriever: the texts that share the most words with the query."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = set(query_bundle.query_str.lower().split())
        best = sorted(TEXTS, key=lambda name: -len(words & set(TEXTS[name].lower().split())) / len(TEXTS[name]))
        return [NodeWithScore(node=TextNode(text=TEXTS[name], id_=f"json.{name}")) for name in best[:4]]


planner = ContextPlanner()  # one for the whole application
warm = ContextReusePostprocessor(planner=planner)  # this line is all it takes; rerankers go before it
llm = OpenAILike(model=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], is_chat_model=True,
                 context_window=32_000)  # fmt: skip
memory = ChatMemoryBuffer.from_defaults(token_limit=30_000)
chat = ContextChatEngine.from_defaults(Search(), llm=llm, memory=memory, node_postprocessors=[warm])
for question in QUESTIONS:
    print(question, [source.node_id for source in chat.chat(question).source_nodes])
print(planner.stats().reordered_plans, "of", len(QUESTIONS), "prompts were reordered")
