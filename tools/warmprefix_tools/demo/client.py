"""Asking an OpenAI-compatible server, and what the demo measures of its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.arms import Message

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("demo", "openai") from exc

__all__ = ["ANSWER_TOKENS", "Answer", "ChatClient"]

ANSWER_TOKENS = 48
"""Most that an answer may have: the demo times its beginning."""
_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer; the token counts are the server's own, None where it does not tell."""

    text: str
    ttft: float
    """Seconds until the first chunk that holds a part of the answer."""
    prompt_tokens: int | None
    cached_tokens: int | None


class ChatClient:
    """One model of one server. Every failure is a `DemoError` of one line."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.base_url = base_url
        self.model = model or ""
        """Without a name given, known after `warm_up`."""
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=_TIMEOUT)

    async def ask(self, messages: Sequence[Message], cache_salt: str | None) -> Answer:
        """Send one chat and read the whole of a short answer."""
        try:
            answer = await self._ask(messages, cache_salt)
        except Exception as error:  # the SDK lets some errors of its transport and parser through
            raise DemoError(_reason(self.base_url, error)) from error
        if not answer.text and answer.prompt_tokens is None:
            raise DemoError(f"{self.base_url} answers, but not as an OpenAI-compatible server.")
        return answer

    async def _ask(self, messages: Sequence[Message], cache_salt: str | None) -> Answer:
        sent = time.perf_counter()
        first: float | None = None
        pieces: list[str] = []
        usage: Any = None
        stream = await self._client.chat.completions.create(
            model=self.model,
            messages=cast(Any, messages),
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={} if cache_salt is None else {"cache_salt": cache_salt},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if first is None and _says_something(choice.delta):
                    first = time.perf_counter()
                pieces.append(choice.delta.content or "")
        ended = time.perf_counter()
        details = None if usage is None else usage.prompt_tokens_details
        return Answer(
            text="".join(pieces),
            ttft=(ended if first is None else first) - sent,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        )

    async def warm_up(self) -> None:
        """Ask something, so that no measured request finds a cold engine; without a model's name, the first listed."""
        if not self.model:
            try:
                models = await self._client.models.list()
            except Exception as error:  # as above
                raise DemoError(_reason(self.base_url, error)) from error
            if not models.data:
                raise DemoError(f"{self.base_url} lists no model; name one with --model.")
            self.model = models.data[0].id
        await self.ask([{"role": "user", "content": "Hello."}], None)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()


def _says_something(delta: Any) -> bool:
    """Whether it has text, or, from a reasoning model, thought."""
    thought = (delta.model_extra or {}).get("reasoning_content") or (delta.model_extra or {}).get("reasoning")
    return bool(delta.content or thought)


def _reason(base_url: str, error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        said = error.body.get("message") if isinstance(error.body, dict) else None
        hint = " Should the URL end in /v1?" if error.status_code == 404 and "/v1" not in base_url else ""
        return f"{base_url} refused a request ({error.status_code}): {_one_line(said or error.message)}{hint}"
    cause = error.__cause__ or error
    return f"No answer from {base_url}: {_one_line(cause) or type(cause).__name__}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
