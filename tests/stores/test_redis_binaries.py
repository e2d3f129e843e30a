"""Server binaries that hang are tried once, and others take their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redis_servers import binaries

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
USE = """
import redis_servers
from redis_servers import Clock, Server, binaries, describe_binaries

redis_servers._Trial.start_seconds = 0.5
for _ in range(3):
    for clock in (None, Clock()):
        with Server(clock=clock) as server, server.client() as client:
            assert client.ping()
        try:
            Server("redis-0.1", clock=clock).close()
            print("works")
        except ValueError:
            print("refused")
print(*describe_binaries(), sep="\\n")
"""


def use_with_on_path(folder: Path, script: str) -> list[str]:
    """Put a `redis-server` of version 0.1 on the PATH, which notes its starts in `starts`, and use servers."""
    file = folder / "redis-server"
    file.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Redis server v=0.1.0"; exit; fi\n'
        f"echo start >> {folder}/starts\n{script}\n"
    )
    file.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has clocks that jump")
def test_a_server_that_hangs_is_tried_once(tmp_path: Path) -> None:
    shown = use_with_on_path(tmp_path, "exec sleep 600")
    assert shown[:6] == ["refused"] * 6
    assert starts(tmp_path) == 1
    assert shown[-1].startswith(f"redis-0.1, {tmp_path}/redis-server: not used because redis-server does not answer")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has clocks that jump")
def test_a_server_that_hangs_with_a_clock_is_used_without(tmp_path: Path) -> None:
    real = next(iter(binaries().values()))
    shown = use_with_on_path(tmp_path, f'if [ -n "$LD_PRELOAD" ]; then exec sleep 600; fi\nexec {real} "$@"')
    assert shown[:6] == ["works", "refused"] * 3
    assert starts(tmp_path) == 2 + 3
    assert shown[-1].startswith(f"redis-0.1, {tmp_path}/redis-server: not used with a clock because")
