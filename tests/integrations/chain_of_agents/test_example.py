"""The example, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples/chain_of_agents_qa.py"
READ = re.compile(r"  (reader \d): (\[shutil\.\w+\]), (\d+) of (\d+) cached")


def test_the_example_runs_and_documents_stay_with_their_agents(start_engine: Callable[[], Any]) -> None:
    engines = [start_engine() for _ in range(3)]
    urls = " ".join(engine.base_url for engine in engines)
    environment = {**os.environ, "ENGINES": urls, "MODEL": engines[0].model, "OPENAI_API_KEY": "none"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    read = [line.groups() for line in map(READ.fullmatch, ran.stdout.splitlines()) if line is not None]
    assert len(read) == 3 * 6
    readers: dict[str, set[str]] = {}
    for reader, label, *_ in read:
        readers.setdefault(label, set()).add(reader)
    assert len(readers) < 3 * 6
    assert {len(names) for names in readers.values()} == {1}
    labels = [label for _, label, _, _ in read]
    again = [(int(cached), int(prompt)) for i, (_, label, cached, prompt) in enumerate(read) if label in labels[:i]]
    assert sum(cached for cached, _ in again) > sum(prompt for _, prompt in again) / 2
    assert sum(len(engine.answered) for engine in engines) == 3 * 7  # with the manager's answers
