"""The servers that answer the demo's questions: emulators, the user's own server, or a small model on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.local.llama_server import LocalModel

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("demo", "openai") from exc

from warmprefix_openai import ChatAnswer, ChatAsker, chat_options

__all__ = ["ANSWER_TOKENS", "EMULATOR", "LOCAL_THREADS", "DemoServer", "Message", "message", "serve"]

EMULATOR = EmulatorConfig(kv_blocks=4_096, prefill_rate=10_000.0, base_ttft_ms=20.0, decode_rate=math.inf)
"""The engine without a real server; it decodes in no time because the demo is about TTFT."""
ANSWER_TOKENS = 48
"""Most tokens of an answer; the demo times its beginning."""
LOCAL_THREADS = min(os.cpu_count() or 1, 2)
"""Threads of the model on this machine."""

_CAPACITY_TOKENS = 500_000  # assumed of a real server, which does not report it
_LOCAL_CONTEXT = 8_192  # what the model was trained for
_TIMEOUT_SECONDS = 300.0

Message = dict[str, str]


def message(role: str, content: str) -> Message:
    """Return one message of a chat."""
    return {"role": role, "content": content}


class DemoServer:
    """One model of one server. Every failure is a `DemoError` of one line."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, *, is_shared: bool, capacity_tokens: int | None) -> None:
        self.model = model
        self.is_shared = is_shared
        """True if all runs, and other users, ask this server."""
        self.capacity_tokens = capacity_tokens
        """Size of its cache, for the planner; None if the planner is to learn it from reports."""
        self._base_url = str(client.base_url).rstrip("/")
        self._asker = ChatAsker(client)

    async def ask(self, messages: Sequence[Message], cache_salt: str | None) -> ChatAnswer:
        """Send one chat and read the whole of a short answer."""
        options = chat_options(self.model, messages, {"max_tokens": ANSWER_TOKENS, "temperature": 0}, cache_salt)
        with _as_demo_error(self._base_url):
            answer = await self._asker.ask(options)
        if not answer.text and answer.prompt_tokens is None:
            raise DemoError(f"{self._base_url} answers, but not as an OpenAI-compatible server.")
        return answer


@asynccontextmanager
async def serve(options: DemoOptions) -> AsyncIterator[DemoServer]:
    """Enter with a server as the options want it; one that computes has answered once, so no request meets it cold."""
    if options.endpoint is not None:
        async with _client(options.endpoint, options.api_key) as client:
            model = options.served_model or await _first_model(client, options.endpoint)
            server = DemoServer(client, model, is_shared=True, capacity_tokens=_CAPACITY_TOKENS)
            await server.ask([message("user", "Hello.")], None)
            yield server
    elif options.model:
        with LocalModel(threads=LOCAL_THREADS, slots=1, context=_LOCAL_CONTEXT) as local:
            # The server closes connections that idle for some seconds, as each does while the other one answers.
            async with _client(local.base_url, headers={"connection": "close"}) as client:
                server = DemoServer(client, local.model, is_shared=False, capacity_tokens=None)
                await server.ask([message("user", "Hello.")], None)
                yield server
    else:
        with EmulatorServer(EMULATOR) as emulator:
            async with openai.AsyncOpenAI(base_url=emulator.base_url, api_key="none") as client:
                yield DemoServer(client, EMULATOR.model, is_shared=False, capacity_tokens=EMULATOR.capacity_tokens)


def _client(url: str, key: str | None = None, headers: Mapping[str, str] | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=url, api_key=key or "none", max_retries=0, timeout=_TIMEOUT_SECONDS, default_headers=headers
    )


async def _first_model(client: openai.AsyncOpenAI, url: str) -> str:
    with _as_demo_error(url):
        models = (await client.models.list()).data
    if not models:
        raise DemoError(f"{url} lists no model; name one with --served-model.")
    return models[0].id


@contextmanager
def _as_demo_error(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the SDK lets some errors of its transport and parser through
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(error, openai.APIStatusError):
            hint = " Should the URL end in /v1?" if error.status_code == 404 and "/v1" not in url else ""
            reason = " ".join(error.message.split())
            raise DemoError(f"{url} refused a request ({error.status_code}): {reason}{hint}") from error
        raise DemoError(f"No answer from {url}: {reason}") from error
