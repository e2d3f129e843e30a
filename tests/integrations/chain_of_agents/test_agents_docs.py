"""The workflow of docs/routing.md runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

PAGE = Path(__file__).parents[3] / "docs" / "routing.md"

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning")


def block(module: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if f"from {module} import" in block]
    return str(found)


async def test_the_workflow_runs(start_engine: Callable[[], Any]) -> None:
    engines = {name: start_engine() for name in ("ann", "ben")}
    options = {name: {"base_url": engine.base_url, "api_key": "none"} for name, engine in engines.items()}
    names: dict[str, Any] = {
        "__name__": "routing",
        "async_clients": {name: AsyncOpenAI(**options[name]) for name in engines},
        "model": engines["ann"].model,
        "question": "What is it?",
        "documents": [f"Document {n}. " * 20 for n in range(4)],
    }
    try:
        exec(compile(block("warmprefix_chain_of_agents.workflows"), "routing.md", "exec", dont_inherit=True), names)
        assert len(await names["ask"]()) == 2
    finally:
        for client in names["async_clients"].values():
            await client.close()
    prompts = [prompt for engine in engines.values() for prompt in engine.prompts]
    for document in names["documents"]:
        assert sum(document.strip() in prompt for prompt in prompts) == 1
