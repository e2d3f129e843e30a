"""The simulated cache of any `CacheProfile`, and one request through it."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.caches.checkpoints import CheckpointCache, CheckpointLayout
from warmprefix_tools.caches.hosted import HostedCache
from warmprefix_tools.caches.kv_blocks import PrefixCache
from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt, SimulatedCache
from warmprefix_tools.caches.radix_tree import RadixTreeCache
from warmprefix_tools.caches.slots import SlotCache

__all__ = ["is_hosted", "serve", "simulated_cache"]


def is_hosted(profile: CacheProfile) -> bool:
    """Return True if the profile is one of a hosted API, whose capacity is not published."""
    return profile.marks is not None or profile.lifetime is not None or profile.minimum_tokens > 1


def simulated_cache(
    profile: CacheProfile,
    *,
    kv_blocks: int = 4096,
    block_size: int = 16,
    window: int | None = None,
    sparse_groups: int = 3,
    step_tokens: int = 8192,
) -> SimulatedCache:
    """Return an empty cache that follows the rules of a profile.

    Args:
        profile: What the cache can do.
        kv_blocks: Blocks of an engine's pool, one of which stores nothing, for all its groups of layers together.
        block_size: Tokens per KV block of full attention, if the profile's unit is 1. With checkpoints, the block is
            the profile's.
        window: Tokens that sliding-window layers see; None for recurrent layers. For profiles with checkpoints.
        sparse_groups: Groups of such layers.
        step_tokens: Most tokens of one prefill step. For profiles with checkpoints.

    Raises:
        ValueError: A value is out of range.
    """
    if profile.slots is not None:
        return SlotCache(profile.slots, host_memory=profile.host_memory)
    if is_hosted(profile):
        return HostedCache(profile)
    if profile.eviction == "priority":
        return RadixTreeCache((kv_blocks - 1) * block_size)
    if profile.checkpoints is None:
        return PrefixCache(kv_blocks, block_size if profile.unit == 1 else profile.unit)
    layout = CheckpointLayout(profile.checkpoints, window, sparse_groups, step_tokens)
    return CheckpointCache(kv_blocks, layout)


def serve(cache: SimulatedCache, prompt: MarkedPrompt, now: float = 0.0, answer: Sequence[int] = ()) -> CacheUse:
    """Send one request through a cache, to its end, and return what the cache had of the prompt.

    The last token of `answer` is ignored: its KV is never computed.

    >>> from warmprefix.cache_profiles import as_profile
    >>> cache = simulated_cache(as_profile("vllm-checkpoints(128)"))
    >>> [serve(cache, MarkedPrompt([*range(1000), *range(end, end + 300)])).read for end in (2000, 3000, 4000)]
    [0, 0, 896]

    Raises:
        ValueError: The prompt and the answer do not fit into the cache, or its marks are refused.
    """
    admission = cache.admit(prompt, now, room_for=max(len(answer) - 1, 0))
    if admission is None:
        raise ValueError(f"prompt must fit into the cache, got one of {len(prompt.tokens)} tokens")
    admission.store(now)
    for token_id in answer[:-1]:
        admission.append(token_id)
    admission.free()
    return admission.use
