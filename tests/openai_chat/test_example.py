"""examples/openai_chat.py, run as a user runs it, and the code of docs/openai.md."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlanner

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_runs_and_reports_cached_tokens(emulator: Any) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": emulator.base_url, "MODEL": emulator.config.model}
    environment["OPENAI_API_KEY"] = "none"
    ran = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples/openai_chat.py"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    *answers, last = ran.stdout.splitlines()
    assert [answer.partition("?")[0] for answer in answers] == [
        "How do I read a file", "How do I write a file", "How do I read a str or a file",
    ]  # fmt: skip
    counts = re.fullmatch(r"(\d+) tokens were cached, wrong by (\d+) on average", last)
    assert counts is not None
    assert int(counts[1]) > 500


def test_the_pages_code_runs(emulator: Any, blocks: list[ContextBlock]) -> None:
    names: dict[str, Any] = {
        "planner": ContextPlanner(),
        "base_url": emulator.base_url,
        "model": emulator.config.model,
        "blocks": blocks,
        "question": "What is it?",
        "history": [],
    }
    page = (ROOT / "docs/openai.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(shown) == 4
    for block in shown:
        if "await" in block:
            body = "".join(f"    {line}\n" if line else "\n" for line in block.splitlines())
            exec(compile(f"async def main():\n{body}", "openai.md", "exec"), names)
            asyncio.run(names["main"]())
        else:
            exec(compile(block, "openai.md", "exec"), names)
    stats = names["planner"].stats()
    assert (stats.commits, stats.open_plans) == (6, 0)
    assert stats.reports == 6
    assert len(names["plan"].references) == len(blocks)
    names["client"].close()
    names["link"].close()
