"""The code blocks of README.md and docs/frameworks.md for Mem0, run unchanged."""

from __future__ import annotations

import re
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


def test_the_pages_blocks_run(
    run_section: Callable[[str, dict[str, Any]], dict[str, Any]], start_engine: Callable[[], Any], memory: Any
) -> None:
    for fact in ("Ann drinks green tea every morning.", "Does Ann drink coffee? She does not drink coffee."):
        memory.add(fact, user_id="ann", infer=False)
    engine = start_engine()
    with OpenAI(base_url=engine.base_url, api_key="none") as client:
        names = run_section("Mem0", {"your_memory": memory, "client": client, "model_name": engine.model})
    assert "\n- Ann drinks green tea every morning." in engine.prompts[0]
    chat, kept = (
        "\n".join(message["content"] for message in messages)
        for messages in (names["chat"].messages, names["messages"])
    )
    assert chat.count("Ann drinks green tea every morning.") == 1
    assert re.search(r"Please also use the context labelled \[m[0-9a-f~]+\].* above in this conversation\.", chat)
    assert kept.count("Ann drinks green tea every morning.") == 2, "a reference would be longer"
    assert engine.answered[-1].cached_tokens > 0
