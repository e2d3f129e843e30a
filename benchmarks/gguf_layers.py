"""A GGUF model cut to its first layers: the same tokenizer and chat template, at a fraction of the cost.

What an engine caches depends on tokens only, not on weights, so tests of token counts use one layer of a real model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

__all__ = ["first_layers"]


def first_layers(source: Path, target: Path, layers: int = 1) -> Path:
    """Write the first layers of the model `source` to `target`, and return `target`. Its answers mean nothing."""
    model = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, model.fields["general.architecture"].contents())
    for name, field in model.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":  # the writer has written these
            continue
        value: Any = layers if name.endswith(".block_count") else field.contents()
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, value, field.types[0])
        elif value:
            writer.add_array(name, value)
    for tensor in model.tensors:
        kind, _, rest = tensor.name.partition(".")
        if kind != "blk" or int(rest.partition(".")[0]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
