"""The one reader of token counts: what APIs, engines, proxies and logs report of a prompt and its cache. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["TokenUsage", "reported_usage", "token_usage"]

_MAX_TOKENS = 2**31
"""A larger count is no count."""

_MAX_DEPTH = 2
"""Levels of wrappers around an answer: the body of the response of a batch's line."""


class TokenUsage(NamedTuple):
    """Token counts of one answer. None stands for a count that was not reported, which is not 0."""

    prompt_tokens: int | None = None
    """Tokens of the whole prompt, cached ones included."""
    cached_tokens: int | None = None
    """Of the prompt, tokens that a cache held; never more than `prompt_tokens`."""
    written_tokens: int | None = None
    """Of the prompt, tokens written to a cache, for which hosted APIs have a price."""
    completion_tokens: int | None = None
    """Tokens of the answer."""

    @property
    def uncached_tokens(self) -> int | None:
        """Tokens of the prompt that were neither read nor written; None if the cached ones are unknown."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens - (self.written_tokens or 0)


class _Vocabulary(NamedTuple):
    """The names of one family of APIs. A slash leads into an object; the first name with a count is taken."""

    prompt: Sequence[str]
    read: Sequence[str] = ()
    written: Sequence[str] = ()
    counts: Literal["within", "apart", "either"] = "within"
    """Whether the prompt's count includes cached tokens. "either": it does, unless it is smaller than they are."""
    total: str = ""
    """Name of the sum of prompt and answer, which shows what the prompt's count includes."""
    read_if_absent: int | None = None


_ANTHROPIC_READ = ("cache_read_input_tokens", "cacheReadInputTokens")
_ANTHROPIC_WRITTEN = ("cache_creation_input_tokens", "cacheCreationInputTokens")

_VOCABULARIES = (
    # LiteLLM, Portkey and others translate Anthropic's answers, with both APIs' names. Some translate the total too.
    _Vocabulary(("prompt_tokens",), _ANTHROPIC_READ, _ANTHROPIC_WRITTEN, "either", "total_tokens"),
    # OpenAI's chat and those who follow it: vLLM, SGLang, xAI, Groq, Mistral, OpenRouter, Qwen; DeepSeek, Moonshot.
    _Vocabulary(
        ("prompt_tokens", "promptTokens"),
        (
            *("prompt_tokens_details/cached_tokens", "input_tokens_details/cached_tokens", "prompt_cache_hit_tokens"),
            *("cached_tokens", "num_cached_tokens", "cached_prompt_text_tokens", "timings/cache_n"),
        ),
        (
            *("prompt_tokens_details/cache_write_tokens", "prompt_tokens_details/cache_creation_tokens"),
            *("prompt_tokens_details/cache_creation_input_tokens", "cache_write_tokens"),
            "prompt_tokens_details/created_cache_tokens",  # vLLM from 0.33 on, which charges nothing
        ),
        total="total_tokens",
    ),
    # OpenAI's Responses, LangChain's `usage_metadata`, Qwen's own API.
    _Vocabulary(
        ("input_tokens",),
        (
            *("input_tokens_details/cached_tokens", "input_token_details/cache_read"),
            *("prompt_tokens_details/cached_tokens", "cached_tokens", "cached_input_tokens"),
        ),
        ("input_tokens_details/cache_write_tokens", "input_token_details/cache_creation"),
        total="total_tokens",
    ),
    _Vocabulary(("input_tokens",), _ANTHROPIC_READ, _ANTHROPIC_WRITTEN, "apart"),
    # Bedrock: Converse, and the metrics of an invocation.
    _Vocabulary(
        ("inputTokens", "inputTokenCount"),
        ("cacheReadInputTokens", "cacheReadInputTokenCount"),
        ("cacheWriteInputTokens", "cacheWriteInputTokenCount", "cacheCreationInputTokens"),
        "apart",
    ),
    _Vocabulary(
        ("inputTokens",),
        ("cachedInputTokens", "inputTokenDetails/cacheReadTokens"),
        ("inputTokenDetails/cacheWriteTokens",),
    ),
    # Gemini's JSON has no field whose count is 0.
    _Vocabulary(("promptTokenCount",), ("cachedContentTokenCount",), read_if_absent=0),
    _Vocabulary(("prompt_token_count",), ("cached_content_token_count",), read_if_absent=0),
    _Vocabulary(("prompt_cache_miss_tokens",), ("prompt_cache_hit_tokens",), counts="apart"),
    _Vocabulary(("timings/prompt_n",), ("timings/cache_n",), counts="apart"),
    # Langfuse and OpenClaw, which count each kind of token once.
    _Vocabulary(
        ("input",),
        ("input_cached_tokens", "input_cache_read", "cache_read_input_tokens", "input_cache_read_tokens", "cacheRead"),
        ("input_cache_creation", "cache_creation_input_tokens", "input_cache_creation_tokens", "cacheWrite"),
        "apart",
        "total",
    ),
    # Spans: OpenTelemetry's conventions, today's and earlier ones, and OpenInference.
    _Vocabulary(
        ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens"),
        (
            *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
            *("gen_ai.usage.input_tokens.cached", "llm.usage.cache_read_input_tokens"),
            "gen_ai.usage.details.cache_read_tokens",  # Pydantic AI
        ),
        (
            *("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens"),
            *("gen_ai.usage.cache_write_input_tokens", "llm.usage.cache_creation_input_tokens"),
        ),
        "either",
    ),
    _Vocabulary(
        ("llm.token_count.prompt",),
        ("llm.token_count.prompt_details.cache_read",),
        ("llm.token_count.prompt_details.cache_write",),
        "either",
    ),
    _Vocabulary(("prompt_eval_count",), ("prompt_eval_cached_count",)),  # Ollama
    _Vocabulary(("tokens/input_tokens",), ("cached_tokens",)),  # Cohere
)

