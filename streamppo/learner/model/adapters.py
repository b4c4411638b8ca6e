"""Low-rank adapters of the policy, by peft: small trained matrices on frozen weights.

In a version a weight has the same name as without adapters; its adapter is `NAME.lora_A.weight` and
`NAME.lora_B.weight`, as in peft's own files.
"""

import shutil
from collections.abc import Iterator, Mapping
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
    """Add float32 adapters to `lm`, and freeze its weights in `dtype`. Raises `ModelError` if no target is found.

    B starts at 0, so the policy starts equal to the model.
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


def published_name(name: str) -> str:
    """The name in a version of peft's parameter `name`."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".")


def adapter_parameters(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a version, by their names in it: those of adapters, or without adapters all.

    transformers freezes a few of some models, such as the bias of a router, which an engine needs as well.
    """
    return {name: parameter for name, parameter, is_pushed in _named(lm) if is_pushed}


def frozen(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that adapters leave unchanged, by their names in a version; none without adapters."""
    return {name: parameter for name, parameter, is_pushed in _named(lm) if not is_pushed}


def _named(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    named = dict(lm.named_parameters())
    has_adapters = any(f".{NAME}." in name for name in named)
    for name, parameter in named.items():
        yield published_name(name), parameter, parameter.requires_grad or not has_adapters


def write(adapters: Mapping[str, Tensor], lora: Lora, start: str, folder: Path) -> None:
    """Write `adapters` of the model `start` to `folder`, in peft's format.

    Raises `ModelError` if it cannot be written.
    """
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

    # With dropout a token's log-prob would differ in every pass.
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
