"""What a gateway reports of its upstreams: in the log, on its page, and to health checks."""

from __future__ import annotations

import logging
import re
import socket
import time
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, chat_answer, metric, send

from warmprefix_gateway import GatewayServer
from warmprefix_gateway.upstreams import Durations

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Is the sea salt?"}]}'
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def messages_of(caplog: pytest.LogCaptureFixture, wanted: int) -> list[str]:
    deadline = time.monotonic() + 20
    while len(found := [message for message in caplog.messages if message.startswith("upstream ")]) < wanted:
        assert time.monotonic() < deadline
    return found


def test_a_dead_upstream_is_named_once_with_its_reason_and_time(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warmprefix.gateway")
    dead = f"http://127.0.0.1:{closed_port()}/v1"
    other.handler = answer(b"", "503 Service Unavailable")
    gateway = gateway_of(upstream.base_url, dead, other.base_url, health_seconds=0.02, upstream_key="secret")
    first = sorted(messages_of(caplog, 2))
    upstream_of = {message.split()[1]: message for message in first}
    assert re.fullmatch(rf"upstream {dead} does not answer: Connection refused, at {TIME}", upstream_of[dead])
    assert f"{other.base_url} does not answer: status 503 at /health, at" in upstream_of[other.base_url]
    other.handler = answer(chat_answer())
    assert re.fullmatch(rf"upstream {other.base_url} answers again, at {TIME}", messages_of(caplog, 3)[2])
    checks = len(upstream.checks)
    deadline = time.monotonic() + 20
    while len(upstream.checks) < checks + 5:
        assert time.monotonic() < deadline
    assert len(messages_of(caplog, 3)) == 3
    assert metric(gateway, "upstreams") == 2
    assert "secret" not in caplog.text


def test_a_single_upstream_is_checked_until_it_answers(gateway_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmprefix.gateway")
    port = closed_port()
    gateway = gateway_of(f"http://127.0.0.1:{port}/v1", health_seconds=0.02)
    assert "does not answer: Connection refused" in messages_of(caplog, 1)[0]
    assert send(gateway, "GET", "/health").status == 503
    assert send(gateway, "POST", CHAT, BODY).status == 502
    with ScriptedUpstream(port=port) as upstream:
        assert "answers again" in messages_of(caplog, 2)[1]
        assert send(gateway, "GET", "/health").status == 200
        assert send(gateway, "POST", CHAT, BODY).status == 200
        checks = len(upstream.checks)
    assert send(gateway, "POST", CHAT, BODY).status == 502
    assert "does not answer: " in messages_of(caplog, 3)[2]
    assert checks == 1


@pytest.mark.parametrize("body", [BODY, b"not json", b'{"model": "m", "messages": 7}', b""])
def test_an_upstream_that_does_not_answer_is_one_error(gateway_of: Make, body: bytes) -> None:
    gateway = gateway_of(f"http://127.0.0.1:{closed_port()}/v1")
    for path in (CHAT, "/v1/embeddings"):
        assert send(gateway, "POST", path, body).status == 502
    assert metric(gateway, "upstream_errors_total", reason="connection") == 2


def test_the_page_has_a_row_for_each_upstream(
    upstream: ScriptedUpstream, gateway_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    dead = f"http://127.0.0.1:{closed_port()}/v1"
    gateway = gateway_of(upstream.base_url, dead)
    messages_of(caplog, 1)
    for _ in range(3):
        assert send(gateway, "POST", CHAT, BODY).status == 200
    upstream.handler = answer(b"{}", "500 Internal Server Error")
    assert send(gateway, "POST", CHAT, BODY).status == 500
    page = send(gateway, "GET", "/").body.decode()
    rows = {row[0]: row[1:] for row in map(cells, page.split("<tr>")) if row and row[0].startswith("http")}
    state, requests, in_flight, errors, error, half, most = rows[upstream.base_url]
    assert (state, requests, in_flight, errors) == ("answers", "4", "0", "1")
    assert re.fullmatch(rf"status 500, {TIME}", error)
    assert half.endswith(" ms")
    assert most.endswith(" ms")
    assert re.match(rf"does not answer since {TIME}", rows[dead][0])
    assert "The gateway itself adds" in page
    assert "<li>100 %</li><li>50 %</li><li>0 %</li>" in page
    assert re.search(r"<ol><li>\d\d:\d\d</li>", page)


def cells(row: str) -> list[str]:
    return [re.sub("<[^>]*>", "", cell) for cell in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)]


def test_pages_allow_their_own_style_and_nothing_else(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    for path in ("/", "/metrics", "/health"):
        headers = send(gateway, "GET", path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
    page = send(gateway, "GET", "/")
    style = page.body.decode().partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"<script|\sstyle=|\son\w+=|javascript:|<link|<img", page.body.decode())


def test_percentiles_are_those_of_the_latest() -> None:
    durations = Durations()
    for number in range(1, 101):
        durations.add(number)
    assert [durations.percentile(share) for share in (0.0, 0.01, 0.5, 0.95, 1.0)] == [1, 1, 50, 95, 100]
    for _ in range(1_000):
        durations.add(7)
    assert durations.percentile(1.0) == 7
