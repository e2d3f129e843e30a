"""The engine's tokenizer over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from warmprefix_kv_events.spans import EngineTokenizer, TokenizerError


class Engine(ThreadingHTTPServer):
    """Answers `/tokenize` as vLLM and SGLang do, with one token per character."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        self.answer: bytes | None = None
        self.status = 200
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Engine)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.calls.append((self.path, dict(self.headers), body))
        text = body["prompt"] if "prompt" in body else "".join(message["content"] for message in body["messages"])
        tokens = [ord(character) for character in text]
        answer = {"count": len(tokens), "max_model_len": 4_096, "tokens": tokens}
        data = json.dumps(answer).encode() if server.answer is None else server.answer
        time.sleep(server.delay)
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # the client may have stopped waiting
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_requests_the_tokens_of_a_whole_prompt(engine: Engine) -> None:
    messages = [{"role": "user", "content": "añ"}]
    request = {"model": "m", "messages": messages, "tools": None, "temperature": 1, "max_tokens": 5}
    assert EngineTokenizer(engine.url).of_request(request) == [97, 241]
    assert engine.calls[0][2] == {"model": "m", "messages": messages}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_it_requests_tokens_without_special_ones(engine: Engine, suffix: str) -> None:
    assert EngineTokenizer(engine.url + suffix, "m", api_key="k")("añ") == [97, 241]
    path, headers, body = engine.calls[0]
    assert path == "/tokenize"
    assert headers["Authorization"] == "Bearer k"
    assert body == {"model": "m", "prompt": "añ", "add_special_tokens": False}


def test_an_engine_of_one_model_needs_no_name(engine: Engine) -> None:
    EngineTokenizer(engine.url)("a")
    assert engine.calls[0][2] == {"prompt": "a", "add_special_tokens": False}


@pytest.mark.parametrize(
    "answer", [b"no json", b"[]", b"{}", b'{"tokens": "abc"}', b'{"tokens": [[1]]}', b"\xff", b'{"tokens": []}']
)
def test_invalid_answers_are_errors(engine: Engine, answer: bytes) -> None:
    engine.answer = answer
    with pytest.raises(TokenizerError, match=engine.url):
        EngineTokenizer(engine.url)("a")


def test_an_empty_text_has_no_tokens(engine: Engine) -> None:
    assert EngineTokenizer(engine.url)("") == []


def test_refusals_timeouts_and_unreachable_engines_are_errors(engine: Engine) -> None:
    engine.status = 404
    with pytest.raises(TokenizerError, match="404"):
        EngineTokenizer(engine.url)("a")
    engine.status, engine.delay = 200, 1.0
    with pytest.raises(TokenizerError):
        EngineTokenizer(engine.url, timeout=0.05)("a")
    with pytest.raises(TokenizerError):
        EngineTokenizer("http://127.0.0.1:9")("a")