_WITH_ROOTS = [(names, frozenset(name.partition("/")[0] for name in names.prompt)) for names in _VOCABULARIES]
"""Each vocabulary, with the fields of which a usage has one or more: most usages fit one vocabulary."""

_COMPLETION = (
    *("completion_tokens", "output_tokens", "outputTokens", "outputTokenCount", "candidatesTokenCount"),
    *("candidates_token_count", "completionTokens", "output", "eval_count", "timings/predicted_n"),
    *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
    *("tokens/output_tokens",),
)

_PLACES = (
    *("usageDetails", "usage_details", "usage", "usageMetadata", "usage_metadata", "token_usage", "tokenUsage"),
    "amazon-bedrock-invocationMetrics",
)
"""Where an answer or an event has its usage; the first one that is there counts."""
_WRAPPERS = ("response", "message", "body", "metadata", "response_metadata", "llm_output", "x_groq")
_OLLAMA = ("prompt_eval_count", "prompt_eval_cached_count", "eval_count")


def token_usage(usage: object) -> TokenUsage:
    """Return the counts of a reported usage, in whichever vocabulary; of anything else, no counts.

    Numbers may be floats or strings. What is negative, not whole or beyond reason counts as not reported.

    >>> token_usage({"prompt_tokens": 1050, "prompt_tokens_details": {"cached_tokens": 1000}})[:3]
    (1050, 1000, None)
    >>> token_usage({"input_tokens": 50, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 0})[:3]
    (1050, 1000, 0)
    >>> token_usage({"prompt_tokens": 1050, "prompt_tokens_details": None})[:3]
    (1050, None, None)
    """
    if not isinstance(usage, Mapping):
        return TokenUsage()
    completion = _first(usage, _COMPLETION)
    found = [
        one
        for names, roots in _WITH_ROOTS
        if not roots.isdisjoint(usage) and (one := _read(names, usage, completion)) is not None
    ]
    # Proxies fill in other APIs' names with 0 or null: a count is worth more than 0, and 0 more than none.
    return max(
        found,
        key=lambda one: (bool(one.prompt_tokens), bool(one.cached_tokens), one.cached_tokens is not None),
        default=TokenUsage(completion_tokens=completion),
    )


