"""The README's code block for several agents runs as it stands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from openai import OpenAI

from warmprefix import ContextBlock


def test_the_block_runs(readme_blocks: Callable[[str], list[str]], start_engine: Callable[[], Any]) -> None:
    engines = {name: start_engine() for name in ("ann", "ben")}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(OpenAI(base_url=engine.base_url, api_key="none"))
            for name, engine in engines.items()
        }
        names = {
            "clients": clients,
            "client": clients["ann"],
            "model": engines["ann"].model,
            "question": "What is it?",
            "documents": [ContextBlock(f"Document {number}. " * 30, id=number) for number in range(5)],
        }
        [block] = readme_blocks("warmprefix_chain_of_agents")
        exec(compile(block, "README.md", "exec"), names)
        first = names["answer"]
        exec(compile("answer = chain.run(question, documents[::-1])", "again", "exec"), names)
    assert {report.agent for report in first.workers} == {"ann", "ben"}
    assert names["answer"].usage.cached_tokens > first.usage.cached_tokens + 500
