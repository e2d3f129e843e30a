"""Drive vLLM's own scheduler without a model, and print how many tokens of each prompt it finds in its cache.

Run this with the Python of vLLM's environment: one JSON object per line on standard input, one list per line on
standard output. Environment: `MODEL`, the folder of any model. A line:

    {"block": 528, "unit": 16, "window": null, "groups": 3, "blocks": 400, "step_tokens": 8192, "retention": 0,
     "requests": [{"pieces": [[7, 1000], [8, 300]], "answer_tokens": 1}]}

A piece [seed, length] stands for tokens that depend on both numbers only, see `tokens_of`. Requests run one by one.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", DO_NOT_TRACK="1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LONGEST = 32_768
ANSWER_TOKEN = 7


def tokens_of(pieces):
    """Return the tokens of a prompt: 100 to 29,099, the same on both sides of the comparison."""
    return [(seed * 100_003 + place * 31) % 29_000 + 100 for seed, length in pieces for place in range(length)]


class SchedulerRun:
    """One engine of the workload's layout, with an empty cache."""

    def __init__(self, model: ModelConfig, workload) -> None:
        block, window, retention = workload["block"], workload["window"], workload["retention"]
        recurrent = window is None
        scheduling = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=workload["step_tokens"],
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        caching = CacheConfig(
            block_size=block,
            enable_prefix_caching=True,
            prefix_match_unit=workload["unit"],
            prefix_cache_retention_interval=retention,
            mamba_cache_mode="align" if recurrent else "none",
        )
        config = VllmConfig(
            scheduler_config=scheduling, model_config=model, cache_config=caching, device_config=DeviceConfig("cpu")
        )
        # The configuration adapts these fields to the model, whose layers are not the ones of the workload.
        caching.block_size, caching.prefix_cache_retention_interval = block, retention
        caching.num_gpu_blocks = workload["blocks"]
        if recurrent:
            caching.mamba_cache_mode, caching.mamba_block_size = "align", block
        attention = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**attention))]
        for number in range(workload["groups"]):
            if recurrent:
                spec = MambaSpec(block_size=block, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
            else:
                spec = SlidingWindowSpec(**attention, sliding_window=window)
            groups.append(KVCacheGroupSpec([f"sparse {number}"], spec))
        layout = KVCacheConfig(
            num_blocks=workload["blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention,
        )
        scheduler_block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(layout, config)
        layout.hash_block_size = hash_block
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_block, sha256)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=layout,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=False,
        )

    def hit(self, name: str, tokens: list[int], answer_tokens: int) -> int:
        """Serve one request to its end, and return the tokens that were found."""
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        hit = None
        while name in self._scheduler.requests:
            step = self._scheduler.schedule()
            if not step.num_scheduled_tokens:
                raise RuntimeError(f"the cache is too small for a prompt of {len(tokens)} tokens")
            if hit is None:
                hit = request.prefill_stats.num_cached_tokens
            is_computed = request.num_computed_tokens >= request.num_tokens
            sampled = [[ANSWER_TOKEN]] if is_computed else [[]]
            output = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=sampled)
            self._scheduler.update_from_output(step, output)
        return hit


def main() -> None:
    kv_cache_utils.init_none_hash(sha256)
    folder = os.environ["MODEL"]
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=LONGEST
    )
    for line in sys.stdin:
        workload = json.loads(line)
        run = SchedulerRun(model, workload)
        hits = [
            run.hit(str(number), tokens_of(request["pieces"]), request["answer_tokens"])
            for number, request in enumerate(workload["requests"])
        ]
        print(json.dumps(hits), flush=True)


if __name__ == "__main__":
    main()
