"""Low-rank adapters of the policy, by peft: small trained matrices on frozen weights.

In a version, each weight has the same name as without adapters. The adapter of weight NAME is `NAME.lora_A.weight` and
`NAME.lora_B.weight`, as in peft's files.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from streamppo import durable
from streamppo.config.model import Lora
from streamppo.errors import ModelError

NAME = "default"
"""peft's name of the only adapter."""
EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The names of an expert's layers in model files."""
ROUTERS = ("gate", "router")
REFUSED = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj", "conv1d"))
"""The modules, by model_type, for which peft refuses adapters, because their kernels read the weights themselves."""


def add(lm: Any, lora: Lora, dtype: str) -> None:
    """Add float32 adapters to `lm`, and freeze its weights in `dtype`. Raises `ModelError` for unusable targets."""
    from peft import inject_adapter_in_model

    name = f"model.lora.targets ({', '.join(lora.targets)})"
    try:
        with warnings.catch_warnings():
            # peft warns of experts without adapters, and of layers that the check below refuses.
            warnings.filterwarnings("ignore", message="The following .*_pattern|fan_in_fan_out is set")
            inject_adapter_in_model(_settings(lora, lora.targets or linear_layers(lm)), lm)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    inside = set(lm.base_model.modules())
    for module_name, module in lm.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        if module not in inside:
            raise ModelError(
                f"{name}: {module_name} is not in the transformer, and an adapter there would not be trained: name "
                "layers of the transformer"
            )
        if not isinstance(module.base_layer, nn.Linear):
            kind = type(module.base_layer).__name__
            raise ModelError(
                f"{name}: {module_name} is a {kind}, and only linear layers may have adapters: name others"
            )
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))


def linear_layers(lm: Any) -> list[str]:
    """The names of the transformer's linear layers, except routers of experts and modules that peft refuses.

    In a mixture of experts, layers named like an expert's layer are left out, because peft would match the experts.
    """
    has_experts = any(name.endswith(".experts") for name, _ in lm.named_modules())
    excluded = {*ROUTERS, *(EXPERTS if has_experts else ()), *REFUSED.get(lm.config.model_type, ())}
    # Not the head, and not the projector of a multimodal model.
    inside = set(lm.base_model.modules())
    return [
        name
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module in inside and name.rpartition(".")[2] not in excluded
    ]


def published_name(name: str) -> str:
    """The name that peft's parameter `name` has in a version."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".")


def adapter_parameters(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The pushed parameters by their names in a version: the adapters' or, without adapters, all parameters."""
    return {name: parameter for name, parameter, is_pushed in _version_parameters(lm) if is_pushed}


def frozen(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that adapters leave unchanged, by their names in a version; empty without adapters."""
    return {name: parameter for name, parameter, is_pushed in _version_parameters(lm) if not is_pushed}


def _version_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    parameters = dict(lm.named_parameters())
    has_adapters = any(f".{NAME}." in name for name in parameters)
    for name, parameter in parameters.items():
        yield published_name(name), parameter, parameter.requires_grad or not has_adapters


def write(adapters: Mapping[str, Tensor], lora: Lora, start: str, folder: Path) -> None:
    """Write `adapters` of the model `start` to `folder`, in peft's format. Raises `ModelError` if it cannot."""
    aside, names = durable.aside(folder), {name.rpartition(".lora_")[0] for name in adapters}
    settings = _settings(lora, sorted({name.rpartition(".")[2] for name in names}))
    settings.base_model_name_or_path, settings.task_type, settings.inference_mode = start, "CAUSAL_LM", True
    with durable.naming(folder, ModelError):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        settings.save_pretrained(aside)
        by_file_name = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapters.items()}
        try:
            save_file(by_file_name, aside / "adapter_model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        for path in aside.iterdir():
            durable.flush(path)
        durable.settle(folder)


def _settings(lora: Lora, targets: Any) -> Any:
    from peft import LoraConfig

    # Dropout would give a token another log-prob in every pass.
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
