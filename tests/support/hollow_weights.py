"""Weights files of any size that are all zeros and sparse on disk, with a configuration's names and shapes."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def write(folder: Path, config: "PretrainedConfig") -> None:
    """Write config.json and model.safetensors in bfloat16 for a causal LM of `config`."""
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    tensors = revert_weight_conversion(lm, dict(lm.named_parameters()))
    header, end = dict[str, object](__metadata__={"format": "pt"}), 0
    for name, one in tensors.items():
        begin, end = end, end + 2 * one.numel()
        header[name] = {"dtype": "BF16", "shape": list(one.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
