"""A client that works with a gateway while others attack it."""

from __future__ import annotations

import hashlib
import http.client
import multiprocessing
import multiprocessing.process
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.integrations.gateway.attacks import ATTACKS, KEY, run_attack
from tests.integrations.gateway.conftest import ScriptedUpstream, chat_answer

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Is the sea salt?"}]}'


class Served(NamedTuple):
    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def memory(self) -> int:
        """Resident MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1_024

    @property
    def work(self) -> float:
        """Seconds of processor time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def served(upstream: ScriptedUpstream, tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("".join([f"{n} {hashlib.sha256(k).hexdigest()}\n" for n, k in (("m", KEY), ("b", b"kb"))]))
    command = [sys.executable, "-m", "warmprefix_tools", "serve", "--port=0", f"--keys={keys}"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the process, and for this one's upstream
    with subprocess.Popen([*command, f"--upstream={upstream.base_url}"], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://([\d.]+):(\d+)/v1", running.stdout.readline())
            assert found is not None
            yield Served(running, found[1], int(found[2]))
        finally:
            running.terminate()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def under_attack(served: Served, name: str, seconds: float) -> Iterator[multiprocessing.process.BaseProcess]:
    attack = multiprocessing.get_context("spawn").Process(
        target=run_attack, args=(name, served.host, served.port, seconds)
    )
    attack.start()
    try:
        yield attack
    finally:
        attack.kill()
        attack.join()


HELD = {"slow headers", "idle connections", "unfinished bodies"}
"""Attacks that the gateway ends by its timers; all others are the same from their beginning to their end."""


def ask(served: Served) -> float:
    """Ask on a new connection; return the gateway's work until the answer, which does not depend on other processes.

    No answer waits for a timer that ends the attacker's connections: the shortest takes 10 s.
    """
    began, asked = served.work, time.monotonic()
    connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"authorization": "Bearer kb"})
        assert connection.getresponse().read() == chat_answer()
    finally:
        connection.close()
    assert time.monotonic() - asked < 9
    return served.work - began


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_stops_the_others(
    served: Served, upstream: ScriptedUpstream, name: str, record_property: Callable[[str, object], None]
) -> None:
    alone = max(ask(served) for _ in range(50))
    before = most = served.memory
    longest, answered = 0.0, 0
    end = time.monotonic() + (12 if name in HELD else 4)
    with under_attack(served, name, 600) as attack:
        while answered < 30 or time.monotonic() < end:
            longest = max(longest, ask(served))
            most = max(most, served.memory)
            answered += 1
        assert attack.is_alive()
    record_property(
        "measured", f"{answered} answers, longest {longest:.3f} s, {alone:.3f} alone, {before} to {most} MB"
    )
    assert most < before + 200
    limit = 2.0 if name in HELD else 0.5  # some bytes of thousands of connections may be read before
    assert longest < limit + 5 * alone
    assert not any("smuggled" in request.target for request in upstream.requests)


@linux
@pytest.mark.parametrize("name", ["endless headers", "slow headers", "unfinished bodies", "tiny chunks"])
def test_the_others_are_answered_during_an_attack(served: Served, name: str) -> None:
    before = served.memory
    with under_attack(served, name, 60) as attack:
        for _ in range(30):
            ask(served)
        assert attack.is_alive()
        assert served.memory < before + 200
    assert served.process.poll() is None
