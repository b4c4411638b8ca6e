"""The training state of one rank, made by `build`. Only the state's pusher uses Ray."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamppo.algorithms.exploration import Bonus
from streamppo.algorithms.lag import AdmittedLag, lr_share
from streamppo.config.sections import LOCAL, Config
from streamppo.learner import gradient_checkpointing
from streamppo.learner.batch.fetch import RankRows
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.checkpoint import TrainState
from streamppo.learner.checkpoint.history import History
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import frozen, hf_files, load_policy, optimizer, policy
from streamppo.learner.model.frozen import NoReferenceWeights
from streamppo.learner.model.policy import Policy
from streamppo.learner.model.snapshot import WeightSnapshots, is_on_gpu
from streamppo.learner.objective import adaptation, objective
from streamppo.learner.objective.adaptation import UpdaterState
from streamppo.learner.parallel import context_parallel
from streamppo.learner.update import Updater, UpdateResult
from streamppo.learner.update_metrics import ModelSize, size_of, speed, update_metrics
from streamppo.weights import factory
from streamppo.weights.pusher import Publish, PushedVersion, Pusher

log = logging.getLogger(__name__)


@dataclass
class Learner:
    """A policy with its training, its pushes and its checkpoints. All ranks of `mesh` call each method together.

    `version` is that of the weights in `policy`; `config` applies from it on. `lag` is None unless it is adaptive.
    """

    config: Config
    model_path: str
    mesh: DeviceMesh
    policy: Policy
    optimizer: torch.optim.Optimizer
    updater: Updater
    pusher: Pusher
    saver: checkpoint.Saver
    version: int
    size: ModelSize
    lag: AdmittedLag | None
    copies: WeightSnapshots

    def configure(self, config: Config) -> None:
        """Replace the configuration; rebuild or update everything that depends on it."""
        torch.set_num_threads(config.learner.thread_count)
        optimizer.configure(self.optimizer, config)
        self.policy.temperature = config.rollout.temperature
        self.policy.float32_head = config.model.float32_head
        self.policy.set_context(config.queue.prefix)
        self.policy.set_routes(replayed=config.rollout.engine.routes)
        reference = frozen.load_reference(
            config, self.model_path, self.mesh, self.policy, frozen.separate_reference(self.updater.reference)
        )
        if config.algorithm.teacher.model != self.config.algorithm.teacher.model:
            # The old teacher's memory is freed before the new one is loaded.
            self.updater.teacher = None
        teacher = frozen.load_teacher(config, self.model_path, self.mesh, self.updater.teacher, self.policy.slices)
        previous = self.updater
        self.updater = _updater(config, self.policy, self.optimizer, (reference, teacher))
        self.updater.restore(previous.state)
        self.lag = adaptation.lag_under(config, self.lag)
        self.config = config

    @property
    def rank_rows(self) -> RankRows | None:
        """Maps a batch to the rows whose tokens this rank reads; None if a single rank reads all rows."""
        return self.updater.rank_rows if self.updater.ranks > 1 else None

    def follow_schedule(self, tokens_by_lag: Mapping[int, int]) -> float:
        """Set the learning rates for a batch with `tokens_by_lag`; return the policy's rate by schedule alone."""
        optimizer.follow_schedule(self.optimizer, self.config, self.version)
        scheduled = self.optimizer.param_groups[0]["lr"]
        if self.lag is not None:
            optimizer.lower_policy(self.optimizer, lr_share(self.lag, tokens_by_lag))
        return scheduled

    def metrics(self, updated: UpdateResult) -> dict[str, float]:
        """The metrics of an update."""
        return update_metrics(self.updater, updated)

    def adapt(
        self, updated: UpdateResult, metrics: Mapping[str, float], tokens_by_lag: Mapping[int, int], scheduled: float
    ) -> dict[str, float]:
        """Adapt the admitted lag, the weights of KL and entropy, and a moving reference to an update's `metrics`.

        Returns the metrics `admitted_lag`, of later batches, and `lr_share`, the share of the `scheduled` rate in this
        update.
        """
        self.updater.adapt(updated, metrics)
        adapted: dict[str, float] = {}
        if self.lag is not None or adaptation.is_lowered_by_ess(self.config):
            adapted["lr_share"] = metrics["lr"] / scheduled if scheduled else 1.0
        if self.lag is not None:
            if not updated.frozen:
                self.lag = adaptation.lag_after_update(self.config, self.lag, metrics, tokens_by_lag)
            adapted["admitted_lag"] = float(self.lag.admitted)
        return adapted

    def speed(self, updated: UpdateResult, metrics: Mapping[str, float]) -> dict[str, float]:
        """The speed of an update that has these `metrics`."""
        return speed(self.size, updated, metrics, dist.get_world_size())

    def pretrain(self, batches: Iterable[PaddedBatch]) -> None:
        """Train only the critic on the returns of an archived run's `batches`, at the full learning rate.

        Raises `ModelError` if the run was sampled with another tokenizer.
        """
        run = self.config.algorithm.critic.pretrain
        hf_files.check_archived_tokens(run, self.model_path)
        optimizer.set_rate(self.optimizer, 1.0)
        explained = [self.updater.pretrain(batch.to(self.updater.device)) for batch in batches]
        if dist.get_rank() == 0:
            shares = (
                f"{explained[0]:.2f} of the returns' variance explained at the start, {explained[-1]:.2f} at the end"
            )
            log.info("the critic was trained on %d batches of %s: %s", len(explained), run, shares)

    def push(self, token_record: bytes = b"") -> PushedVersion:
        """Start to publish the current version, with its batch's encoded `TokenRecord`. Returns the previous push."""
        buckets = self.pusher.buckets(policy.shards(self.policy, self.config.model.dtype))
        wait_for_copy, admitted = self.copies.write(buckets.tensors), self.lag.admitted if self.lag else None
        return self.pusher.push(self.version, buckets, token_record, admitted, wait_for_copy)

    def save(self, folder: Path) -> None:
        """Start a checkpoint of the current version under `folder`; it is written during training."""
        state = CheckpointState(
            version=self.version,
            digest="",
            ranks=self.config.learner.ranks,
            lag=self.lag,
            **self.updater.state._asdict(),
        )
        trained = TrainState(self.policy, self.optimizer, frozen.separate_reference(self.updater.reference))
        self.saver.start(folder, state, trained, self.pusher.last)

    def export(self, folder: Path) -> str:
        """Write the policy as a Hugging Face folder; return the digest of the last push."""
        weights = policy.gather_weights(self.policy, self.config.model.dtype, self.config.model.lora)
        if dist.get_rank() == 0:
            for note in hf_files.export(weights, self.model_path, folder, self.config.model.dtype):
                log.info("%s: %s", folder, note)
        return self.pusher.last.result().digest


