"""Client of an OpenAI-compatible server, and the measurements of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.arms import Message

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("demo", "openai") from exc

from warmprefix.openai import ChatAsker, chat_options

__all__ = ["ANSWER_TOKENS", "Answer", "ChatClient"]

ANSWER_TOKENS = 48
"""Most tokens of an answer: the demo times its beginning."""
_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer; the token counts are the server's own, None if it reports none."""

    text: str
    ttft: float
    """Seconds to the first token."""
    prompt_tokens: int | None
    cached_tokens: int | None


class ChatClient:
    """One model of one server. Every failure is a `DemoError` of one line."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.base_url = base_url
        self.model = model or ""
        """Without a name given, set by `warm_up`."""
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=_TIMEOUT)
        self._asker = ChatAsker(self._client)

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
        options = chat_options(self.model, messages, {"max_tokens": ANSWER_TOKENS, "temperature": 0}, cache_salt)
        answer = await self._asker.ask(options)
        return Answer(answer.text or "", answer.ttft or 0.0, answer.prompt_tokens, answer.cached_tokens)

    async def warm_up(self) -> None:
        """Send a first request, so that no measured one meets a cold engine. Without a model, use the first listed."""
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
        """Close the connections."""
        await self._client.close()


def _reason(base_url: str, error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        reason = error.body.get("message") if isinstance(error.body, dict) else None
        hint = " Should the URL end in /v1?" if error.status_code == 404 and "/v1" not in base_url else ""
        return f"{base_url} refused a request ({error.status_code}): {_one_line(reason or error.message)}{hint}"
    cause = error.__cause__ or error
    return f"No answer from {base_url}: {_one_line(cause) or type(cause).__name__}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
