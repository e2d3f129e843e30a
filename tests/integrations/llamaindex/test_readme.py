"""The README's code blocks for LlamaIndex run as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode


async def test_the_blocks_run(
    readme_blocks: Callable[[str], list[str]], start_engine: Callable[[], Any], open_model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    index = VectorStoreIndex([TextNode(text="Passage.", id_="a")], embed_model=MockEmbedding(embed_dim=4))
    engine = start_engine()
    async with open_model(engine) as model:
        names: dict[str, Any] = {"index": index, "retriever": index.as_retriever(), "llm": model}
        blocks = readme_blocks("warmprefix_llamaindex")
        assert len(blocks) == 2
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
        assert "[a] Passage." in str(names["engine"].query("What is it?"))
        engine.script({"role": "assistant", "content": "An answer."})
        assert str(await names["agent"].run("Hello.")) == "An answer."
