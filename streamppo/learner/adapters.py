"""Low-rank adapters of the policy, by peft: small trained matrices beside weights that stand still.

In a version a weight has the name that it has without adapters, and its adapter is `NAME.lora_A.weight` and
`NAME.lora_B.weight`, as in peft's own files.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from streamppo import durable
from streamppo.config.lora import Lora
from streamppo.errors import ModelError

NAME = "default"
"""peft's name of the only adapter."""


def add(lm: Any, lora: Lora, dtype: str) -> None:
    """Give `lm` adapters in float32, and freeze its weights in `dtype`. Raises `ModelError` if none of them fits.

    B is 0: the policy begins as the model that it was.
    """
    from peft import inject_adapter_in_model

    targets = list(lora.targets) or "all-linear"
    try:
        inject_adapter_in_model(_settings(lora, targets), lm)
    except ValueError as error:
        raise ModelError(f"model.lora.targets ({', '.join(lora.targets)}): {error}") from error
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))


def published(name: str) -> str:
    """The name in a version of what peft calls `name`."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".")


def trained(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by the names that a version has for them."""
    return {published(name): one for name, one in lm.named_parameters() if one.requires_grad}


def frozen(lm: nn.Module) -> dict[str, nn.Parameter]:
    """All other parameters, by the names that a version has for them."""
    return {published(name): one for name, one in lm.named_parameters() if not one.requires_grad}


def write(adapters: Mapping[str, Tensor], lora: Lora, start: str, folder: Path) -> None:
    """Write `adapters` of the model `start` at `folder`, as peft loads them.

    Raises `ModelError` if the disk refuses.
    """
    aside, names = durable.aside(folder), {name.rpartition(".lora_")[0] for name in adapters}
    settings = _settings(lora, sorted({name.rpartition(".")[2] for name in names}))
    settings.base_model_name_or_path, settings.task_type, settings.inference_mode = start, "CAUSAL_LM", True
    with durable.naming(folder, ModelError):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        settings.save_pretrained(aside)
        held = {f"base_model.model.{name}": one.contiguous() for name, one in adapters.items()}
        try:
            save_file(held, aside / "adapter_model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        for path in aside.iterdir():
            durable.flush(path)
        durable.settle(folder)


def _settings(lora: Lora, targets: Any) -> Any:
    from peft import LoraConfig

    # A dropout would give a token another log-prob in every pass.
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
