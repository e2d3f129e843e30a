"""The example and the README's code block for Mem0, run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import OpenAI

FACTS = ["Ann drinks green tea every morning.", "Ann has two cats called Ada and Grace.", "Ann cycles to work."]


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


def test_example_shows_each_fact_once(
    start_engine: Callable[[], Any], run_example: Callable[[str, Any], tuple[str, int]]
) -> None:
    engine = start_engine()
    printed, lines = run_example("mem0_chat.py", engine)
    assert printed.count("prompt tokens") == len(engine.answered) == 3
    assert [engine.prompts[-1].count(fact) for fact in FACTS] == [1, 1, 1]
    assert "Please also use the context labelled [" in engine.prompts[-1]
    assert lines <= 40
