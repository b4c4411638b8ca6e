"""The metrics of an update, and a rank's speed. B trajectories, T completion tokens (padded)."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamppo.learner.model.policy import Policy
from streamppo.learner.objective.metrics import batch_metrics, distances, dropped_shares, first_logprobs, step_metrics
from streamppo.learner.update import Updater, UpdateResult
from streamppo.process import phase

PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362}
"""A GPU's dense bfloat16 operations per second, in 10^12, by a part of its name (from NVIDIA's data sheets)."""
MIB = 2**20


@phase("metrics")
def update_metrics(updater: Updater, updated: UpdateResult) -> dict[str, float]:
    """The metrics of the update `updated` by `updater`; ranks differ only in times. A collective.

    Call this before `Updater.adapt`: the metrics include the coefficients that the update used.
    """
    batch, targets, minibatches = updated.batch, updated.targets, updated.minibatches
    scored, passed_B = targets.scored, updated.active.scored_B.to(updater.device)
    if not updated.objective.scores_policy:
        first_BT, passed_B = first_logprobs(minibatches, batch.mask_BT, updater.group)
        scored = scored._replace(logprobs_BT=first_BT)
    steps = step_metrics(minibatches, targets.trained_BT, updater.group)
    if all(minibatch.part == "critic" for minibatch in minibatches) and targets.trained_BT.any():
        # In warm-up, only the critic makes steps. The policy makes one pass, without gradient, before them.
        steps["entropy"] = targets.scored.entropy_BT[targets.trained_BT].double().mean().item()
    metrics = {
        **batch_metrics(batch, scored, passed_B, targets.estimate, targets.trained_BT, updated.divergences),
        **steps,
        **dropped_shares(updater.objective.rules, minibatches, batch, updater.group),
        "tokens_idle": float(batch.mask_BT[~updated.active.trained_B.to(updater.device)].sum()),
        **distances(batch, targets, scored, passed_B),
        **updater.policy.routers.metrics(updater.device),
    }
    if targets.reference_BT is not None:
        metrics["kl_beta"] = updater.beta
    if targets.chosen_BT is not None:
        metrics["singled_out"] = float(targets.chosen_BT.sum()) / max(1.0, float(targets.trained_BT.sum()))
    if updater.config.algorithm.entropy_control.target:
        metrics["entropy_weight"] = updater.bonus.weight
    if targets.explained is not None:
        metrics["outcomes_explained"] = targets.explained
    now, rate = time.perf_counter(), updater.optimizer.param_groups[0]["lr"]
    return metrics | {"lr": rate, "score_s": updated.scored - updated.start, "train_s": now - updated.scored}


class ModelSize(NamedTuple):
    """A model's size: parameters in a token's matrix products, layers, width, and the share that is trained."""

    multiplied: int
    layers: int
    hidden: int
    trained: float = 1.0


def size_of(policy: Policy) -> ModelSize:
    """Count the policy's parameters; `multiplied` includes an embedding only if it is also the head."""
    parameters = sum(parameter.numel() for parameter in policy.lm.parameters())
    trained = sum(parameter.numel() for parameter in policy.lm.parameters() if parameter.requires_grad)
    embedding, head = policy.lm.get_input_embeddings().weight, policy.lm.get_output_embeddings().weight
    config: Any = policy.lm.config.get_text_config()
    multiplied = parameters - (0 if embedding is head else embedding.numel())
    return ModelSize(multiplied, config.num_hidden_layers, config.hidden_size, trained / parameters)


def forward_flops(size: ModelSize, width_B: Tensor) -> float:
    """The operations of a forward pass over rows of `width_B` tokens.

        2 * multiplied * width + 2 * layers * hidden * width^2        summed over rows

    The second term is causal attention, half of the full square in appendix B of PaLM,
    https://arxiv.org/abs/2204.02311.
    """
    width_B = width_B.double()
    return float((2 * size.multiplied * width_B + 2 * size.layers * size.hidden * width_B.square()).sum())


def policy_flops(size: ModelSize, updated: UpdateResult) -> float:
    """The operations of the policy's passes, without recomputation.

    A backward pass costs up to two forward passes; half of it computes gradients of weights, for trained weights only.
    """
    width_B = updated.batch.on_host.start_B + updated.batch.on_host.length_B
    scored = updated.active.scored_B.nonzero()[:, 0]
    scoring = forward_flops(size, width_B[scored]) if updated.objective.scores_policy else 0.0
    steps = [minibatch.rows for minibatch in updated.minibatches if minibatch.part != "critic"]
    return scoring + (2 + size.trained) * sum(forward_flops(size, width_B[rows]) for rows in steps)


def speed(size: ModelSize, updated: UpdateResult, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    """The speed of an update, from the times in its `metrics`."""
    batch = updated.batch
    width_B, seconds = batch.start_B + batch.length_B, metrics["score_s"] + metrics["train_s"]
    tflops = policy_flops(size, updated) / seconds / ranks / 1e12
    speeds = {"learner_tokens_per_s": float(width_B.sum()) / seconds, "learner_tflops": tflops}
    return speeds | (_gpu_speed(tflops) if batch.reward_B.is_cuda else {})


def _gpu_speed(tflops: float) -> dict[str, float]:
    speeds = {"peak_memory_mib": torch.cuda.max_memory_allocated() / MIB}
    torch.cuda.reset_peak_memory_stats()
    name = torch.cuda.get_device_name()
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return speeds if peak is None else speeds | {"mfu": tflops / peak}
