"""A client of one OpenAI-compatible engine with as little as possible between clock and socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from warmprefix.errors import EngineError
from warmprefix_openai.cache_metrics import capacity_from_metrics

__all__ = ["Answer", "EngineClient", "Message"]

Message = dict[str, str]
TIMEOUT = 600.0


@dataclass(frozen=True)
class Answer:
    """The timing of one chat by the client's clock, and the engine's usage."""

    ttft: float
    """Seconds from the request to the first piece of the answer."""
    prompt_tokens: int
    cached_tokens: int


class EngineClient:
    """Talks to one engine, with one connection per request. Threads may share it.

    Args:
        base_url: With `/v1`.
        model: By default the first that the engine lists.
        api_key: Where the engine asks for one.
    """

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = base_url.rstrip("/")
        """Base URL, with `/v1`."""
        self._url = urlsplit(self.url)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.model: str = model or self._json("GET", "/models")["data"][0]["id"]

    def ask(self, messages: Sequence[Message], cache_salt: str | None = None) -> Answer:
        """Stream one token of an answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        encoded = json.dumps(body).encode()
        with self._connected() as connection:
            sent = time.perf_counter()
            connection.request("POST", f"{self._url.path}/chat/completions", encoded, self._headers)
            return _read_stream(_checked(connection.getresponse()), sent)

    def count_tokens(self, text: str) -> int:
        """Count with the engine's own tokenizer."""
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        count: int = self._json("POST", "/tokenize", request, outside_v1=True)["count"]
        return count

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False if the engine does not allow it."""
        with self._connected() as connection:
            connection.request("POST", self._outside_v1("/reset_prefix_cache"), b"", self._headers)
            response = connection.getresponse()
            response.read()
            return response.status == 200

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format; empty if there are none."""
        with self._connected() as connection:
            connection.request("GET", self._outside_v1("/metrics"), headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode()
            return text if response.status == 200 else ""

    def counter(self, name: str) -> float | None:
        """Return one of vLLM's metrics by its name without `vllm:`, summed over its labels."""
        found = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(map(float, found)) if found else None

    def capacity_tokens(self) -> int | None:
        """Return the capacity of the KV cache, or None if the engine does not report it."""
        with contextlib.suppress(EngineError):
            return capacity_from_metrics(self.metrics())
        return None

    def _outside_v1(self, path: str) -> str:
        """Return the full path of one that is next to `/v1`."""
        return f"{self._url.path.removesuffix('/v1')}{path}"

    def _json(self, method: str, path: str, body: Any = None, *, outside_v1: bool = False) -> Any:
        with self._connected() as connection:
            whole = self._outside_v1(path) if outside_v1 else f"{self._url.path}{path}"
            connection.request(method, whole, None if body is None else json.dumps(body), self._headers)
            return json.loads(_checked(connection.getresponse()).read())

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        of = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = of(self._url.hostname or "", self._url.port, timeout=TIMEOUT)
        try:
            connection.connect()  # before the clock starts
            yield connection
        finally:
            connection.close()


def _checked(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if response.status != 200:
        raise RuntimeError(f"the engine answered {response.status}: {response.read()[:500].decode(errors='replace')}")
    return response


def _read_stream(lines: http.client.HTTPResponse, sent: float) -> Answer:
    first: float | None = None
    usage: dict[str, Any] | None = None
    for line in lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the engine answered: {event['error']}")
        usage = event.get("usage") or usage
        if first is None and any(map(_is_token, event["choices"])):
            first = now - sent
    if first is None or usage is None:
        raise RuntimeError("the engine streamed no answer, or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(first, usage["prompt_tokens"], details.get("cached_tokens") or 0)


def _is_token(choice: dict[str, Any]) -> bool:
    """Return True if it has one. Half a character shows no text, but the only token of an answer also ends it."""
    return bool(choice["delta"].get("content")) or choice.get("finish_reason") is not None
