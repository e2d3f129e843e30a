"""The example, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples/llamaindex_agent.py"


def search(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"input": query})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": query, "type": "function", "function": function}],
    }


def test_the_example_runs_and_repeats_nothing(start_engine: Callable[[], Any]) -> None:
    engine = start_engine()
    for query in ("rename a file", "remove a file", "remove a directory"):
        engine.script(search(query), {"role": "assistant", "content": f"As the passages on {query!r} say."})
    environment = {**os.environ, "OPENAI_BASE_URL": engine.base_url, "MODEL": engine.model, "OPENAI_API_KEY": "none"}
    ran = subprocess.run([sys.executable, EXAMPLE], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "And a directory? As the passages on 'remove a directory' say." in ran.stdout
    assert len(engine.answered) == 6
    assert '[Word for word in the result of the earlier call search({"input": "' in engine.prompts[-1]
    assert all(later.startswith(earlier) for earlier, later in pairwise(engine.prompts))
    assert engine.answered[-1].cached_tokens > engine.answered[-1].prompt_tokens / 2


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
