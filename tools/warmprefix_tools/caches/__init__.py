"""Simulated prefix caches, one for each kind of `CacheProfile`, without a clock, a socket or a model.

    cache = simulated_cache(as_profile("anthropic"))
    use = serve(cache, MarkedPrompt(tokens, part_ends=(1200, 1500), marks=(Mark(part=0),)), now=0.0)
    use.read, use.written, use.uncached

A prompt is a sequence of token ids; `UnitTokens` makes ids for blocks of which only the lengths matter.
"""

from __future__ import annotations

from warmprefix_tools.caches.checkpoints import CheckpointCache, CheckpointLayout
from warmprefix_tools.caches.hosted import HostedCache, MarksRefusedError
from warmprefix_tools.caches.kv_blocks import KvSequence, PrefixCache, block_hashes
from warmprefix_tools.caches.prompts import Admission, CacheUse, Mark, MarkedPrompt, SimulatedCache, UnitTokens
from warmprefix_tools.caches.radix_tree import RadixTreeCache
from warmprefix_tools.caches.simulated import is_hosted, serve, simulated_cache
from warmprefix_tools.caches.slots import SlotCache

__all__ = [
    "Admission",
    "CacheUse",
    "CheckpointCache",
    "CheckpointLayout",
    "HostedCache",
    "KvSequence",
    "Mark",
    "MarkedPrompt",
    "MarksRefusedError",
    "PrefixCache",
    "RadixTreeCache",
    "SimulatedCache",
    "SlotCache",
    "UnitTokens",
    "block_hashes",
    "is_hosted",
    "serve",
    "simulated_cache",
]
