"""Context blocks in the tokens of prompts: the engine's tokenizer, and the search for each paragraph."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from warmprefix.errors import WarmprefixError
from warmprefix.residency import ServedPrompt
from warmprefix_kv_events.background_counter import BackgroundCounter
from warmprefix_kv_events.prompt_tree import TOKEN_BYTES, MappedPrompt, pack_tokens

__all__ = ["EngineTokenizer", "SpanFinder", "TokenizerError"]

_EDGES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (2, 2))
"""Numbers of tokens that a paragraph may share with the text before and after it, in the order tried."""
_MIN_CORE_TOKENS = 3
"""A shorter core, without the edges, would match by chance."""
_PROMPT_FIELDS = ("model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs")
"""Fields of a request that make its prompt."""


class TokenizerError(WarmprefixError):
    """An engine did not return the tokens of a text; names the address."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url
        """Address of the endpoint."""


class EngineTokenizer:
    """Tokenizes as the engine does, through the endpoint `/tokenize` of vLLM and SGLang. Thread-safe.

    Each call waits for the engine, so use it in the feed's thread and not in a request.

    Args:
        base_url: The engine's address, with or without the `/v1` of OpenAI clients.
        model: Name of the served model; may be None if the engine serves only one.
        timeout: Seconds per call.
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
        """Address of the endpoint."""
        self._model = model
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of the text, without special tokens.

        Raises:
            TokenizerError: The engine cannot be reached, is too slow, or answers without the tokens of the text.
        """
        return self._tokens_of({"prompt": text, "add_special_tokens": False})

    def token_counter(self) -> BackgroundCounter:
        """Return a counter for planners, which asks the engine in the background."""
        return BackgroundCounter(self)

    def of_request(self, request: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the whole prompt of a chat completion or a completion, by its fields.

        Raises:
            TokenizerError: As for a text.
        """
        return self._tokens_of({name: request[name] for name in _PROMPT_FIELDS if request.get(name) is not None})

    def _tokens_of(self, body: dict[str, Any]) -> list[int]:
        if self._model is not None:
            body["model"] = self._model
        request = Request(self.url, json.dumps(body).encode(), self._headers, method="POST")  # noqa: S310 - checked above
        try:
            with urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                answer = json.load(response)
        except (OSError, ValueError) as error:  # OSError includes urllib's errors, ValueError invalid JSON
            raise TokenizerError(self.url, str(error)) from error
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise TokenizerError(self.url, "the answer has no list of tokens")
        if not tokens and body.get("prompt", True):  # llama.cpp reads neither `prompt` nor `messages`
            raise TokenizerError(self.url, "the answer has no tokens")
        return tokens


class SpanFinder:
    """Finds the tokens of paragraphs in the prompts that contain them.

    Each paragraph is tokenized once, on its own, and searched in the prompt's tokens after the paragraph before it.
    Tokenizers merge across the edges of a paragraph, such as a full stop with the line breaks after it, so up to two
    tokens at either end may differ. Beyond `max_tokens`, the tokens of the least recently used paragraphs are dropped.
    """

    def __init__(self, tokenizer: Callable[[str], Sequence[int]], *, max_tokens: int = 4_000_000) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
        self._tokenizer = tokenizer
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def map(self, served: ServedPrompt) -> MappedPrompt | None:
        """Return the prompt with each block's end, or None if one was not found; raise what the tokenizer raises."""
        if not served.paragraphs or len(served.paragraphs) != len(served.keys):
            return None
        ids = served.token_ids
        tokens = pack_tokens(ids() if callable(ids) else ids)
        ends: list[int] = []
        for paragraph in served.paragraphs:
            span = _find(self._tokens(paragraph), tokens, ends[-1] if ends else 0)
            if span is None:
                return None
            start, end = span
            if ends:  # a token shared by two paragraphs counts for the first one only if it must
                ends[-1] = min(ends[-1], start)
            ends.append(min(end, len(tokens) // TOKEN_BYTES))
        return MappedPrompt(
            served.scope, served.cache_salt, tuple(served.keys), tokens[: ends[-1] * TOKEN_BYTES], tuple(ends)
        )

    def _tokens(self, paragraph: str) -> bytes:
        name = blake2b(paragraph.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        packed = self._cache[name] = pack_tokens(self._tokenizer(paragraph))
        self._bytes += len(packed)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._cache.popitem(last=False)[1])
        return packed


def _find(paragraph: bytes, prompt: bytes, start: int) -> tuple[int, int] | None:
    """Return the first place from `start` on with most of these tokens: its start and end, in tokens."""
    length = len(paragraph) // TOKEN_BYTES
    for before, behind in _EDGES:
        if before + behind and length - before - behind < _MIN_CORE_TOKENS:
            continue
        core = paragraph[before * TOKEN_BYTES : (length - behind) * TOKEN_BYTES]
        found = prompt.find(core, start * TOKEN_BYTES) if core else -1
        while found >= 0 and found % TOKEN_BYTES:  # a match that begins inside a token
            found = prompt.find(core, found + 1)
        if found >= 0:
            at = found // TOKEN_BYTES
            return max(at - before, start), at + length - before
    return None
