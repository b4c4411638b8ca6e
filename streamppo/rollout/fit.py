"""What every engine asks before it takes a prompt or a push: does it fit the model?"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.types import Ints


def expected_shapes(config: Any) -> dict[str, torch.Size]:
    """Name and shape of every tensor of the model, tied ones once: what a push has to hold."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def check_fit(expected: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Raises `WeightsError` if `tensors` are not exactly those that are `expected`."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise WeightsError(f"the push has no tensor {missing[0]!r} ({len(missing)} are missing)")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise WeightsError(f"the push has tensors that this model does not know: {', '.join(unknown[:3])}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise WeightsError(f"{name} has shape {tuple(tensors[name].shape)}, the model wants {tuple(shape)}")


def check_prompt(prompt: Ints, longest: int, vocabulary: int) -> None:
    """Raises `ModelError` for a prompt that would end the engine, and with it the completions of others."""
    if not 1 <= len(prompt) <= longest:
        raise ModelError(f"a prompt of {len(prompt)} tokens does not fit: it needs 1 to {longest}")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ModelError(f"a prompt holds a token that is not one of the model's {vocabulary}")
