"""Recorded requests, as the doctor reads them."""

from __future__ import annotations

import gzip
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, metric, send
from typer.testing import CliRunner

from redis_servers import wait_until
from warmprefix.errors import TraceError
from warmprefix_gateway import GatewayServer
from warmprefix_gateway.recording import BodyRecorder, RecordedExchange
from warmprefix_tools.cli import app
from warmprefix_tools.doctor.log_reader import read_log
from warmprefix_tools.emulator import EmulatorServer
from warmprefix_tools.traces.reader import read_trace

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
    read = read_log([tmp_path / "log"])
    assert read.skipped == []
    assert [request.tenant for request in read.log.requests] == ["acme", "acme", "initech"]
    cached = [request.reported_cached_tokens for request in read.log.requests]
    assert cached[0] == 0 < (cached[1] or 0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def undone(record: dict[str, Any]) -> Any:
    """Apply the patch of a record as in RFC 6902, and return the client's body."""
    body = json.loads(json.dumps(record["request"]))
    for step in record.get("client_patch", ()):
        *path, last = [name.replace("~1", "/").replace("~0", "~") for name in step["path"].split("/")[1:]]
        at: Any = body
        for name in path:
            at = at[int(name)] if isinstance(at, list) else at[name]
        key = int(last) if isinstance(at, list) else last
        if step["op"] == "remove":
            assert key in at
            del at[key]
        else:
            assert (step["op"] == "replace") == (isinstance(at, list) or key in at)
            at[key] = step["value"]
    return body


def test_both_sides_are_recorded(upstream: ScriptedUpstream, gateway_of: Make, tmp_path: Path) -> None:
    """A record holds what the upstream received, and what makes the client's body of it."""
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant", record=tmp_path / "log", reorder=("tags",))
    passages = [f'<source id="{name}">{f"Passage {name}/~ on caches. " * 60}</source>' for name in "wxyz"]
    result = "The sea is deep and the night is long. " * 60
    call = {"type": "function", "function": {"name": "read", "arguments": "{}"}}
    bodies = []
    orders = [[0, 1, 2, 3], [3, 0, 1, 2], [1, 3, 2, 0], [3, 1, 0, 2]]
    for order in orders:
        system = {"role": "system", "content": "Answer.\n" + "\n".join(passages[i] for i in order)}
        messages: list[Any] = [system, {"role": "user", "content": "Why?"}]
        for number in range(2):
            messages.append({"role": "assistant", "content": None, "tool_calls": [{**call, "id": f"c{number}"}]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
        bodies.append({"model": "m", "messages": messages, "stream": True, "cache_salt": "mine"})
    for number, body in enumerate(bodies):
        content = json.dumps(body, indent=1).encode()
        assert send(gateway, "POST", PATHS[0], content, x_tenant=f"t{number % 2}").status == 200
    gateway.__exit__(None, None, None)
    records = lines(tmp_path / "log")
    sent = [json.loads(request.body) for request in upstream.requests if request.body]
    assert [record["request"] for record in records] == sent
    assert [undone(record) for record in records] == bodies
    assert len({record["request"]["cache_salt"] for record in records}) == 2
    assert any("Word for word" in json.dumps(record["request"]) for record in records), "there are references"
    assert {(record["status"], record["outcome"]) for record in records} == {(200, "answered")}
    assert {record["upstream"] for record in records} == {upstream.base_url}
    assert max(len(json.dumps(record.get("client_patch", ""))) for record in records) < len(json.dumps(bodies[0]))
    trace = read_trace(tmp_path / "log")
    names = dict(zip(trace.requests[0].blocks, passages, strict=True))
    assert [[names[block] for block in request.blocks] for request in trace.requests] == [
        [passages[i] for i in order] for order in orders
    ]
    assert len({request.scope for request in trace.requests}) == 2
    assert trace.requests[0].seconds == 0.0
    assert min(trace.tokens.values()) > 100
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "log")])
    assert replayed.exit_code == 0, replayed.output
    assert "4 requests" in replayed.output


def test_compressed_bodies_are_recorded_plain(upstream: ScriptedUpstream, gateway_of: Make, tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Why? " * 99}]}
    for tenant_header in (None, "x-tenant"):
        path = tmp_path / f"log-{tenant_header}"
        gateway = gateway_of(upstream.base_url, tenant_header=tenant_header, record=path)
        content = gzip.compress(json.dumps(body).encode())
        assert send(gateway, "POST", PATHS[0], content, content_encoding="gzip", x_tenant="acme").status == 200
        gateway.__exit__(None, None, None)
        (record,) = lines(path)
        assert undone(record) == body
        assert ("cache_salt" in record["request"]) == (tenant_header is not None)


def test_requests_that_are_not_understood_are_not_recorded(
    upstream: ScriptedUpstream, gateway_of: Make, tmp_path: Path
) -> None:
    gateway = gateway_of(upstream.base_url, record=tmp_path / "log")
    send(gateway, "POST", PATHS[0], b"{")
    send(gateway, "GET", "/v1/models")
    gateway.__exit__(None, None, None)
    assert (tmp_path / "log").read_bytes() == b""


def test_requests_without_an_answer_are_recorded_as_such(
    emulators: list[EmulatorServer], gateway_of: Make, tmp_path: Path
) -> None:
    body = {"model": INSTANT.model, "max_tokens": 9, "messages": [{"role": "user", "content": "Why? " * 99}]}
    gateway = gateway_of(emulators[0].base_url, record=tmp_path / "log")
    for more in ({}, {"max_tokens": "none"}):
        send(gateway, "POST", PATHS[0], json.dumps({**body, **more}).encode())
    gateway.__exit__(None, None, None)
    dead = gateway_of("http://127.0.0.1:9/v1", record=tmp_path / "log")
    assert send(dead, "POST", PATHS[0], json.dumps(body).encode()).status == 502
    dead.__exit__(None, None, None)
    answered, refused, unanswered = lines(tmp_path / "log")
    assert (answered["status"], answered["outcome"]) == (200, "answered")
    assert (refused["status"] // 100, refused["outcome"]) == (4, "failed")
    assert (unanswered["status"], unanswered["outcome"]) == (None, "unanswered")
    with pytest.raises(TraceError, match="without retrieved contexts; `warmprefix serve --reorder tags --record FILE`"):
        read_trace(tmp_path / "log")
    read = read_log([tmp_path / "log"])
    assert len(read.log.requests) == 1, "the engine computed one prompt"
    assert any("2 requests" in note and "no answer" in note for note in read.notes)


def test_a_full_disk_is_counted(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, record=Path("/dev/full"))
    for _ in range(2):
        assert send(gateway, "POST", PATHS[0], b'{"messages": [{"role": "user", "content": "Why?"}]}').status == 200
    wait_until(lambda: metric(gateway, "failures_total") == 2, "both losses are counted")


def test_waiting_requests_are_bounded(tmp_path: Path) -> None:
    lost: list[str] = []
    recorder = BodyRecorder(tmp_path / "log", lambda what, error: lost.append(what))
    for sent in (b"{}" + b" " * (64 << 20), b"{}"):
        recorder.record(RecordedExchange(0.0, None, "s", "http://a", 200, "answered", None, sent, sent))
    recorder.close()
    assert lost == ["a request was not recorded"]
    assert lines(tmp_path / "log")[0]["request"] == {}
