"""Estimates costs of stages on GPUs from the operations and bytes of a model and the rates of a GPU.

No run on more than one GPU has been compared with these estimates (docs/status.md). The share of a data sheet's rate
that a stage reaches was measured on one H200 with a model of 0.5 billion parameters.
"""

import math
from typing import NamedTuple

from streamppo.commands.checks.memory_estimate import QUEUE_BYTES_PER_S, TOKEN_BYTES
from streamppo.commands.plan.workload import StageCosts
from streamppo.config.sections import Config
from streamppo.learner.memory import ModelSizes


class GpuType(NamedTuple):
    """A data sheet: dense bfloat16 TFLOP/s, GiB and TB/s of memory, and GB/s in one direction within a node."""

    tflops: float
    gib: float
    memory_tb_s: float
    link_gb_s: float


GPUS = {
    "a100": GpuType(312, 80, 2.0, 300),
    "h100": GpuType(989, 80, 3.35, 450),
    "h200": GpuType(989, 141, 4.8, 450),
    "b200": GpuType(2250, 180, 8.0, 900),
    "l40s": GpuType(362, 48, 0.86, 32),
}
NETWORK_GB_S = 50.0
"""GB/s from a GPU to another node, which is 400 Gbit/s."""
NODE = 8
TRAINING_SHARE = {0.5e9: 0.14, 8e9: 0.35}
"""Share of the TFLOP/s that an update reaches, by parameters. The first share is measured, the second is typical."""
PREFILL_SHARE, READING_SHARE = 0.4, 0.6
"""Share of the TFLOP/s that a prefill reaches, and share of the TB/s that a decoding step reaches."""
LAUNCH_S = 0.004
"""Seconds that a decoding step or prefill takes in addition to reading and multiplying."""
OPTIMIZER_BYTES = 28
"""Bytes that a step of AdamW in float32 reads and writes for each trained parameter."""
SNAPSHOT_GB_S, PACKED_GB_S, PULLED_GB_S = 25.0, 2.5, 10.0
"""GB/s of a snapshot into pinned memory, of packing and hashing a snapshot, and of a swap."""
CALL_S, STORED_S, PUBLISH_S = 0.002, 1e-4, 0.02
"""Seconds of the queue for a call, for a trajectory in a call (without its bytes), and for a version."""
SAMPLE_S = 3e-4
"""Seconds of an actor for a trajectory, except for the reward."""


def costs(
    config: Config, model: ModelSizes, gpu: GpuType, prompt_tokens: float, length: float, reward_s: float
) -> StageCosts:
    """Estimate the costs if prompts have `prompt_tokens` and completions `length` tokens on average."""
    engine_gpus, flops = max(1.0, config.rollout.gpus), gpu.tflops * 1e12
    reads = gpu.memory_tb_s * 1e12 * READING_SHARE * engine_gpus
    multiplies = flops * PREFILL_SHARE * engine_gpus
    pushed = model.trained * model.element
    passes_s = _passes(config, model, prompt_tokens + length) / (flops * training_share(model))
    return StageCosts(
        step_s=LAUNCH_S + model.parameters * model.element / reads,
        row_s=2 * model.active / multiplies,
        cached_s=model.cache_per_token / reads,
        prefill_s=LAUNCH_S,
        prompt_s=2 * model.active * prompt_tokens / multiplies,
        swap_s=pushed / (PULLED_GB_S * 1e9),
        sample_s=SAMPLE_S,
        reward_s=reward_s,
        call_s=CALL_S,
        stored_s=STORED_S + TOKEN_BYTES * length / QUEUE_BYTES_PER_S / config.queue.shards,
        publish_s=PUBLISH_S,
        update_s=_step_s(config, model, gpu) + pushed / (SNAPSHOT_GB_S * 1e9) / config.learner.ranks,
        token_s=max(passes_s + _shared_rows_s(config, model, gpu), _gathers_s(config, model, gpu)),
        sync_s=0.0,
        push_s=pushed / (PACKED_GB_S * 1e9) / config.learner.ranks,
    )


def training_share(model: ModelSizes) -> float:
    """Return the share of a GPU's TFLOP/s that an update reaches, interpolated in the logarithm of the parameters."""
    (small, low), (large, high) = TRAINING_SHARE.items()
    place = math.log(max(1, model.active) / small) / math.log(large / small)
    return low + (high - low) * min(1.0, max(0.0, place))


def _passes(config: Config, model: ModelSizes, row: float) -> float:
    forwards = 3 + (config.algorithm.proximal == "recompute") + (config.model.gradient_checkpointing == "full")
    attention = 2 * model.layers * model.hidden * row
    return forwards * (2 * model.active + attention)


def _step_s(config: Config, model: ModelSizes, gpu: GpuType) -> float:
    """Return the seconds of an update's optimizer steps and of the exchange of gradients between replicas."""
    mesh, ranks = config.learner.mesh, config.learner.ranks
    read = OPTIMIZER_BYTES * model.trained / mesh.shards(ranks)
    moved = 2 * 4 * model.trained / mesh.shards(ranks) * (1 - 1 / mesh.replicate)
    seconds = read / (gpu.memory_tb_s * 1e12 * READING_SHARE) + moved / _speed(ranks, gpu)
    return config.learner.minibatches * seconds


def _gathers_s(config: Config, model: ModelSizes, gpu: GpuType) -> float:
    """Return the seconds per token of a rank in which the ranks of a replica exchange weights and gradients."""
    mesh, shards = config.learner.mesh, config.learner.mesh.shards(config.learner.ranks)
    divided = model.by_tensor * (1 - 1 / mesh.tensor) + model.by_expert * (1 - 1 / mesh.expert)
    moved = 3 * (model.parameters - model.layers * divided) * model.element * (1 - 1 / shards)
    return moved / _speed(shards, gpu) * mesh.slices / config.learner.micro_batch_tokens


def _shared_rows_s(config: Config, model: ModelSizes, gpu: GpuType) -> float:
    """Return the seconds per token of a rank in which ranks that share rows exchange activations.

    In each pass over a layer, `tensor` gathers and sums tokens twice, and `context` exchanges queries, keys, values and
    outputs. Exchanges between ranks that share experts are left out.
    """
    mesh, width = config.learner.mesh, model.hidden * model.element
    moved = 4 * width * (mesh.tensor - 1)
    moved += (2 * width + model.cache_per_token / model.layers) * (1 - 1 / mesh.context)
    passes = 2 + (config.algorithm.proximal == "recompute") + (config.model.gradient_checkpointing == "full")
    return passes * model.layers * moved / _speed(mesh.slices, gpu)


def _speed(ranks: int, gpu: GpuType) -> float:
    """Return the bytes per second between neighbouring ranks, which share a node if all `ranks` fit into it."""
    return (gpu.link_gb_s if ranks <= NODE else NETWORK_GB_S) * 1e9
