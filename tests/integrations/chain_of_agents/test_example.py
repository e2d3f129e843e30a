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
    given = [(reader, label) for reader, label, *_ in read]
    stayed = [pair for i, pair in enumerate(given) if pair in given[:i]]
    labels = [label for _, label in given]
    again = [i for i, label in enumerate(labels) if label in labels[:i]]
    assert len(again) >= 6
    assert len(stayed) > len(again) / 2  # short ones may be read elsewhere sooner than by an agent that has others
    assert sum(int(read[i][2]) for i in again) > sum(int(read[i][3]) for i in again) / 3
    assert sum(len(engine.answered) for engine in engines) == 3 * 7  # with the manager's answers
