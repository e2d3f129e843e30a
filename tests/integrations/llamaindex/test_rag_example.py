"""The example, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples/llamaindex_rag.py"


def test_the_example_runs_and_the_engine_has_much_of_it_cached(start_engine: Callable[[], Any]) -> None:
    engine = start_engine()
    environment = {**os.environ, "OPENAI_BASE_URL": engine.base_url, "MODEL": engine.model, "OPENAI_API_KEY": "none"}
    ran = subprocess.run([sys.executable, EXAMPLE], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "2 of 3 prompts were reordered" in ran.stdout
    assert len(engine.answered) == 3
    assert all("[json." in prompt for prompt in engine.prompts)
    assert engine.answered[-1].cached_tokens > engine.answered[-1].prompt_tokens / 2


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
