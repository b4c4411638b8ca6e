"""A rank's speed: tokens per second, model FLOPs utilisation of its GPU, peak memory.

B trajectories.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamppo.learner.model.policy import Policy
from streamppo.learner.update import UpdateResult

PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362}
"""Dense bfloat16 operations per second of a GPU, in 10^12, by a part of its name (NVIDIA's data sheets)."""
MIB = 2**20


class ModelSize(NamedTuple):
    """A model's size: parameters in a token's matrix products, layers, width, and the share of trained parameters."""

    multiplied: int
    layers: int
    hidden: int
    trained: float = 1.0


def size_of(policy: Policy) -> ModelSize:
    """Count the policy's parameters; an embedding counts in `multiplied` only if it is also the head."""
    parameters = sum(parameter.numel() for parameter in policy.lm.parameters())
    trained = sum(parameter.numel() for parameter in policy.lm.parameters() if parameter.requires_grad)
    read, head = policy.lm.get_input_embeddings().weight, policy.lm.get_output_embeddings().weight
    config: Any = policy.lm.config.get_text_config()
    multiplied = parameters - (0 if read is head else read.numel())
    return ModelSize(multiplied, config.num_hidden_layers, config.hidden_size, trained / parameters)


def forward_flops(size: ModelSize, width_B: Tensor) -> float:
    """Operations of a forward pass over rows of `width_B` tokens.

        2 * multiplied * width + 2 * layers * hidden * width^2        summed over rows

    The second term is causal attention: width / 2 keys and values for a token on average. As in PaLM's appendix B,
    https://arxiv.org/abs/2204.02311, where a row is half of a full square.
    """
    width_B = width_B.double()
    return float((2 * size.multiplied * width_B + 2 * size.layers * size.hidden * width_B.square()).sum())


def policy_flops(size: ModelSize, updated: UpdateResult) -> float:
    """Operations of the policy's passes, without recomputation; a backward pass costs up to two forward passes.

    One half of a backward pass is for gradients of weights, and only the trained share of the weights has them.
    """
    width_B = updated.batch.on_host.start_B + updated.batch.on_host.length_B
    before = updated.chosen.scored_B.nonzero()[:, 0]
    scoring = forward_flops(size, width_B[before]) if updated.objective.scores_policy else 0.0
    steps = [minibatch.rows for minibatch in updated.minibatches if minibatch.part != "critic"]
    return scoring + (2 + size.trained) * sum(forward_flops(size, width_B[rows]) for rows in steps)


def speed(size: ModelSize, updated: UpdateResult, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    """The speed of an update, whose times are in `metrics`."""
    batch = updated.batch
    width_B, seconds = batch.start_B + batch.length_B, metrics["score_s"] + metrics["train_s"]
    tflops = policy_flops(size, updated) / seconds / ranks / 1e12
    speeds = {
        "learner_tokens_per_s": float(width_B.sum()) / seconds,
        "learner_tflops": tflops,
    }
    return speeds | (_gpu_speed(tflops) if batch.reward_B.is_cuda else {})


def _gpu_speed(tflops: float) -> dict[str, float]:
    """The share of the GPU's peak, if its peak is known, and the peak memory of tensors since the last update."""
    speeds = {"peak_memory_mib": torch.cuda.max_memory_allocated() / MIB}
    torch.cuda.reset_peak_memory_stats()
    name = torch.cuda.get_device_name()
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return speeds if peak is None else speeds | {"mfu": tflops / peak}
