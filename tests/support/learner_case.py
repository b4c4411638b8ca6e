"""One small update that depends on a seed only, so that several processes can make the same update."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.lib.runs import PLAIN
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.device import mesh_of
from streamppo.learner.model import frozen, load_policy
from streamppo.learner.objective import objective
from streamppo.learner.parallel import context_parallel
from streamppo.learner.update import Updater, UpdateResult
from streamppo.learner.update_metrics import update_metrics
from streamppo.types import Batch, Identity, Trajectory, flags, ints

MATH = Path(__file__).parent.parent.parent / "configs" / "math.toml"
CUTS = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch shards all weights of a layer alike"
)
"""Marks what needs learner.mesh.tensor or expert; with an older torch they are refused."""
BATCH = 12
SMALL = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Model settings of the tests."""
TIMES = {"score_s", "train_s"}
"""Metrics that differ between equal updates."""
Weights: TypeAlias = dict[str, torch.Tensor]
Made = TypeVar("Made")


def save_model(folder: Path) -> None:
    """Save a model whose log-probs differ from token to token."""
    torch.manual_seed(5)
    Qwen2ForCausalLM(Qwen2Config(**SMALL, initializer_range=0.3)).save_pretrained(folder)


def config_of(*overrides: str) -> Config:
    """Task and model of configs/math.toml with `PLAIN`: one step per update, no correction by sign."""
    return configfile.load(MATH, [*PLAIN, f"queue.batch_size={BATCH}", "queue.samples_per_prompt=2", *overrides])


def batch(version: int = 3, min_version: int = 1, seed: int = 0) -> Batch:
    """Ragged trajectories with tokens of several versions, some of them too old, and some masked."""
    generator = np.random.default_rng(seed)
    return Batch(
        version=version,
        min_version=min_version,
        trajectories=tuple(_trajectory(generator, number, version) for number in range(BATCH)),
    )


def _trajectory(generator: np.random.Generator, number: int, version: int) -> Trajectory:
    count, prompt = int(generator.integers(1, 9)), int(generator.integers(1, 6))
    mask = generator.random(count) < 0.8
    mask[-1] = True
    return drawn_row(generator, number, version, prompt, mask)


