"""OpenAI's request fields for prompt caching, the same in chat completions and responses.

The rules are those of https://developers.openai.com/api/docs/guides/prompt-caching and of the API reference, as of
November 2026: `prompt_cache_breakpoint` on a content part marks the end of a prefix, on any part but an assistant's;
`prompt_cache_options.mode` is `implicit` unless the request turns the automatic mark off; 30 minutes is the only
lifetime; `prompt_cache_retention` excludes `prompt_cache_options`; models before GPT-5.6 refuse both new fields.
"""

from __future__ import annotations

from typing import Literal

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import is_hosted
from warmprefix_tools.emulator.serving import RefusedError

try:
    from pydantic import BaseModel
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["PromptCacheBreakpoint", "PromptCacheFields", "PromptCacheOptions", "check_breakpoint", "check_fields"]


class PromptCacheBreakpoint(BaseModel):
    """The end of a prefix to be cached."""

    mode: Literal["explicit"]


class PromptCacheOptions(BaseModel):
    """Options of one request."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class PromptCacheFields(BaseModel):
    """The fields that a request body has."""

    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    @property
    def wants_automatic_mark(self) -> bool:
        """True unless the request turns the automatic mark off."""
        return self.prompt_cache_options is None or self.prompt_cache_options.mode == "implicit"

    def salt(self, profile: CacheProfile, cache_salt: str | None) -> str | None:
        """Return what keeps the request's cache apart."""
        return self.prompt_cache_key if profile.isolation == "prompt_cache_key" else cache_salt


def check_fields(profile: CacheProfile, fields: PromptCacheFields) -> None:
    """Refuse fields that contradict each other, or that the profile's models do not have."""
    if fields.prompt_cache_options is None:
        return
    if fields.prompt_cache_retention is not None:
        raise RefusedError(
            400, "prompt_cache_retention and prompt_cache_options exclude each other.", param="prompt_cache_retention"
        )
    if _is_older(profile):
        raise _not_supported("prompt_cache_options")


def check_breakpoint(profile: CacheProfile, path: str, role: str, text: str) -> None:
    """Refuse a breakpoint on a part that cannot have one; engines without marks ignore it."""
    if _is_older(profile):
        raise _not_supported(path)
    if profile.marks is None:
        return
    if role == "assistant" and "assistant" in profile.marks.refused_on:
        raise RefusedError(400, f"Unknown parameter: '{path}'.", param=path)
    if not text and "empty" in profile.marks.refused_on:
        raise RefusedError(400, f"'{path}' cannot be set on an empty text.", param=path)


def _is_older(profile: CacheProfile) -> bool:
    return is_hosted(profile) and profile.marks is None


def _not_supported(param: str) -> RefusedError:
    return RefusedError(400, f"'{param}' is not supported with this model.", param=param)
