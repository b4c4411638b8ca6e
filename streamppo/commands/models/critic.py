"""The critic of a checkpoint, for the value of one context; without a group of ranks."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamppo.commands.models.weights import Weights
from streamppo.config.sections import Config
from streamppo.learner.checkpoint import distcp
from streamppo.learner.model import hf_files
from streamppo.types import Ints


@torch.no_grad()
def value(config: Config, start: str, path: Path, policy: Weights, context: Ints) -> float:
    """The value after the tokens `context`, by the critic in the checkpoint at `path`, whose `policy` was read.

    The run began with the model `start`. The value is computed in float32. Raises `CheckpointError` and `ModelError`.
    """
    chosen = config.algorithm.critic.model
    if chosen == "head":
        lm = hf_files.read(start, "eager")
        for name, parameter in lm.named_parameters():
            parameter.copy_(policy.tensors[name])
        transformer: Any = lm.base_model
    else:
        transformer = hf_files.critic(chosen, start, "eager").transformer.float()
    width = transformer.config.get_text_config().hidden_size
    saved = {"value_head.weight": torch.empty(1, width), "value_head.bias": torch.empty(1)}
    parameters = {} if chosen == "head" else {f"critic.{name}": one for name, one in transformer.named_parameters()}
    saved |= {name: torch.empty(one.shape) for name, one in parameters.items()}
    state: dict[str, dict[str, Tensor]] = {"policy": saved}
    with warnings.catch_warnings():
        # It warns about a load without a process group, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        distcp.load(state, path, alone=True)
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    hidden_1LD = transformer(input_ids=torch.from_numpy(context)[None].long(), use_cache=False).last_hidden_state
    return float(hidden_1LD[0, -1] @ saved["value_head.weight"][0] + saved["value_head.bias"][0])
