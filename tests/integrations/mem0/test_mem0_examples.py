"""The README's code block for Mem0, run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import OpenAI


def test_readme_block_runs(
    readme_blocks: Callable[[str], list[str]], start_engine: Callable[[], Any], memory: Any
) -> None:
    memory.add("Ann likes tea.", user_id="ann", infer=False)
    engine = start_engine()
    with OpenAI(base_url=engine.base_url, api_key="none") as client:
        names = {"your_memory": memory, "question": "Does Ann like tea?", "client": client, "model": engine.model}
        [block] = readme_blocks("warmprefix_mem0")
        exec(compile(block, "README.md", "exec"), names)
    assert "Ann likes tea." in names["found"]["context"]
    assert "Ann likes tea." in engine.prompts[0]
    assert len(names["chat"].messages) == 3
