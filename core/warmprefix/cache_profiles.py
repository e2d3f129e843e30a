"""Cache profiles: where a prefix cache can match, and what reading and writing it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from warmprefix.errors import check_count

__all__ = [
    "PROFILES",
    "CacheProfile",
    "Checkpoints",
    "MarkRules",
    "as_profile",
    "blend",
    "llama_cpp",
    "vllm_checkpoints",
]

MarkPlace = Literal["empty", "thinking", "assistant", "system", "tools"]
"""A content part that marks may be refused on: an empty text, a thinking block, or any part of such a message."""

MarkField = Literal["cache_control", "prompt_cache_breakpoint", "cachePoint"]
"""The field, or the kind of part, that is a mark in a request body."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where an engine with sliding-window or recurrent layers keeps states from which it can continue.

    A prompt of n tokens leaves a checkpoint at the last multiple of `block` below n, and of `unit` too.
    If it has more tokens in common with an earlier prompt than its hit covers, it also leaves one at the last multiple
    of `block` within the common part, its junction. So the second visit to a prefix finds nothing, and the third one
    does.

    Raises:
        TypeError: A field is not an int.
        ValueError: A field is below 1, or `block` is no multiple of `unit`.
    """

    block: int
    """Tokens between possible checkpoints."""
    unit: int | None = None
    """Tokens between possible ends of prompts that are kept; None for `block`."""
    junction_only: bool = False
    """True if a prompt with a junction leaves no other checkpoint, and nothing behind it is kept, as in SGLang."""

    def __post_init__(self) -> None:
        check_count("block", self.block)
        check_count("unit", self.unit, optional=True)
        if self.unit is not None and self.block % self.unit:
            raise ValueError(f"block must be a multiple of unit, got {self.block} and {self.unit}")


@dataclass(frozen=True, slots=True)
class MarkRules:
    """What a hosted API allows of the marks at which its cache matches.

    Raises:
        TypeError: `most`, `look_back` or `most_read` is not an int.
        ValueError: A count is below 1, or there is no lifetime.
    """

    field: MarkField = "cache_control"
    """Name of the field that a mark is."""
    most: int = 4
    """Most marks that one request may write, the automatic one included."""
    automatic: bool = False
    """True if the end of the newest message is a mark unless the request turns that off."""
    look_back: int | None = None
    """Content parts in front of a mark, the marked one included, at whose ends an earlier mark is still found; None
    if an earlier mark is found only where the request has it."""
    most_read: int | None = None
    """Latest marks of a request that are looked up; None for those that it writes."""
    lifetimes: tuple[float, ...] = (300.0,)
    """Seconds for which a written prefix is kept after its last use, shortest first."""
    refused_on: frozenset[MarkPlace] = frozenset({"empty"})
    """Where a mark makes the API refuse the request."""

    def __post_init__(self) -> None:
        check_count("most", self.most)
        check_count("look_back", self.look_back, optional=True)
        check_count("most_read", self.most_read, optional=True)
        if not self.lifetimes or list(self.lifetimes) != sorted(self.lifetimes) or not self.lifetimes[0] > 0:
            raise ValueError(f"lifetimes must be positive and rise, got {self.lifetimes}")


@dataclass(frozen=True, slots=True)
class CacheProfile:
    """What one prefix cache can do.

    A hit may end at any multiple of `unit`, unless `checkpoints`, `marks` or `slots` narrow that down. Override single
    fields with `dataclasses.replace`.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A count is below 1, a price is negative or not finite, several of `checkpoints`, `marks` and `slots`
            are given, or there is not one write price for each lifetime of the marks.
    """

    name: str
    """Name of the profile, as options and reports have it."""
    unit: int = 1
    """Hits end at multiples of this many tokens."""
    checkpoints: Checkpoints | None = None
    """Set for an engine that continues only from checkpoints."""
    marks: MarkRules | None = None
    """Set for an API that matches only at marks."""
    slots: int | None = None
    """Set for an engine that keeps the last prompt of each of this many slots."""
    host_memory: bool = False
    """True if prompts that leave a slot are kept in host memory."""
    minimum_tokens: int = 1
    """Shorter prefixes are not cached."""
    lifetime: float | None = None
    """Seconds for which a prefix without marks is kept at least; None if only the capacity decides."""
    read_price: float = 0.0
    """Price of a token from the cache, relative to an uncached one; 0 where time is the only price."""
    separator: str | None = None
    """Text around each block, set for an engine that also reuses text behind other text: there no order saves
    anything."""
    write_prices: tuple[float, ...] = (1.0,)
    """Price of a token that is written to the cache, relative to an uncached one; with marks one per lifetime."""
    eviction: Literal["lru", "priority"] = "lru"
    """What leaves a full cache first: what was used least recently, or of that what has the lowest priority. Each
    request states one, and what several requests share has the highest of theirs."""
    token_price: float | None = None
    """Dollars for an uncached token, as `warmprefix_requests.prices` reads it; None without a table of prices."""
    isolation: Literal["cache_salt", "prompt_cache_key"] | None = None
    """Field of a request that keeps caches of tenants apart, or routes requests to one cache."""
    as_of: str = ""
    """Date of the facts, as YYYY-MM-DD."""
    source: str = ""
    """Where the facts stand."""

    def __post_init__(self) -> None:
        check_count("unit", self.unit)
        check_count("slots", self.slots, optional=True)
        check_count("minimum_tokens", self.minimum_tokens)
        if self.separator is not None and not isinstance(self.separator, str):
            raise TypeError(f"separator must be a str or None, got {type(self.separator).__name__}")
        if self.separator == "":
            raise ValueError("separator must have at least one character, got ''")
        kinds = [kind for kind in ("checkpoints", "marks", "slots") if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise ValueError(f"a profile has at most one of checkpoints, marks and slots, got {' and '.join(kinds)}")
        absolute = () if self.token_price is None else (self.token_price,)
        for name, prices in (
            ("read_price", (self.read_price,)),
            ("write_prices", self.write_prices),
            ("token_price", absolute),
        ):
            for price in prices:
                if isinstance(price, bool) or not isinstance(price, int | float):
                    raise TypeError(f"{name} must be numbers, got {price!r}")
                if not (math.isfinite(price) and price >= 0):
                    raise ValueError(f"{name} must be finite and 0 or more, got {price}")
        if self.lifetime is not None and not self.lifetime > 0:
            raise ValueError(f"lifetime must be above 0, got {self.lifetime}")
        expected = 1 if self.marks is None else len(self.marks.lifetimes)
        if len(self.write_prices) != expected:
            raise ValueError(f"write_prices must have {expected} values, got {len(self.write_prices)}")


def vllm_checkpoints(block: int, unit: int | None = None) -> CacheProfile:
    """Return the profile of vLLM with sliding-window or recurrent layers.

    Args:
        block: The engine's unified block size in tokens, which it logs when it starts: 128 to 2,096.
        unit: Its option `--prefix-match-unit`.
    """
    return CacheProfile(
        f"vllm-checkpoints({block})" if unit is None else f"vllm-checkpoints({block},{unit})",
        unit=unit or block,
        checkpoints=Checkpoints(block, unit),
        isolation="cache_salt",
        as_of="2026-11-22",
        source="vLLM 0.32, prefix_cache_retention_interval 0; https://github.com/vllm-project/vllm/pull/52216",
    )


def llama_cpp(slots: int = 4, *, host_memory: bool = True) -> CacheProfile:
    """Return the profile of llama.cpp's server, which keeps whole prompts.

    Args:
        slots: Its option `--parallel`.
        host_memory: False for `--cache-ram 0`: prompts that leave a slot are not kept.
    """
    return CacheProfile(
        f"llama.cpp({slots})" if host_memory else f"llama.cpp({slots},0)",
        slots=slots,
        host_memory=host_memory,
        as_of="2026-11-26",
        source="llama-server b11549; https://github.com/ggml-org/llama.cpp/tree/master/tools/server",
    )


def blend(separator: str = " # # ") -> CacheProfile:
    """Return the profile of an engine that reuses text behind other text, as LMCache does with CacheBlend.

    Args:
        separator: Its setting `blend_special_str`, the text at which it cuts a prompt into pieces.
    """
    return CacheProfile(
        "blend" if separator == " # # " else f"blend({separator})",
        separator=separator,
        isolation="cache_salt",
        as_of="2026-11-26",
        source="https://docs.lmcache.ai/kv_cache_optimizations/blending.html",
    )


_OPENAI = "https://developers.openai.com/api/docs/guides/prompt-caching"
_BUILT_IN = (
    CacheProfile(
        "full-attention",
        isolation="cache_salt",
        as_of="2026-11-22",
        source="vLLM 0.32 and SGLang 0.5; the unit is the engine's KV block",
    ),
    CacheProfile(
        "sglang-checkpoints",
        unit=64,
        checkpoints=Checkpoints(64, junction_only=True),
        isolation="cache_salt",
        as_of="2026-11-23",
        source="SGLang 0.5.23 with recurrent layers and --mamba-radix-cache-strategy extra_buffer: its own prefix tree",
    ),
    CacheProfile(
        "priority-eviction",
        eviction="priority",
        isolation="cache_salt",
        as_of="2026-11-26",
        source="SGLang 0.5.23 with --radix-eviction-policy priority, without priority scheduling",
    ),
    CacheProfile(
        "anthropic",
        marks=MarkRules(look_back=20, lifetimes=(300.0, 3600.0), refused_on=frozenset({"empty", "thinking"})),
        minimum_tokens=1024,
        read_price=0.1,
        write_prices=(1.25, 2.0),
        as_of="2026-11-22",
        source="https://docs.claude.com/en/docs/build-with-claude/prompt-caching; the minimum is 512 to 4,096 by model",
    ),
    CacheProfile(
        "openai",
        marks=MarkRules(
            "prompt_cache_breakpoint",
            automatic=True,
            most_read=80,
            lifetimes=(1800.0,),
            refused_on=frozenset({"empty", "assistant"}),
        ),
        minimum_tokens=1024,
        read_price=0.1,
        write_prices=(1.25,),
        isolation="prompt_cache_key",
        as_of="2026-11-22",
        source=f"{_OPENAI}, from GPT-5.6",
    ),
    CacheProfile(
        "openai-before-5.6",
        unit=128,
        minimum_tokens=1024,
        lifetime=300.0,
        read_price=0.5,
        isolation="prompt_cache_key",
        as_of="2026-11-22",
        source=f"{_OPENAI}; the read price is 0.25 to 0.5 by model, the lifetime 5 to 60 minutes by load",
    ),
    CacheProfile(
        "bedrock",
        marks=MarkRules(
            "cachePoint", look_back=20, lifetimes=(300.0, 3600.0), refused_on=frozenset({"empty", "thinking"})
        ),
        minimum_tokens=1024,
        read_price=0.1,
        write_prices=(1.25, 2.0),
        as_of="2026-11-22",
        source="https://docs.aws.amazon.com/bedrock/latest/userguide/prompt-caching.html; prices as for Claude",
    ),
    CacheProfile(
        "gemini",
        minimum_tokens=1024,
        read_price=0.1,
        as_of="2026-11-22",
        source="https://ai.google.dev/gemini-api/docs/caching; implicit caching, from 1,024 to 4,096 tokens by model",
    ),
    CacheProfile(
        "deepseek",
        unit=64,
        minimum_tokens=64,
        read_price=0.1,
        as_of="2026-11-22",
        source="https://api-docs.deepseek.com/guides/kv_cache",
    ),
    blend(),
)

PROFILES: Mapping[str, CacheProfile] = MappingProxyType({profile.name: profile for profile in _BUILT_IN})
"""The built-in profiles without parameters, by name."""

_WITH_PARAMETERS = re.compile(r"(vllm-checkpoints|llama\.cpp)\((\d{1,6})(?:,\s*(\d{1,6}))?\)")


def as_profile(profile: CacheProfile | str) -> CacheProfile:
    """Return a profile by its name, or the given profile.

    >>> as_profile("vllm-checkpoints(528,16)").checkpoints
    Checkpoints(block=528, unit=16, junction_only=False)

    Raises:
        TypeError: `profile` is neither a CacheProfile nor a str.
        ValueError: No profile has this name, or its parameters do not fit.
    """
    if isinstance(profile, CacheProfile):
        return profile
    if not isinstance(profile, str):
        raise TypeError(f"profile must be a CacheProfile or a str, got {type(profile).__name__}")
    if profile in PROFILES:
        return PROFILES[profile]
    if profile.startswith("blend(") and profile.endswith(")"):
        return blend(profile[6:-1])
    found = _WITH_PARAMETERS.fullmatch(profile)
    if found is not None and found[1] == "vllm-checkpoints":
        return vllm_checkpoints(int(found[2]), None if found[3] is None else int(found[3]))
    if found is not None and found[3] in (None, "0"):
        return llama_cpp(int(found[2]), host_memory=found[3] is None)
    names = ", ".join([*PROFILES, "blend(SEPARATOR)", "vllm-checkpoints(BLOCK[,UNIT])", "llama.cpp(SLOTS[,0])"])
    raise ValueError(f"profile must be one of {names}, got {profile!r}")
