"""Updates the policy on a batch, by the same code on one CPU rank and on many GPU ranks.

B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded). Only forward and backward passes are
split over ranks. Every rank computes advantages, corrections and diagnostics from the whole [B, T] batch.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from streamppo.algorithms.aggregate import Denominators, denominators
from streamppo.algorithms.diagnostics import OffPolicy, off_policy, update_statistics_of
from streamppo.algorithms.exploration import Bonus
from streamppo.algorithms.kl import stop_early
from streamppo.algorithms.value_losses import explained_variance
from streamppo.config.sections import Config
from streamppo.errors import UpdateError
from streamppo.learner import batching
from streamppo.learner.attention import attention
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.batching import STAND_IN, ActiveRows, Division, active_rows
from streamppo.learner.device import add_up, to_device
from streamppo.learner.model.frozen import NoReferenceWeights, follow
from streamppo.learner.model.optimizer import clip, lower_policy
from streamppo.learner.model.policy import Part, Policy, PolicyOutput, device_of, empty_output, release
from streamppo.learner.objective import adaptation
from streamppo.learner.objective.adaptation import UpdaterState
from streamppo.learner.objective.loss import Loss, MicroBatchLoss
from streamppo.learner.objective.metrics import Minibatch, PolicyPass, Sums
from streamppo.learner.objective.objective import Epoch, Objective
from streamppo.learner.objective.targets import (
    Frozen,
    Targets,
    compute_targets,
    correct_answer_mask,
    per_token_record,
    teacher_logprobs_from_batch,
)
from streamppo.process import phase
from streamppo.types import TokenRecord

STEPS = 8
"""The number of token counts for which layers are compiled; rows end to end are padded to one of these counts."""

log = logging.getLogger(__name__)


class UpdateResult(NamedTuple):
    """The result of an update on the rows `active` of a batch.

    `divergences`, of the proximal from the behavior policy, are None unless the learning rate depends on them. If
    `frozen`, only the critic was trained. The update began at `start`, its first step at `scored`
    (`time.perf_counter`).
    """

    objective: Objective
    batch: PaddedBatch
    active: ActiveRows
    targets: Targets
    minibatches: Sequence[Minibatch]
    divergences: OffPolicy | None
    start: float
    scored: float
    frozen: bool


class Updater:
    """Trains on padded batches; `policy` and `optimizer` are changed in place.

    All ranks make the same calls with the same batch in the same order. The ranks of `group` pass different rows. One
    update scores rows and computes targets; then each minibatch has forward and backward passes, and a step.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        config: Config,
        *,
        group: dist.ProcessGroup,
        reference: Policy | NoReferenceWeights | None = None,
        teacher: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.group = group
        self.reference = reference
        self.reference_moved = False
        self.teacher = teacher
        self.beta = config.algorithm.kl.reward_beta
        self.bonus = Bonus(config.algorithm.entropy, config.algorithm.entropy)
        self.device = device_of(policy)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        width, is_padded = policy.lm.config.get_text_config().hidden_size, policy.layout is attention.padded
        costs = batching.ON_CPU if self.device.type == "cpu" else batching.ON_GPU
        self.division = Division(config, self.rank, self.ranks, width, is_padded, costs)
        for model in filter(None, (policy, reference, teacher)):
            if isinstance(model, Policy) and config.model.compile:
                model.step = -(-config.learner.micro_batch_tokens // STEPS)
        self.bad_steps = self.critic_bad_steps = 0
        self._empty_batches = 0

    @property
    def state(self) -> UpdaterState:
        """The state to restore in a later updater."""
        algorithm = self.config.algorithm
        beta = self.beta if algorithm.kl.target else 0.0
        bonus = self.bonus if algorithm.entropy_control.target else None
        return UpdaterState(beta, (self.bad_steps, self.critic_bad_steps), bonus, self.reference_moved)

    def restore(self, state: UpdaterState) -> None:
        """Continue from the `state` of an earlier updater; the caller loads a moved reference's weights."""
        self.bad_steps, self.critic_bad_steps = state.bad_steps
        self.reference_moved = state.reference_moved and self.reference is not None
        if self.config.algorithm.kl.target and state.beta:
            self.beta = state.beta
        if self.config.algorithm.entropy_control.target and state.bonus is not None:
            self.bonus = state.bonus

    def rank_rows(self, batch: PaddedBatch) -> list[int]:
        """The rows whose tokens this rank reads in its update; `batch` may lack tokens."""
        active, sizes = active_rows(self.config, batch), self.policy.sizes(batch.on_host)
        return self.division.rank_rows(sizes, batch.version, self.objective.epochs, active)

    def update(self, batch: PaddedBatch, epochs: Sequence[Epoch] | None = None) -> UpdateResult:
        """Train on `batch` for `epochs`, by default the objective's epochs.

        Raises `UpdateError` for data that must not be trained on, and after too many gradients that are not finite.
        """
        start, objective = time.perf_counter(), self.objective
        if epochs is None and batch.version < self.config.algorithm.critic.warmup_updates:
            objective = objective.warm_up()
        active = active_rows(self.config, batch)
        targets, graphs = self.prepare(objective, batch, active)
        divergences = self._lower_rate(batch, targets.scored)
        scored = time.perf_counter()
        loss = Loss(objective, self.config.algorithm, batch, targets, self.bonus.weight)
        minibatches: list[Minibatch] = []
        frozen = targets.policy_waits or batch.version < self.config.algorithm.critic.warmup_updates
        for epoch in objective.epochs if epochs is None else epochs:
            for rows in self.division.minibatches(len(batch.reward_B), batch.version, epoch):
                if epoch.part != "critic" and any(minibatch.stopped_early for minibatch in minibatches):
                    break
                shares: list[MicroBatchLoss] = []
                counts = self._counts(batch, rows)
                self.optimizer.zero_grad(set_to_none=True)
                micro_batches = self._micro_batches(batch, rows, active)
                for number, micro_batch in enumerate(micro_batches, 1):
                    has_graph = graphs and epoch.part != "critic"
                    current = graphs[number - 1] if has_graph else score(self.policy, batch, micro_batch, epoch.part)
                    share = loss.share(to_device(micro_batch, self.device), epoch.part, current, counts)
                    self.backward(share.loss, is_last=number == len(micro_batches))
                    shares.append(share._replace(loss=share.loss.detach()))
                minibatches.append(self._step(epoch, rows, shares, active, frozen=frozen))
        self._warn_empty_steps(batch.version, minibatches)
        return UpdateResult(objective, batch, active, targets, minibatches, divergences, start, scored, frozen)

    def adapt(self, updated: UpdateResult, metrics: Mapping[str, float]) -> None:
        """Adapt `beta` and `bonus` to the `metrics` of an update, and move a reference that follows the policy."""
        if not updated.frozen:
            self.beta = adaptation.beta_after_update(self.config, self.beta, metrics, len(updated.batch.reward_B))
            self.bonus = adaptation.bonus_after_update(self.config, self.bonus, metrics)
        every = self.config.algorithm.kl.follow_every
        if isinstance(self.reference, Policy) and every and (updated.batch.version + 1) % every == 0:
            follow(self.reference, self.policy, self.config.algorithm.kl.follow_share)
            self.reference_moved = True

    def token_record(self, updated: UpdateResult) -> TokenRecord:
        """The numbers per token, computed before the first step, for the archive."""
        return per_token_record(self.objective, self.config, updated.batch, updated.targets, updated.active.scored_B)

    def pretrain(self, batch: PaddedBatch) -> float:
        """Train only the critic on the returns of `batch`, which may be from another run. A collective.

        Returns the share of the returns' variance that the critic explained before. Raises `UpdateError` like `update`.
        """
        # Lag 0 means that the learner's own weights sampled a token, which is false for a batch of another run.
        batch = batch._replace(lag_BT=batch.lag_BT + 1)
        targets = self.update(batch, self.objective.critic_epochs()).targets
        return explained_variance(targets.scored.values_BT, targets.estimate.returns, batch.mask_BT)

    def prepare(
        self, objective: Objective, batch: PaddedBatch, active: ActiveRows
    ) -> tuple[Targets, list[PolicyOutput]]:
        """The targets of `batch`; and scores with graphs, if the batch's only step can use the graphs, else no scores.

        Raises `UpdateError` for data that must not be trained on.
        """
        sizes = self.policy.sizes(batch.on_host)
        micro_batches = self.division.micro_batches(sizes, active.scored_B.nonzero()[:, 0])
        keeps_graphs = torch.equal(active.scored_B, active.trained_B)
        keeps_graphs &= objective.one_step and self.division.are_one_pass(sizes, micro_batches)
        if len(micro_batches) > 1:
            # A router keeps only the routes of its last pass, and FSDP needs each pass followed by its backward pass.
            keeps_graphs &= not (self.policy.routers or isinstance(self.policy, FSDPModule))
        # Frozen models come first: a pass of the reference, which may be the policy without its adapters, would replace
        # the routes with which the backward pass of a kept graph recomputes a layer.
        models = (self.reference, self.teacher)
        frozen = Frozen(*(self._frozen_logprobs(model, batch, micro_batches) for model in models))
        scored, graphs = self._score_batch(objective.scored, batch, micro_batches, keeps_graphs=keeps_graphs)
        try:
            if self.config.algorithm.teacher.url:
                frozen = frozen._replace(teacher_BT=teacher_logprobs_from_batch(batch))
            with phase("targets"):
                targets = compute_targets(
                    objective, self.config, batch, scored, frozen, active.scored_B, beta=self.beta
                )
        except ValueError as error:
            raise UpdateError(f"batch {batch.version} cannot be trained on: {error}") from error
        return targets, graphs

    def _score_batch(
        self, part: Part | None, batch: PaddedBatch, micro_batches: Sequence[Tensor], *, keeps_graphs: bool
    ) -> tuple[PolicyOutput, list[PolicyOutput]]:
        """The scores of the whole batch and, if `keeps_graphs`, the scores of this rank's passes with their graphs."""
        if part is None:
            return empty_output(batch), []
        keeps_graphs &= part != "critic"
        with torch.set_grad_enabled(keeps_graphs):
            scores = [score(self.policy, batch, rows, part) for rows in micro_batches]
        return _gather(batch, micro_batches, scores, self.group), scores if keeps_graphs else []

    def _frozen_logprobs(
        self, model: Policy | NoReferenceWeights | None, batch: PaddedBatch, micro_batches: Sequence[Tensor]
    ) -> Tensor | None:
        """[B, T] log-probs by a frozen `model`, whose own routers choose the experts; None without a model."""
        if model is None:
            return None
        with torch.no_grad():
            scores = [score(model, batch._replace(routes=None), rows, "policy") for rows in micro_batches]
        if isinstance(model, Policy):
            release(model)
        return _gather(batch, micro_batches, scores, self.group).logprobs_BT

    def _lower_rate(self, batch: PaddedBatch, scored: PolicyOutput) -> OffPolicy | None:
        """Lower the policy's learning rate for `batch` by its effective sample size, if so configured.

            rate *= sqrt(sum(W)^2 / (n sum(W^2)))        W = proximal / behavior of each of n sequences

        VCPO, https://arxiv.org/abs/2602.17616. Returns the divergences, or None if the rate is unchanged.
        """
        if not adaptation.is_lowered_by_ess(self.config):
            return None
        divergences = off_policy(scored.logprobs_BT, batch.behavior_logprobs_BT, batch.mask_BT, batch.lag_BT)
        lower_policy(self.optimizer, math.sqrt(divergences.overall.ess_sequence))
        return divergences

    def _counts(self, batch: PaddedBatch, rows: Tensor) -> Denominators:
        prompt_B = batch.prompt_B[rows] if self.config.algorithm.aggregation == "prompt-mean" else None
        counts = denominators(batch.mask_BT[rows], constant=self.config.rollout.max_tokens, prompt_B=prompt_B)
        if not self.config.algorithm.positive_nll:
            return counts
        return counts._replace(right_tokens=float(correct_answer_mask(batch, self.config)[rows].sum()))

    def _micro_batches(self, batch: PaddedBatch, rows: Tensor, active: ActiveRows) -> list[Tensor]:
        """This rank's micro-batches of a minibatch; if all its rows are idle, one empty micro-batch."""
        micro_batches = self.division.micro_batches(self.policy.sizes(batch.on_host), active.select(rows))
        return micro_batches or [rows[:0]] * bool(active.idle_B[rows].any())

    @phase("backward")
    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch's share of the loss; after a step's last one, replicas add theirs up."""
        if isinstance(self.policy, FSDPModule):
            self.policy.set_requires_all_reduce(is_last)
        # FSDP sums gradients over ranks, so the denominators count the rows of all ranks.
        loss.backward()

    def _step(
        self, epoch: Epoch, minibatch: Tensor, shares: Sequence[MicroBatchLoss], active: ActiveRows, *, frozen: bool
    ) -> Minibatch:
        """Make the optimizer step of a minibatch, unless the policy has already moved too far. A collective."""
        sums, rows, idle = Sums.zero(self.device), active.select(minibatch), minibatch[~active.trained_B[minibatch]]
        for share in shares:
            sums = sums.plus(share.sums)
        passes = [share.policy_pass for share in shares if share.policy_pass is not None]
        if not active.idle_B[minibatch].any() and not self._has_tokens(sums, passes):
            return Minibatch(epoch.part, rows, sums, passes, None, stopped_early=False, is_empty=True, idle=idle)
        target_kl = self.config.algorithm.target_kl
        moved = self._kl_from_proximal(sums) if target_kl and epoch.part != "critic" else 0.0
        if not math.isfinite(moved):
            norm = self._skip_step(epoch.part, moved)
            return Minibatch(epoch.part, rows, sums, passes, norm, stopped_early=False, idle=idle)
        too_far = stop_early(moved, target_kl or None)
        norm = None if too_far else self._optimize(epoch, frozen=frozen)
        return Minibatch(epoch.part, rows, sums, passes, norm, too_far, idle=idle)

    def _has_tokens(self, sums: Sums, passes: Sequence[PolicyPass]) -> bool:
        """True if a token of the minibatch has weight in the policy's loss or is in the critic's loss. A collective."""
        tokens = sums.values_2[:1] + sum(policy_pass.kept for policy_pass in passes)
        add_up(tokens, self.group)
        return bool(tokens.item())

    def _warn_empty_steps(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        """Warn of a batch with skipped steps when the number of such batches is a power of 2."""
        empty = sum(minibatch.is_empty for minibatch in minibatches)
        self._empty_batches += empty > 0
        if self.rank == 0 and empty and self._empty_batches.bit_count() == 1:
            before = f", as in {self._empty_batches - 1} of the batches before" if self._empty_batches > 1 else ""
            log.warning(
                f"batch {version}: {empty} of {len(minibatches)} optimizer steps were skipped{before}: none of their "
                "tokens was left in the loss (tokens_too_old, equal_groups, filtered_* and rejected_* in metrics.jsonl "
                "show why)"
            )

    def _kl_from_proximal(self, sums: Sums) -> float:
        tokens_5 = sums.tokens_5.clone()
        add_up(tokens_5, self.group)
        return update_statistics_of(tokens_5).k3

    @phase("optimizer")
    def _optimize(self, epoch: Epoch, *, frozen: bool) -> float | None:
        """Clip the gradient and make a step. Returns the gradient's norm, or None if no step is due."""
        if epoch.part == "critic" or frozen:
            # Set gradients to None: with zero gradients AdamW would still change the policy and its moments.
            for parameter in self.policy.lm.parameters():
                parameter.grad = None
            if epoch.part == "policy":
                return None
        norm = clip(self.policy.parameters(), epoch.max_grad_norm, self.config.learner.norm)
        if not math.isfinite(norm):
            return self._skip_step(epoch.part, norm)
        self._count_bad(epoch.part, 0)
        self.optimizer.step()
        return norm

    def _skip_step(self, part: Part, number: float) -> float:
        """Count a skipped step; return `number`, which is not finite. Raises `UpdateError` after too many of them."""
        in_a_row = 1 + (self.critic_bad_steps if part == "critic" else self.bad_steps)
        self._count_bad(part, in_a_row)
        if in_a_row >= self.config.learner.max_bad_steps:
            raise UpdateError(f"the gradient, or target_kl's KL, was not finite in {in_a_row} optimizer steps in a row")
        return number

    def _count_bad(self, part: Part, in_a_row: int) -> None:
        if part == "critic":
            self.critic_bad_steps = in_a_row
        else:
            self.bad_steps = in_a_row


@phase("forward")
def score(policy: Policy | NoReferenceWeights, batch: PaddedBatch, rows: Tensor, part: Part) -> PolicyOutput:
    """The scores of `rows` by `policy`. An empty micro-batch passes one row, because the pass is a collective."""
    if isinstance(policy, Policy):
        policy.routers.counts = len(rows) > 0
    return policy(batch.select(rows if len(rows) else STAND_IN), part)


def _gather(
    batch: PaddedBatch, micro_batches: Sequence[Tensor], scores: Sequence[PolicyOutput], group: dist.ProcessGroup
) -> PolicyOutput:
    gathered = empty_output(batch)
    for rows, scored in zip(micro_batches, scores, strict=True):
        device_rows = to_device(rows, batch.mask_BT.device)
        for target, part in zip(gathered, scored, strict=True):
            entries = (device_rows, slice(part.shape[1])) if part.dim() == 2 else (device_rows,)
            target[entries] = part[: len(rows)].detach().to(target.dtype)
    for column in gathered:
        add_up(column, group)
    return gathered
