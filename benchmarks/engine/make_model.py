"""Make a model that vLLM serves: a Qwen3 of any shape, with random weights. Run by the engine's own Python.

    python make_model.py FOLDER --layers 1 --hidden 1024 --inter 4096 --heads 4 --kv-heads 1 --head-dim 64

What it answers is noise; what its prompts cost is not, for that depends on the shape alone. Nothing is downloaded: the
tokenizer is trained here, on text that comes with every CPython.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

SPECIAL = END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 8_192
LONGEST = 65_536
"""Tokens of a prompt that it has positions for."""
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("layers", "hidden", "inter", "heads", "kv-heads", "head-dim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer()
    save_tokenizer(tokenizer, options.folder)
    end = tokenizer.token_to_id(END_OF_MESSAGE)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.inter,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.folder)
    GenerationConfig(eos_token_id=end, pad_token_id=0).save_pretrained(options.folder)
    print(f"{options.folder}: {sum(weights.numel() for weights in model.parameters()) / 1e6:.1f} M parameters")


def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE, as most models have it, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def texts() -> Iterator[str]:
    """Python's reference manual as `help()` shows it, and some of the library's sources."""
    for _, text in sorted(topics.items()):
        yield text
    for source in sorted(Path(json.__file__).parent.parent.glob("[a-z]*.py")):
        yield source.read_text(encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONGEST,
        "bos_token": None,
        "eos_token": END_OF_MESSAGE,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE.read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())


if __name__ == "__main__":
    main()
