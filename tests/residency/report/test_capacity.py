"""The capacity of an engine's cache, from its metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from warmprefix.errors import EngineError
from warmprefix_openai.cache_metrics import capacity_from_metrics, report_from_metrics

VLLM = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="2048",prefix="a\\"b"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1024"} 1.0
"""
SGLANG = """sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 4.5e+04
"""


HYBRID = VLLM.replace('num_gpu_blocks="1024"', 'kv_cache_size_tokens="9000",num_gpu_blocks="1024"')


@pytest.mark.parametrize(
    ("text", "tokens"), [(VLLM, 16_384), (SGLANG, 45_000), (HYBRID, 9_000), (HYBRID.replace("9000", "None"), 16_384)]
)
def test_the_text_of_metrics_is_parsed(text: str, tokens: int) -> None:
    assert capacity_from_metrics(text) == tokens


@pytest.mark.parametrize("text", ["", "up 1\n", VLLM.replace('"2048"', '"None"').replace('"1024"', '"0"')])
def test_metrics_without_a_capacity_are_refused(text: str) -> None:
    with pytest.raises(EngineError, match="the metrics lack both"):
        capacity_from_metrics(text)


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = VLLM.encode() if self.path == "/metrics" else b""
        self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/metrics"])
def test_metrics_are_read_from_an_address(address: str, suffix: str) -> None:
    assert capacity_from_metrics(address + suffix) == 16_384


@pytest.mark.parametrize("suffix", ["/elsewhere"])
def test_an_address_without_metrics_is_an_error(address: str, suffix: str) -> None:
    with pytest.raises(EngineError, match="could not be read"):
        capacity_from_metrics(address + suffix)


def test_an_unreachable_engine_is_an_error() -> None:
    with pytest.raises(EngineError, match="could not be read"):
        capacity_from_metrics("http://127.0.0.1:9", timeout=1)


class SglangInfo(BaseHTTPRequestHandler):
    """SGLang without metrics; its answer is the `info` of its server."""

    def do_GET(self) -> None:
        body = b"" if self.path == "/metrics" else getattr(self.server, "info")[self.path]  # noqa: B009
        self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.mark.parametrize(
    ("shown", "tokens", "profile"),
    [
        ({"radix_eviction_policy": "lru", "enable_priority_scheduling": False, "max_total_num_tokens": 9}, 9, None),
        (
            {"radix_eviction_policy": "priority", "enable_priority_scheduling": False, "max_total_num_tokens": True},
            None,
            "priority-eviction",
        ),
        ({"radix_eviction_policy": "priority", "enable_priority_scheduling": True, "max_total_num_tokens": 9}, 9, None),
        ({"radix_eviction_policy": "priority", "max_total_num_tokens": -1}, None, None),
        (
            {
                "radix_eviction_policy": "priority",
                "enable_priority_scheduling": False,
                "abort_on_priority_when_disabled": True,
            },
            None,
            None,
        ),
    ],
)
def test_sglang_shows_its_capacity_and_its_eviction(shown: object, tokens: int | None, profile: str | None) -> None:
    with HTTPServer(("127.0.0.1", 0), SglangInfo) as server:
        setattr(server, "info", {"/server_info": json.dumps(shown).encode()})  # noqa: B010
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        report = report_from_metrics(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert (report.capacity_tokens, report.profile and report.profile.name) == (tokens, profile)


@pytest.mark.parametrize("info", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000])
def test_other_information_is_not_read(info: bytes) -> None:
    with HTTPServer(("127.0.0.1", 0), SglangInfo) as server:
        setattr(server, "info", {"/server_info": info})  # noqa: B010
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(EngineError, match="metrics could not be read"):
            report_from_metrics(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
