"""A chat with Mem0's memories whose history stays in the engine's prefix cache. Needs mem0ai and openai.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import os
import zlib
from typing import Any

from mem0 import Memory
from mem0.embeddings.base import EmbeddingBase
from openai import OpenAI
from qdrant_client import QdrantClient

from warmprefix_mem0 import ContextReuseMemory, MemoryChat

FACTS = ["Ann drinks green tea every morning.", "Ann has two cats called Ada and Grace.", "Ann cycles to work."]
QUESTIONS = ["What does Ann drink every morning?", "Has Ann cats, and how does she go to work?", "Tea or coffee?"]


class Words(EmbeddingBase):
    """Stand in for your own embedding model: texts that share words are near each other."""

    def embed(self, text: str, memory_action: str | None = None) -> Any:
        places = {zlib.crc32(word.encode()) % 64 for word in text.lower().rstrip(".?").split()}
        return [float(place in places) for place in range(64)]


store = {"client": QdrantClient(":memory:"), "collection_name": "facts", "embedding_model_dims": 64}
memory = Memory.from_config({"vector_store": {"provider": "qdrant", "config": store}, "history_db_path": ":memory:"})
memory.embedding_model = Words()
for fact in FACTS:
    memory.add(fact, user_id="ann", infer=False)
warm, client, chat = ContextReuseMemory(memory), OpenAI(), MemoryChat("A [label] marks what you remember of Ann.")
for question in QUESTIONS:
    messages: Any = chat.ask(question, warm.search(question, filters={"user_id": "ann"}, threshold=0.0))
    answer = client.chat.completions.create(model=os.environ["MODEL"], messages=messages)
    chat.commit(messages, answer.choices[0].message.content or "")
    print(messages[-1]["content"], "\n->", answer.usage and answer.usage.prompt_tokens, "prompt tokens\n")
