"""A process that is killed during a run, and one that goes on with its journal."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from warmprefix import BatchRequest
from warmprefix_tools.emulator import EmulatorConfig

PROGRAM = str(Path(__file__).with_name("interrupted_run.py"))


def stored(journal: Path, scratch: Path) -> set[str]:
    """Return the ids in a copy of the journal: the journal itself is locked, or is to be left as it is."""
    scratch.mkdir(exist_ok=True)
    for file in (journal, journal.with_name(f"{journal.name}-wal")):
        if file.exists():
            shutil.copy(file, scratch)
    with closing(sqlite3.connect(scratch / journal.name)) as connection:
        try:
            return {json.loads(id) for (id,) in connection.execute("SELECT id FROM results")}
        except sqlite3.DatabaseError:  # the copy was made while the table was
            return set()


@pytest.mark.sample(1)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="has no SIGKILL")
@pytest.mark.parametrize("results", [1, 4, 25])
def test_a_killed_run_loses_only_the_requests_in_flight(
    start_engine: Any, requests: Callable[..., list[BatchRequest]], tmp_path: Path, results: int
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=8_192, base_ttft_ms=4, decode_rate=400))
    journal = tmp_path / "run.journal"
    command = [sys.executable, "-W", "error", PROGRAM, engine.base_url, str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while not journal.exists() or len(stored(journal, tmp_path / "scratch")) < results:
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        assert process.communicate()[0] == b""
    kept = stored(journal, tmp_path / "killed")
    assert results <= len(kept) < 60
    sent = set(engine.attempts)
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answers = json.loads(finished.stdout)
    assert list(answers) == [request.id for request in requests(6, 10)]
    assert all(answers.values())
    twice = {id for id, count in engine.attempts.items() if count > 1}
    assert twice == sent - kept
    assert len(twice) <= 4
    assert max(engine.attempts.values()) <= 2
