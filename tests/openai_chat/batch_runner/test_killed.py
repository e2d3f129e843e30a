"""A process that is killed in mid-run, and one that takes up its journal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmprefix import BatchRequest
from warmprefix_tools.emulator import EmulatorConfig

PROGRAM = str(Path(__file__).with_name("interrupted_run.py"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="has no SIGKILL")
@pytest.mark.parametrize("lines", [1, 4, 25])
def test_nothing_is_lost_and_nothing_but_what_was_in_flight_is_sent_twice(
    start_engine: Any, requests: Callable[..., list[BatchRequest]], tmp_path: Path, lines: int
) -> None:
    engine = start_engine(EmulatorConfig(kv_blocks=65_536, base_ttft_ms=4, decode_rate=400))
    journal = tmp_path / "run.journal"
    command = [sys.executable, "-W", "error", PROGRAM, engine.base_url, str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 1 + lines:
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        assert process.communicate()[0] == b""
    kept = {json.loads(line)["id"] for line in journal.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")}
    assert lines <= len(kept) < 60
    sent = set(engine.attempts)
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answers = json.loads(finished.stdout)
    assert list(answers) == [request.id for request in requests(6, 10)]
    assert all(answers.values())
    twice = {id for id, count in engine.attempts.items() if count > 1}
    assert twice == sent - kept
    assert len(twice) <= 4
    assert max(engine.attempts.values()) <= 2
