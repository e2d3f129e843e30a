"""The example for agents, run as its docstring says."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples" / "langchain_agent.py"


def test_the_example_sends_the_passage_once(start_engine: Any) -> None:
    engine = start_engine()
    for turn in range(2):
        function = {"name": "documentation", "arguments": json.dumps({"function": "dumps"})}
        call = {"id": f"call-{turn}", "type": "function", "function": function}
        engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
        engine.script({"role": "assistant", "content": f"That was turn {turn}."})
    environment = {"OPENAI_BASE_URL": engine.base_url, "OPENAI_API_KEY": "none", "MODEL": engine.model}

    printed = subprocess.run(
        [sys.executable, str(EXAMPLE)], env={**os.environ, **environment}, check=True, capture_output=True, text=True
    ).stdout

    passage = str(inspect.getdoc(json.dumps))
    assert "That was turn 1." in printed
    assert f"{(len(passage) + 3) // 4} tokens were spared" in printed
    assert engine.prompts[-1].count(passage) == 1
    assert engine.prompts[-1].count("[Word for word the result of the earlier call documentation(") == 1


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