def drawn_row(generator: np.random.Generator, number: int, version: int, prompt: int, mask: np.ndarray) -> Trajectory:
    """Row `number` of a batch: `prompt` prompt tokens, and a completion with `mask` and versions up to `version`."""
    count = len(mask)
    return Trajectory(
        identity=Identity(task="t", prompt=number // 2, sample=number % 2),
        actor="rollout-0",
        prompt_tokens=generator.integers(2, 17, prompt).astype(np.int32).tobytes(),
        tokens=generator.integers(1, 17, count).astype(np.int32).tobytes(),
        logprobs=(-generator.random(count) * 4).astype(np.float32).tobytes(),
        versions=np.sort(generator.integers(0, version + 1, count)).astype(np.int32).tobytes(),
        mask=mask.tobytes(),
        finish="length" if generator.random() < 0.3 else "stop",
        reward=float(generator.normal()),
    )


def cut(batch: Batch, seed: int = 0) -> Batch:
    """The batch as if sampled with top-p: tokens with one candidate, with several, and with the whole vocabulary."""
    generator = np.random.default_rng(seed)
    return replace(batch, trajectories=tuple(_with_candidates(generator, one) for one in batch.trajectories))


def _with_candidates(generator: np.random.Generator, one: Trajectory) -> Trajectory:
    sets = [
        sorted({int(token), *generator.choice(SMALL["vocab_size"], int(generator.integers(0, 6))).tolist()})
        for token in ints(one.tokens)
    ]
    kept = [
        some if sampled and generator.random() < 0.8 else []
        for some, sampled in zip(sets, flags(one.mask), strict=True)
    ]
    counts = np.array([len(some) for some in kept], np.int32)
    return replace(one, candidates=np.array(list(chain(*kept)), np.int32).tobytes(), candidate_counts=counts.tobytes())


@contextlib.contextmanager
def group(rank: int, ranks: int, store: Path, backend: str = "gloo") -> Iterator[None]:
    """A process group that meets at the file `store`."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def updater(config: Config, folder: Path, device: str = "cpu") -> Updater:
    """The learner's updater on the model in `folder`, with a random value head."""
    mesh = mesh_of(device, config.learner.mesh)
    temperature = config.rollout.temperature
    torch.manual_seed(9)
    slices = context_parallel.slices_of(device, config.learner.mesh)
    critic, lora = config.algorithm.critic.model, config.model.lora
    offload = config.learner.offload
    policy = load_policy.load(
        config.model, folder, temperature, mesh, critic, offload=offload, lora=lora, slices=slices
    )
    policy.set_context(config.queue.prefix)
    policy.set_routes(replayed=config.rollout.engine.routes)
    followed = frozen.load_reference(config, str(folder), mesh, policy, None)
    taught_by = config.algorithm.teacher
    teacher = (
        load_policy.load(config.model, taught_by.model, temperature, mesh, slices=slices) if taught_by.model else None
    )
    head = policy.value_head.weight
    fill = (torch.randn(head.shape) * 0.1).to(device)
    if isinstance(head, DTensor):
        fill = distribute_tensor(fill, mesh, head.placements)
    with torch.no_grad():
        head.copy_(fill)
    return Updater(
        policy,
        # AdamW turns a gradient of rounding errors into a full step; SGD's steps are proportional to the gradient.
        torch.optim.SGD([one for one in policy.parameters() if one.requires_grad], lr=config.learner.lr * 100),
        objective.build(config),
        config,
        group=slices.data_ranks(),
        reference=followed,
        teacher=teacher,
    )


def metrics(updater: Updater, batch: PaddedBatch) -> dict[str, float]:
    """The metrics of one update, to which the updater then adapts."""
    return adapt(updater, updater.update(batch))


def adapt(updater: Updater, updated: UpdateResult) -> dict[str, float]:
    """The metrics of the update `updated`, to which the updater then adapts."""
    metrics = update_metrics(updater, updated)
    updater.adapt(updated, metrics)
    return metrics


def whole(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, critic included, unsharded."""
    if isinstance(policy, FSDPModule):
        policy.reshard()
    return {name: full(parameter).clone() for name, parameter in policy.named_parameters()}


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """The whole tensor, sharded or not, without its graph."""
    assert tensor is not None
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def updated(folder: Path, batch: PaddedBatch, *overrides: str) -> tuple[Weights, dict[str, float]]:
    """Parameters and metrics after one update."""
    one = updater(config_of(*overrides), folder)
    found = metrics(one, batch)
    return whole(one.policy), found


def assert_same_weights(one: Weights, other: Weights, *, atol: float = 2e-6) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_same(
    one: tuple[Weights, dict[str, float]], other: tuple[Weights, dict[str, float]], *, rel: float = 1e-3
) -> None:
    """Assert equal weights, and equal metrics except times."""
    assert_same_weights(one[0], other[0])
    for name in one[1].keys() - TIMES:
        assert other[1][name] == pytest.approx(one[1][name], rel=rel, abs=1e-5), name


def processes() -> ForkServerContext:
    """A context for processes with a rank's imports preloaded: a start takes a tenth of a second instead of three."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamppo.learner.learner", "transformers.models.qwen2.modeling_qwen2"])
    return context


def by_ranks(make: Callable[..., Made], ranks: int, folder: Path, *arguments: object) -> Made:
    """Run `make(ranks, *arguments)`, a module's function, on a process group of `ranks`; return rank 0's result.

    `folder` is for their files.
    """
    context, store, out = processes(), folder / f"store-{ranks}", folder / f"{ranks}.pt"
    workers = [context.Process(target=_rank, args=(rank, ranks, store, out, make, arguments)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return torch.load(out, weights_only=True)


def _rank(
    rank: int, ranks: int, store: Path, out: Path, make: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    with group(rank, ranks, store):
        made = make(ranks, *arguments)
        if rank == 0:
            torch.save(made, out)
