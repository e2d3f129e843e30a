"""What a router compares of requests to an OpenAI API: their prompts, in pieces."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from warmprefix.blocks import ContextBlock

__all__ = ["RequestPrompt", "prompt_of_request"]

_MOST = 512
"""Characters of a piece."""
_LEAST = 64
"""A shorter piece belongs to the next one: an engine's tokens of it may not be found."""
_MOST_OF_PREAMBLE = 2_048
"""Characters of a system prompt without a context."""
_CHARACTERS_PER_TOKEN = 4
_SYSTEM = ("system", "developer")


class RequestPrompt(NamedTuple):
    """A prompt in pieces. Two prompts have equal first blocks as far as their texts begin alike."""

    tenant: str | None
    """The request's `cache_salt`: engines share no prefix between salts."""
    preamble: str | None
    """Digest of a short system prompt, which replicas soon hold all, so that it should not draw requests to one."""
    blocks: tuple[ContextBlock, ...]
    """One for each piece behind the preamble. Its text is a digest of the prompt up to the end of the piece."""
    paragraphs: tuple[str, ...]
    """The pieces themselves; empty if the prompt is given in tokens."""
    tokens: int
    """Of the whole prompt; for texts, an estimate."""
    fields: dict[str, Any]
    """The request, as far as its prompt depends on it."""


def prompt_of_request(request: object) -> RequestPrompt | None:
    """Return the prompt of a chat completion or completion; None for anything else, or several prompts at once.

    Args:
        request: A JSON object, or an object with its fields as attributes.
    """
    fields = {name: _field(request, name) for name in ("model", "tools", "messages", "prompt", "cache_salt")}
    salt = fields.pop("cache_salt")
    tenant = salt if isinstance(salt, str) else None
    fields = {name: value for name, value in fields.items() if value is not None}
    messages, prompt = fields.get("messages"), fields.get("prompt")
    root = [fields.get("model"), fields.get("tools")]
    if isinstance(messages, list):
        return _of_texts(tenant, root, list(_texts(messages)), fields)
    if isinstance(prompt, str):
        return _of_texts(tenant, root, [_Text(None, "", prompt)], fields)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and abs(token) < 2**63 for token in prompt):
        return _of_tokens(tenant, root, prompt, fields)
    return None


def _field(request: object, name: str) -> Any:
    value = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value with all pydantic models in it as JSON objects."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


class _Text(NamedTuple):
    """A text in a prompt, and what precedes it there."""

    role: object
    before: str
    text: str


def _texts(messages: Sequence[Any]) -> Iterator[_Text]:
    """Yield the text of each message."""
    for message in messages:
        fields: dict[str, Any] = dict(message) if isinstance(message, Mapping) else {"content": str(message)}
        content = fields.pop("content", None)
        if isinstance(content, list):
            with_text = [isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content]
            fields["parts"] = [part for part, has_text in zip(content, with_text, strict=True) if not has_text]
            content = "".join([part["text"] for part, has_text in zip(content, with_text, strict=True) if has_text])
        text = content if isinstance(content, str) else ""
        yield _Text(fields.get("role"), json.dumps(fields, sort_keys=True, default=repr), text)


def _of_texts(tenant: str | None, root: Sequence[Any], texts: Sequence[_Text], fields: dict[str, Any]) -> RequestPrompt:
    first = next((i for i, text in enumerate(texts) if text.role not in _SYSTEM), 0)
    if sum(len(text.text) for text in texts[:first]) > _MOST_OF_PREAMBLE:
        first = 0
    digest = _digest_of(root)
    preamble: str | None = None
    blocks: list[ContextBlock] = []
    paragraphs: list[str] = []
    total = counted = 0
    for number, (_, before, text) in enumerate(texts):
        if number == first and first:
            preamble, counted = digest.hexdigest(), total
        digest.update(b"\0" + before.encode("utf-8", "surrogatepass") + b"\0")
        for piece in _pieces(text):
            digest.update(piece.encode("utf-8", "surrogatepass"))
            total += len(piece)
            if len(piece) >= _LEAST and number >= first:
                blocks.append(
                    ContextBlock(digest.hexdigest(), tokens=max((total - counted) // _CHARACTERS_PER_TOKEN, 1))
                )
                paragraphs.append(piece)
                counted = total
    return RequestPrompt(tenant, preamble, tuple(blocks), tuple(paragraphs), total // _CHARACTERS_PER_TOKEN, fields)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end behind a line or a word if possible."""
    start = 0
    while start < len(text):
        end = _cut(text, start)
        yield text[start:end]
        start = end


def _cut(text: str, start: int) -> int:
    """Return the end of the piece that begins at `start`."""
    end = start + _MOST
    if end >= len(text):
        return len(text)
    for separator in ("\n", " "):
        place = text.rfind(separator, start + _MOST // 2, end)
        if place >= 0:
            return place + 1
    return end


def _of_tokens(tenant: str | None, root: Sequence[Any], prompt: Sequence[int], fields: dict[str, Any]) -> RequestPrompt:
    digest = _digest_of(root)
    size = _MOST // _CHARACTERS_PER_TOKEN
    blocks = []
    for start in range(0, len(prompt), size):
        piece = prompt[start : start + size]
        digest.update(array("q", piece).tobytes())
        blocks.append(ContextBlock(digest.hexdigest(), tokens=len(piece)))
    return RequestPrompt(tenant, None, tuple(blocks), (), len(prompt), fields)


def _digest_of(root: Sequence[Any]) -> Any:
    return blake2b(json.dumps(root, sort_keys=True, default=repr).encode(), digest_size=16)