def reported_usage(payload: object, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the usage that an answer or one event of it reports, as it came, added to that of earlier events.

    A later event replaces the counts that it has, and no others: some repeat the usage without its details, or with
    zeros in place of them.

    Args:
        payload: An answer of any API, or an event of its stream.
        before: The usage that earlier events have reported.
    """
    usage = dict(before or {})
    for found in _usages(payload, 0):
        usage = _merged(usage, found)
    return usage


def _usages(payload: object, depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(payload, Mapping):
        return
    if isinstance(timings := payload.get("timings"), Mapping):  # llama.cpp
        yield {"timings": timings}
    places = (place for name in _PLACES if isinstance(place := payload.get(name), Mapping))
    if (usage := next(places, None)) is not None:
        yield usage
    elif _OLLAMA[0] in payload:
        yield {name: payload.get(name) for name in _OLLAMA}
    elif depth < _MAX_DEPTH:
        for name in _WRAPPERS:
            if isinstance(inner := payload.get(name), Mapping):
                yield from _usages(inner, depth + 1)
        choices = payload.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):  # Moonshot
            yield from _usages({"usage": choices[0].get("usage")}, _MAX_DEPTH)


def _merged(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    if not before:
        return dict(found)
    is_blank = not token_usage(found).prompt_tokens
    merged = dict(before)
    for name, value in found.items():
        held = merged.get(name)
        if isinstance(held, Mapping):
            if isinstance(value, Mapping):
                kept = {key: one for key, one in value.items() if not _is_worse(one, held.get(key), is_blank)}
                merged[name] = {**held, **kept}
        elif not _is_worse(value, held, is_blank):
            merged[name] = value
    return merged


def _is_worse(value: object, held: object, is_blank: bool) -> bool:
    """Return True if a later value must not replace an earlier one: no count, or a 0 that only fills a place."""
    if held is None:
        return value is None
    count = _count(value)
    return _count(held) is not None and (count is None or (is_blank and count == 0))


def _read(names: _Vocabulary, usage: Mapping[str, Any], completion: int | None) -> TokenUsage | None:
    prompt = _first(usage, names.prompt)
    if prompt is None:
        return None
    read, written = _first(usage, names.read), _first(usage, names.written)
    if written is None and names.written is _ANTHROPIC_WRITTEN and isinstance(usage.get("cache_creation"), Mapping):
        by_lifetime = [_count(tokens) for tokens in usage["cache_creation"].values()]
        written = sum([tokens or 0 for tokens in by_lifetime]) if by_lifetime else None
    if read is None:
        # One who counts the written tokens would count those read as well.
        read = names.read_if_absent if written is None else 0
    if read is None:
        # Without any report of the cache, an API that counts apart is not recognised.
        return TokenUsage(prompt, None, None, completion)
    besides = read + (written or 0)
    total = _count(usage.get(names.total))
    whole = None if total is None or completion is None else total - completion
    if besides > prompt:
        is_apart = names.counts != "within" or whole == prompt + besides
    elif whole in (prompt, prompt + besides):
        is_apart = whole != prompt
    else:
        is_apart = names.counts == "apart"
    if is_apart:
        return TokenUsage(prompt + besides, read, written, completion)
    read = min(read, prompt)
    return TokenUsage(prompt, read, None if written is None else min(written, prompt - read), completion)


def _first(usage: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        holder, _, inner = name.rpartition("/")
        where = usage.get(holder) if holder else usage
        if isinstance(where, Mapping) and (count := _count(where.get(inner))) is not None:
            return count
    return None


def _count(value: object) -> int | None:
    """Return a value as a number of tokens; None for anything else."""
    if isinstance(value, str) and len(value) < 32:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_TOKENS:
        return None
    return int(value) if math.floor(value) == value else None
