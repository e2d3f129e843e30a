"""Recorded requests, as the doctor reads them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, metric, send

from redis_servers import wait_until
from warmprefix_gateway import GatewayServer
from warmprefix_gateway.recording import BodyRecorder
from warmprefix_tools.doctor.log_reader import read_log
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
def test_the_doctor_reads_what_was_recorded(
    emulators: list[EmulatorServer], gateway_of: Make, tmp_path: Path, path: str
) -> None:
    messages = [{"role": "user", "content": "The sea is deep. " * 50}]
    body = {"model": INSTANT.model, "max_tokens": 9, "input" if path == PATHS[1] else "messages": messages}
    gateway = gateway_of(emulators[0].base_url, tenant_header="x-tenant", record=tmp_path / "log")
    for tenant, stream in (("acme", False), ("acme", True), ("initech", False)):
        content = json.dumps({**body, "stream": stream}, indent=1).encode()
        assert send(gateway, "POST", path, content, x_tenant=tenant, session_id="one").status == 200
    gateway.__exit__(None, None, None)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert b"cache_salt" not in (tmp_path / "log").read_bytes()
    read = read_log([tmp_path / "log"])
    assert read.skipped == []
    assert [request.tenant for request in read.log.requests] == ["acme", "acme", "initech"]
    cached = [request.reported_cached_tokens for request in read.log.requests]
    assert cached[0] == 0 < (cached[1] or 0)


def test_only_answered_requests_are_recorded(upstream: ScriptedUpstream, gateway_of: Make, tmp_path: Path) -> None:
    gateway = gateway_of(upstream.base_url, record=tmp_path / "log")
    send(gateway, "POST", PATHS[0], b"{")
    send(gateway, "GET", "/v1/models")
    gateway.__exit__(None, None, None)
    assert (tmp_path / "log").read_bytes() == b""


def test_a_full_disk_is_counted(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, record=Path("/dev/full"))
    for _ in range(2):
        assert send(gateway, "POST", PATHS[0], b'{"messages": [{"role": "user", "content": "Why?"}]}').status == 200
    wait_until(lambda: metric(gateway, "failures_total") == 2, "both losses are counted")


def test_waiting_requests_are_bounded(tmp_path: Path) -> None:
    lost: list[str] = []
    recorder = BodyRecorder(tmp_path / "log", lambda what, error: lost.append(what))
    recorder.record(b"{}" + b" " * (64 << 20), time=0.0, tenant=None, session="s", usage=None)
    recorder.record(b"{}", time=0.0, tenant=None, session="s", usage=None)
    recorder.close()
    assert lost == ["a request was not recorded"]
    assert json.loads((tmp_path / "log").read_bytes())["request"] == {}
