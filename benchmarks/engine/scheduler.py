"""vLLM's own scheduler and prefix cache without a model, driven by JSON lines. Run by the engine's own Python.

    python scheduler.py MODEL_FOLDER

A line `{"kind": "sliding" or "recurrent" or "full", "block": B, "unit": U or null, "kv_blocks": N}` makes an engine
with an empty cache. A line `{"messages": [...], "exact": true or false}` is a request for one token; `exact` ends its
prompt with the text of the last message. The answer is a line `{"tokens": n, "cached": c}`.

The scheduler believes that each step computes what it planned, so the cached tokens are those of a real server.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")

import torch
from transformers import AutoTokenizer
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LONGEST = 32_768
STEP_TOKENS = 8_192
WINDOW = 512
GROUPS = 3
"""Groups of layers besides the one with full attention."""


class Engine:
    """A scheduler whose steps succeed at once."""

    def __init__(self, model: ModelConfig, kind: str, block: int, unit: int | None, kv_blocks: int) -> None:
        recurrent = kind == "recurrent"
        cache = CacheConfig(
            block_size=block,
            enable_prefix_caching=True,
            prefix_match_unit=unit,
            prefix_cache_retention_interval=0,
            mamba_cache_mode="align" if recurrent else "none",
        )
        scheduling = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        config = VllmConfig(
            scheduler_config=scheduling, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu")
        )
        cache = config.cache_config  # checking the configuration replaces what a CPU or this model would not have
        cache.block_size, cache.prefix_cache_retention_interval, cache.num_gpu_blocks = block, 0, kv_blocks
        if recurrent:
            cache.mamba_cache_mode, cache.mamba_block_size = "align", block
        layout = KVCacheConfig(
            num_blocks=kv_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups(kind, block),
            prefix_cache_retention_interval=0,
        )
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(layout, config)
        layout.hash_block_size = hash_block
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=layout,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=False,
        )
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self._requests = 0

    def ask(self, prompt: list[int]) -> int:
        """Serve a request for one token; return its cached tokens."""
        self._requests += 1
        name = str(self._requests)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        cached = None
        while name in self._scheduler.requests:
            step = self._scheduler.schedule()
            if cached is None and request.prefill_stats is not None:
                cached = request.prefill_stats.num_cached_tokens
            sampled = [[0]] if request.num_computed_tokens >= request.num_tokens else [[]]
            computed = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=sampled)
            self._scheduler.update_from_output(step, computed)
        return cached or 0


def groups(kind: str, block: int) -> list[KVCacheGroupSpec]:
    size: Any = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    found = [KVCacheGroupSpec(["full"], FullAttentionSpec(**size))]
    for number in range(GROUPS):
        if kind == "sliding":
            found.append(KVCacheGroupSpec([f"sliding {number}"], SlidingWindowSpec(**size, sliding_window=WINDOW)))
        elif kind == "recurrent":
            state = MambaSpec(block_size=block, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
            found.append(KVCacheGroupSpec([f"recurrent {number}"], state))
    return found


def main() -> None:
    folder = sys.argv[1]
    init_none_hash(sha256)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=LONGEST
    )
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "kind" in asked:
            engine = Engine(model, asked["kind"], asked["block"], asked["unit"], asked["kv_blocks"])
            continue
        assert engine is not None
        exact = asked["exact"]
        text = tokenizer.apply_chat_template(
            asked["messages"], tokenize=False, add_generation_prompt=not exact, continue_final_message=exact
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        print(json.dumps({"tokens": len(prompt), "cached": engine.ask(prompt)}), flush=True)


if __name__ == "__main__":
    main()
