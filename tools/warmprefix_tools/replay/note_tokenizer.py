"""Tokenizers that count labels and notes: a file of Hugging Face's `tokenizers`, or an engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix.tokens import TokenCounter
from warmprefix_kv_events.spans import EngineTokenizer, TokenizerError
from warmprefix_tools.report.visible import visible

__all__ = ["TokenizerLoadError", "load_tokenizer"]

_REMEMBERED = 65_536
"""Texts whose counts are kept, because every run counts the same ones."""
_PROBE = 'Most relevant above: the passage with "The sky is".'


class TokenizerLoadError(WarmprefixError):
    """A tokenizer that cannot be used, with the reason in one line."""


def load_tokenizer(name: str) -> TokenCounter:
    """Return a counter of tokens without special tokens, which has counted once.

    Args:
        name: The address of an engine with `/tokenize`, or the path of a `tokenizer.json`.

    Raises:
        MissingExtraError: A file needs the package `tokenizers`.
        TokenizerLoadError: The engine does not answer, or the file is no tokenizer.
    """
    count = _of_engine(name) if name.startswith(("http://", "https://")) else _of_file(name)
    return lru_cache(_REMEMBERED)(count)


def _of_engine(url: str) -> TokenCounter:
    try:
        tokenize = EngineTokenizer(url)
        tokenize(_PROBE)
    except (TokenizerError, ValueError) as error:
        raise TokenizerLoadError(_reason(url, error)) from error
    return lambda text: len(tokenize(text))


def _of_file(path: str) -> TokenCounter:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        raise MissingExtraError("tokenizers", "tokenizers") from exc
    try:
        tokenizer: Any = Tokenizer.from_file(path)
    except Exception as error:  # the package raises no class of its own
        raise TokenizerLoadError(_reason(path, error)) from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _reason(name: str, error: Exception) -> str:
    return visible(f"Cannot count tokens with {name}: {' '.join(str(error).split())}.")
