"""The engine's own tokenizer, asked over HTTP."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from warmprefix.errors import WarmprefixError

__all__ = ["EngineTokenizer", "TokenizerError"]


class TokenizerError(WarmprefixError):
    """An engine did not tell a text's tokens; names the address."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url


class EngineTokenizer:
    """Tokenizes as the engine does, by its `/tokenize` endpoint, which vLLM and SGLang have.

    For the feed's thread, not for a request's: each call waits for the engine. Safe for threads.

    Args:
        base_url: The engine's address, with or without the `/v1` that OpenAI clients want.
        model: The name that it serves the model under; None if it serves one.
        timeout: Seconds a call.
        api_key: Sent as bearer token.
    """

    def __init__(
        self, base_url: str, model: str | None = None, *, timeout: float = 5.0, api_key: str | None = None
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"base_url must be an http or https URL, got {base_url!r}")
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.url = base_url.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._model = model
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __call__(self, text: str) -> list[int]:
        """The text's token ids, without special tokens around them.

        Raises:
            TokenizerError: The engine can't be reached, takes too long, or answers with something else.
        """
        asked: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        if self._model is not None:
            asked["model"] = self._model
        request = Request(self.url, json.dumps(asked).encode(), self._headers, method="POST")  # noqa: S310 - checked above
        try:
            with urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                answer = json.load(response)
        except (OSError, ValueError) as error:  # among them all of urllib's, and what is no JSON
            raise TokenizerError(self.url, str(error)) from error
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise TokenizerError(self.url, "the answer has no list of tokens")
        return tokens
