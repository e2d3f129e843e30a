"""Convert a GGUF file of the llama architecture to a folder that vLLM and SGLang serve. Run by the engine's own Python.

    python convert_gguf.py FOLDER --weights SmolLM2-135M-Instruct.Q4_1.gguf --layers 1

The tokenizer is built from the file's own tokens and merges, and the chat template is the file's. The weights become
bfloat16. Of fewer layers than the file has, the first ones are kept. Needs the package `gguf`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""The name in a folder of Hugging Face of each kind of tensor."""
CONTROL_TOKEN = 3
"""The type of a token that stands for no text."""
PRE_TOKENIZER = "smollm"
"""The only one that this script knows: digits one by one, then byte-level."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="all by default")
    options = parser.parse_args()
    reader = GGUFReader(options.weights)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.pre"] != PRE_TOKENIZER:
        raise SystemExit(f"{options.weights} is neither of the llama architecture nor tokenized as {PRE_TOKENIZER}")
    layers = min(options.layers or facts["llama.block_count"], facts["llama.block_count"])
    weights = dict(converted(reader, facts, layers))
    options.folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, options.folder / "model.safetensors", metadata={"format": "pt"})
    save_json(options.folder / "config.json", config_of(facts, layers, is_tied="lm_head.weight" not in weights))
    save_tokenizer(facts, options.folder)
    print(f"{options.folder}: {sum(tensor.numel() for tensor in weights.values()) / 1e6:.1f} M parameters")


def converted(reader: GGUFReader, facts: dict[str, Any], layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the weights of each tensor of the first layers."""
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        kind, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if kind != "blk":
            name = NAMES[kind]
        else:
            layer, _, kind = rest.partition(".")
            if int(layer) >= layers:
                continue
            name = f"model.layers.{layer}.{NAMES[kind]}"
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = in_halves(values, heads[kind])
        yield f"{name}.weight", torch.from_numpy(values.copy()).to(torch.bfloat16)


def in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows with the halves of each head one after the other; GGUF interleaves them for its rotary embedding."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def config_of(facts: dict[str, Any], layers: int, *, is_tied: bool) -> dict[str, Any]:
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": is_tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def save_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {name: tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in SPECIAL.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        **special,
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    save_json(folder / "tokenizer_config.json", settings)
    save_json(folder / "generation_config.json", {"eos_token_id": facts["tokenizer.ggml.eos_token_id"]})


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
"""The key in the file of each token that the settings name."""


def save_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
