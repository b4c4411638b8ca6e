"""Tiny models of many families, with random weights."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import learner_case as case
import torch
import transformers

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8},
    **{
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
    },
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "head_dim": 4},
}
"""Multi-head latent attention: keys are wider than values."""
SHARED = {"head_dim": 8, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 17}
"""The last layer takes keys and values of an earlier one."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Afmoe": {"head_dim": 8, **MOE},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
    "Exaone4": {},
    "FalconH1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoX": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "Gemma3Text": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "Gemma3nText": {**SHARED, "laurel_rank": 4, "layer_types": ["sliding_attention"]},
    "Gemma4Text": {**SHARED, "global_head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
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
    "Olmoe": MOE,
    "Phi": {},
    "Phi3": {},
    "Phimoe": {"sliding_window": None, **MOE},
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


PICTURES = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    **{
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    **{"image_size": 28, "patch_size": 14, "num_key_value_heads": 2},
}
"""Settings of an encoder of pictures, by the names that families give them."""
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
"""Positions in time, height and width."""
STATES = {name: value for name, value in FAMILIES["Qwen3Next"].items() if name not in MOE}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Gemma3": {"head_dim": 8},
    "Gemma4": {**SHARED, "global_head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "Glm4v": {"head_dim": 8, **AXES},
    "InternVL": {"model_type": "qwen2"},
    "Lfm2Vl": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "Llava": {"model_type": "llama"},
    "Mistral3": {"model_type": "ministral3", "head_dim": 8},
    "Qwen2_5_VL": AXES,
    "Qwen3VL": {"head_dim": 8, **AXES},
    "Qwen3VLMoe": {"head_dim": 8, **AXES, **MOE},
    "Qwen3_5": {**STATES, **AXES},
    "Qwen3_5Moe": {**STATES, **AXES, **MOE},
}
"""Settings of the text models of families that also read pictures."""


NAMES = (*FAMILIES, *MULTIMODAL)


@torch.no_grad()
def make(family: str, folder: Path, *, layers: int = 2, **saving: object) -> None:
    """Write a model with random weights, biases and stored buffers."""
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        **case.SMALL,
        "initializer_range": 0.3,
        "num_hidden_layers": layers,
        **(FAMILIES | MULTIMODAL)[family],
    }
    if "n_layer" in shape:
        shape["n_layer"] = layers
    if "layer_types" in shape:
        shape["layer_types"] = (shape["layer_types"] * layers)[:layers]
    config = multimodal(family, shape) if family in MULTIMODAL else getattr(transformers, f"{family}Config")(**shape)
    lm = new(config)
    stored = lm.state_dict().keys()
    for name, buffer in lm.named_buffers():
        if name in stored:
            buffer.uniform_(0.5, 1.5)
    # New norms are 1 or 0, and new biases 0, which would hide what a computation makes of them.
    for parameter in (parameter for parameter in lm.parameters() if parameter.dim() < 2):
        parameter.add_(0.3 * torch.randn_like(parameter))
    if (bias := getattr(lm.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    lm.save_pretrained(folder, **saving)


def multimodal(family: str, text: dict[str, Any], **named: object) -> Any:
    """The configuration of a model with the settings `text` of its text model, and a small encoder of pictures."""
    config_class: Any = getattr(transformers, f"{family}Config")
    encoder = config_class().vision_config
    pictures = {**PICTURES, "model_type": "gemma4_vision" if encoder is None else encoder.model_type}
    pictures["out_hidden_size"] = text["hidden_size"]
    # transformers writes defaults into the tables that it gets.
    return config_class(text_config=deepcopy(text), vision_config=pictures, **named)


def new(config: Any) -> Any:
    """A whole model with random weights."""
    mapping = transformers.AutoModelForMultimodalLM._model_mapping
    if config.get_text_config() is not config:
        return mapping[type(config)](config)
    return transformers.AutoModelForCausalLM.from_config(config)


def read(folder: Path, **options: object) -> Any:
    """Load the whole model in `folder` with the class that its config.json names."""
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures or ()
    return getattr(transformers, name).from_pretrained(folder, **options).eval()