def build(
    config: Config,
    model_path: str,
    mesh: DeviceMesh,
    publish: Publish,
    resume_from: str | None,
    past: History | None = None,
    *,
    restore: Callable[[TrainState], CheckpointState] | None = None,
) -> Learner:
    """Load the model at `model_path`, or the checkpoint at `resume_from`, onto the ranks of `mesh`. A collective.

    `publish` is called for every pushed version. A checkpoint outside of the run's `past` counts as damaged. `restore`
    replaces a checkpoint: it fills the trained tensors. Raises `ModelError` or `CheckpointError`.
    """
    torch.manual_seed(config.seed)
    temperature, critic = config.rollout.temperature, config.algorithm.critic.model
    slices = context_parallel.slices_of(mesh.device_type, config.learner.mesh)
    lora, offload = config.model.lora, config.learner.offload
    model = gradient_checkpointing.resolve_on_rank(config, model_path, mesh.device_type)
    loaded = load_policy.load(model, model_path, temperature, mesh, critic, offload=offload, lora=lora, slices=slices)
    loaded.set_context(config.queue.prefix)
    loaded.set_routes(replayed=config.rollout.engine.routes)
    has_moved = restore is not None or (resume_from is not None and checkpoint.reference_has_moved(Path(resume_from)))
    reference = frozen.load_reference(config, model_path, mesh, loaded, None, has_moved=has_moved)
    second_models = reference, frozen.load_teacher(config, model_path, mesh, None, slices)
    adamw = optimizer.adamw(loaded, config)
    updater = _updater(config, loaded, adamw, second_models)
    trained, version, lag = TrainState(loaded, adamw, frozen.separate_reference(updater.reference)), 0, None
    state = restore(trained) if restore else None
    if resume_from is not None:
        state = checkpoint.load_newest(Path(resume_from), trained, config.checkpoint.remote, past)
    if state is not None:
        version, lag = state.version, AdmittedLag(*state.lag) if state.lag else None
        optimizer.configure(adamw, config)
        bonus = None if state.bonus is None else Bonus(*state.bonus)
        updater.restore(UpdaterState(state.beta, state.bad_steps, bonus, state.reference_moved))
    pusher = Pusher(
        publish,
        factory.ends(config).sender(dist.get_rank()),
        config.learner.bucket_bytes,
        deltas=config.learner.deltas == "on" or (config.learner.deltas == "auto" and config.cluster.address != LOCAL),
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        frozen=policy.frozen(loaded, config.model.dtype),
        pinned=is_on_gpu(loaded),
    )
    saver = checkpoint.Saver(config.checkpoint)
    lag, copies = adaptation.lag_under(config, lag), WeightSnapshots(loaded, adamw)
    return Learner(
        config, model_path, mesh, loaded, adamw, updater, pusher, saver, version, size_of(loaded), lag, copies
    )


def _updater(
    config: Config,
    trained: Policy,
    adamw: torch.optim.Optimizer,
    second_models: tuple[Policy | NoReferenceWeights | None, Policy | None],
) -> Updater:
    functions, (reference, teacher) = objective.build(config), second_models
    group = trained.slices.data_ranks()
    return Updater(trained, adamw, functions, config, group=group, reference=reference, teacher=teacher)
