"""Small models of the embedded engine's families, with random biases and norms."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def disturbed(make: Callable[[], Any], seed: int) -> Any:
    """The model of `make` with `seed`, with noise added to its biases and norms."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def reference(model: Any, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs by a plain transformers forward of one unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
    with torch.no_grad():
        logp = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()
