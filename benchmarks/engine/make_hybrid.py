"""Make the folder of a model with sliding windows or recurrent layers, without weights. Run by the engine's own Python.

    python make_hybrid.py FOLDER --like MODEL_FOLDER --kind sliding

vLLM serves it with `--load-format dummy`. It has the tokenizer and the chat template of the other model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from transformers import Gemma3TextConfig, Qwen3NextConfig

LONGEST = 32_768
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": LONGEST,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--kind", choices=("sliding", "recurrent"), required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(options.like / name, options.folder / name)
    vocabulary = json.loads((options.like / "config.json").read_text())["vocab_size"]
    if options.kind == "sliding":
        config = Gemma3TextConfig(
            **COMMON,
            **ATTENTION,
            vocab_size=vocabulary,
            num_hidden_layers=6,
            sliding_window=512,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        )
        config.architectures = ["Gemma3ForCausalLM"]
    else:
        config = Qwen3NextConfig(
            **COMMON,
            **ATTENTION,
            vocab_size=vocabulary,
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            decoder_sparse_step=1,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        )
        config.architectures = ["Qwen3NextForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
