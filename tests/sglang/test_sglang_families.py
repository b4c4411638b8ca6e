"""The real SGLang with models whose files have more than a push: encoders of pictures, and buffers of routers."""

from pathlib import Path
from typing import Any

import model_families
import pytest
import sglang_case as case
import torch
import transformers

from streamppo.errors import WeightsError
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights.models import loading

pytest_plugins = ["sglang_case"]
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
TEXT: dict[str, Any] = {**case.SHAPE, "head_dim": 16, "eos_token_id": None}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
ROUTER = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
FAMILIES = {
    "Gemma3": lambda: model_families.multimodal("Gemma3", TEXT),
    "Mistral3": lambda: model_families.multimodal(
        "Mistral3", {**TEXT, "model_type": "mistral"}, tie_word_embeddings=False
    ),
    "Qwen2_5_VL": lambda: model_families.multimodal("Qwen2_5_VL", {**TEXT, "rope_parameters": AXES}),
    "Qwen3VL": lambda: model_families.multimodal("Qwen3VL", {**TEXT, "rope_parameters": AXES}),
    "Glm4Moe": lambda: transformers.Glm4MoeConfig(**TEXT, **ROUTER, num_experts_per_tok=2, n_group=1, topk_group=1),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_transformers_computes_it_and_a_tensor_that_is_not_taken_is_noticed(
    run: case.Run, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = model_families.new(FAMILIES[family]()).eval()
    for name, buffer in made.named_buffers():
        if name in made.state_dict():
            buffer.uniform_(-0.5, 0.5)
    folder = case.save(made, tmp_path)
    trained = loading.load(folder).model
    architecture = Architecture(trained.config)
    engine = run(case.engine(folder, case.tensors(trained)))
    setting = case.Setting(engine, made, folder, run)
    try:
        case.assert_serves(setting, made, 0)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        run(engine.update_weights(1, case.tensors(trained)))
        case.assert_serves(setting, trained, 1)
        stage, left_out = engine._session.carrier.stage, "layers.1.mlp"

        async def without_a_layer(tensors: Any) -> None:
            await stage({name: one for name, one in tensors.items() if left_out not in name})

        monkeypatch.setattr(engine._session.carrier, "stage", without_a_layer)
        other = {name: tensor + 0.01 for name, tensor in case.tensors(trained).items()}
        assert any(left_out in name for name in architecture.as_saved(other))
        with pytest.raises(WeightsError, match=rf"SGLang has not loaded \S*{left_out}"):
            run(engine.update_weights(2, other))
        case.assert_serves(setting, trained, 1)
    finally:
        run(engine.stop())
