"""The names under which SGLang is given a push are those of the model's files, experts too, or the model is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamppo.errors import ModelError
from streamppo.rollout.fit import Architecture

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_push_has_the_names_and_the_bytes_of_the_files(family: str, tmp_path: Path) -> None:
    made = MODELS[family]()
    made.save_pretrained(tmp_path)
    architecture = Architecture(made.config)
    architecture.check_names(tmp_path)
    saved = architecture.as_saved({name: one.detach() for name, one in made.named_parameters()})
    files = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.parametrize(
    ("family", "victim"),
    [("llama", "model.norm.weight"), ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight")],
)
def test_a_model_whose_files_have_other_names_or_shapes_is_refused_by_the_tensor(
    family: str, victim: str, tmp_path: Path
) -> None:
    made = MODELS[family]()
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    files = load_file(path)
    save_file({name: one for name, one in files.items() if name != victim} | {f"{victim}_": files[victim]}, path)
    with pytest.raises(ModelError, match=rf"bring {victim} .*no tensor of that name"):
        Architecture(made.config).check_names(tmp_path)
    save_file(files | {victim: files[victim][:-1]}, path)
    with pytest.raises(ModelError, match=rf"bring {victim} \(.*, and its files have \("):
        Architecture(made.config).check_names(tmp_path)
