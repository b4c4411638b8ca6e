"""Tiny models of many families, with random weights."""

from pathlib import Path
from typing import Any

import learner_case as case
import torch
import transformers

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
    "Exaone4": {},
    "FalconH1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoX": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "Gemma3Text": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "Glm4": {"head_dim": 8},
    "GptOss": {"head_dim": 8, **MOE},
    "Granite": {"logits_scaling": 8.0},
    "GraniteMoe": {"logits_scaling": 8.0, **MOE},
    "Llama": {},
    "Mistral": {},
    "Mixtral": MOE,
    "Nemotron": {},
    "Olmo2": {},
    "Olmo3": {},
    "Phi": {},
    "Phi3": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, **MOE},
    "Qwen3Next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
        **MOE,
    },
    "SeedOss": {"head_dim": 8},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
}


NAMES = tuple(FAMILIES)


def make(family: str, folder: Path, *, layers: int = 2, **saving: object) -> None:
    """Write a model with random weights and biases."""
    torch.manual_seed(5)
    shape: dict[str, Any] = {**case.SMALL, "num_hidden_layers": layers, **FAMILIES[family]}
    if "n_layer" in shape:
        shape["n_layer"] = layers
    if "layer_types" in shape:
        shape["layer_types"] = (shape["layer_types"] * layers)[:layers]
    config = getattr(transformers, f"{family}Config")(initializer_range=0.3, **shape)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    if (bias := getattr(lm.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    lm.save_pretrained(folder, **saving)
