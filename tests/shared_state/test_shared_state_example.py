"""`examples/shared_state.py` against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redis_servers import Server, binaries, wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", binaries())
def test_conversation_continues_on_the_other_worker(flavour: str) -> None:
    with Server(flavour) as server, server.client() as client:
        # A server that has just started may be an older copy, which planners do not trust for two seconds.
        wait_until(lambda: client.info("server")["uptime_in_seconds"] > 2, "the server has been there for a while")
        environment = {**os.environ, "WARMPREFIX_REDIS_URL": server.url, "WARMPREFIX_STORE_BUDGET": "10"}
        command = [sys.executable, "-W", "error", str(ROOT / "examples/shared_state.py")]
        first, second = (
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60) for _ in range(2)
        )
        assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    are_references = [
        line.startswith('  Also use the passages above that begin with "') for line in first.stdout.splitlines()
    ]
    assert are_references == [False, False, False, False, True, True, False, False, False]
