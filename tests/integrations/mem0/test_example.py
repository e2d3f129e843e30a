"""The example, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples" / "mem0_chat.py"
FACTS = ["Ann drinks green tea every morning.", "Ann has two cats called Ada and Grace.", "Ann cycles to work."]


def test_example(start_engine: Callable[[], Any]) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40
    engine = start_engine()
    environment = os.environ | {"OPENAI_BASE_URL": engine.base_url, "OPENAI_API_KEY": "none", "MODEL": engine.model}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("prompt tokens") == len(engine.answered) == 3
    assert [engine.prompts[-1].count(fact) for fact in FACTS] == [1, 1, 1]
    assert "Please also use the context labelled [" in engine.prompts[-1]
