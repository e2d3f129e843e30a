"""Drive SGLang's own prefix cache without a model, and print how many tokens of each prompt it finds.

Run this with the Python of SGLang's environment: one JSON object per line on standard input, one list per line on
standard output. No GPU is needed. A line:

    {"capacity": 30000, "policy": "priority",
     "requests": [{"pieces": [[7, 1000], [8, 300]], "salt": null, "priority": 5, "answer_tokens": 1}]}

A piece [seed, length] stands for tokens that depend on the seed and their place only, see `tokens_of`. Requests run one
by one, each as the scheduler runs it: match, make room, insert the prompt, decode, insert prompt and answer, and the
prompt again with one priority more.
"""

from __future__ import annotations

import json
import os
import sys
from array import array

os.environ.update(CUDA_VISIBLE_DEVICES="", SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

ANSWER_TOKEN = 7


def tokens_of(pieces):
    """Return the tokens of a prompt: from 100 on, the same on both sides of the comparison."""
    return [seed * 100_003 + place + 100 for seed, length in pieces for place in range(length)]


class RadixRun:
    """One cache as the server builds it for a model with full attention."""

    def __init__(self, workload) -> None:
        self.pool = TokenToKVPoolAllocator(workload["capacity"], torch.bfloat16, "cpu", None, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=1,
            eviction_policy=workload["policy"],
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)

    def hit(self, request) -> int:
        prompt, salt, priority = tokens_of(request["pieces"]), request["salt"], request["priority"] or 0
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(prompt[:-1], salt)))
        found = match.device_prefix_len
        lock = self.cache.lock(match.last_device_node)
        indices = torch.cat([self.cache.path_device_indices(match.last_device_node), self.taken(len(prompt) - found)])
        lock = self.insert(prompt, salt, priority, indices, found, lock)
        answer = request["answer_tokens"] - 1  # the last token is never fed back
        if answer > 0:
            for _ in range(answer):
                indices = torch.cat([indices, self.taken(1)])
            whole = [*prompt, *[ANSWER_TOKEN] * answer]
            lock = self.insert(whole, salt, priority, indices, len(prompt), lock)
            key = self.key(prompt, salt)
            values = indices[: len(prompt)].clone()
            again = InsertParams(
                key=key, value=values, priority=priority + 1, prev_prefix_len=len(prompt), inserted_len=len(prompt)
            )
            self.cache.insert(again)
        self.cache.unlock(lock)
        return found

    def insert(self, tokens, salt, priority, indices, before, lock):
        key = self.key(tokens, salt)
        values = indices[: len(tokens)].clone()
        result = self.cache.insert(InsertParams(key=key, value=values, priority=priority, prev_prefix_len=before))
        new_lock = self.cache.lock(result.last_device_node)
        self.cache.unlock(lock)
        return new_lock

    def taken(self, count: int) -> torch.Tensor:
        shortfall = count - self.pool.available_size()
        if shortfall > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=shortfall))
        taken = self.pool.alloc(count)
        if taken is None:
            raise MemoryError(f"{count} tokens do not fit")
        return taken

    def key(self, tokens, salt) -> RadixKey:
        return RadixKey(array("q", tokens), cache_salt=salt)


for line in sys.stdin:
    workload = json.loads(line)
    run = RadixRun(workload)
    print(json.dumps([run.hit(request) for request in workload["requests"]]), flush=True)
