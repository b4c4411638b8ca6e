"""One update of the policy on a batch: the same code on one CPU rank and on many GPU ranks.

B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded). Forward and backward passes are
split over ranks and micro-batches; everything between them (advantages, whitening, corrections, diagnostics) is
computed on every rank from the whole gathered [B, T] batch, so functions of `algorithms` do not depend on ranks.
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from streamppo.algorithms.aggregate import Denominators, denominators
from streamppo.algorithms.diagnostics import OffPolicy, update_statistics_of
from streamppo.algorithms.exploration import Bonus, next_bonus
from streamppo.algorithms.kl import kl, next_beta, policy_weights, stop_early
from streamppo.algorithms.value_losses import explained_variance
from streamppo.config.sections import Config
from streamppo.errors import UpdateError
from streamppo.learner import batching
from streamppo.learner.attention import attention
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.batching import Division
from streamppo.learner.device import add_up, to_device
from streamppo.learner.model.frozen import NoReferenceWeights, follow
from streamppo.learner.model.optimizer import clip
from streamppo.learner.model.policy import Part, Policy, PolicyOutput, device_of
from streamppo.learner.objective import adaptive_lag, idle_rows
from streamppo.learner.objective.loss import Loss, MicroBatchLoss
from streamppo.learner.objective.metrics import (
    Minibatch,
    PolicyPass,
    Sums,
    batch_metrics,
    distances,
    dropped_shares,
    first_logprobs,
    step_metrics,
)
from streamppo.learner.objective.objective import Epoch, Objective
from streamppo.learner.objective.targets import Targets, correct_answer_mask, per_token_record
from streamppo.learner.scorer import Scorer, score
from streamppo.process import phase
from streamppo.types import TokenRecord

STEPS = 8
"""The numbers of tokens for which layers are compiled: rows end to end are filled up to one of them."""

log = logging.getLogger(__name__)


class UpdateResult(NamedTuple):
    """The result of an update on the rows `chosen` of a batch.

    `age` is the distance between proximal and behavior policy, if the learning rate follows it, else None. `frozen`:
    only the critic was trained.

    `start` and `scored` are the times, by `time.perf_counter`, at which the update and its first step began.
    """

    objective: Objective
    batch: PaddedBatch
    chosen: idle_rows.IdleRows
    targets: Targets
    minibatches: Sequence[Minibatch]
    age: OffPolicy | None
    start: float
    scored: float
    frozen: bool


class Updater:
    """Trains on padded batches; `policy` and `optimizer` are changed in place.

    Calls are collectives of all ranks: same batch, same order. The ranks of `group` pass different rows. All state
    across batches: `beta`, the weight of the KL in the reward; `bonus`, the entropy bonus; `bad_steps`, the skipped
    optimizer steps in a row; `critic_bad_steps`, the same for a critic with its own steps; and the weights of a
    reference that follows the policy.
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

    def remember(
        self, beta: float, in_a_row: tuple[int, int], bonus: Bonus | None, *, reference_moved: bool = False
    ) -> None:
        """Restore the state of an earlier updater: bad steps `in_a_row`; `beta` if it is adaptive and was not 0.

        `bonus` is restored if it is adaptive and not None. `reference_moved`: the reference, which the caller loads, is
        no longer the run's first model.
        """
        self.bad_steps, self.critic_bad_steps = in_a_row
        self.reference_moved = reference_moved and self.reference is not None
        if self.config.algorithm.kl.target and beta:
            self.beta = beta
        if self.config.algorithm.entropy_control.target and bonus is not None:
            self.bonus = bonus

    @property
    def nonfinite_steps(self) -> tuple[int, int]:
        """Skipped optimizer steps in a row: the policy's, and the critic's if it has its own steps."""
        return self.bad_steps, self.critic_bad_steps

    @property
    def steered_bonus(self) -> Bonus | None:
        """The bonus for a later updater's `remember`; None if it is not adaptive."""
        return self.bonus if self.config.algorithm.entropy_control.target else None

    def own_rows(self, batch: PaddedBatch) -> list[int]:
        """The rows of `batch` whose tokens this rank reads in its update; `batch` may be without tokens."""
        chosen, sizes = idle_rows.find(self.config, batch), self.policy.sizes(batch.on_host)
        return self.division.own_rows(sizes, batch.version, self.objective.epochs, chosen)

    def update(self, batch: PaddedBatch, epochs: Sequence[Epoch] | None = None) -> UpdateResult:
        """Train on `batch` for `epochs`, by default those of the objective.

        Raises `UpdateError` for data that must not be trained on, and for gradients that stay non-finite.
        """
        start, objective = time.perf_counter(), self.objective
        if epochs is None and batch.version < self.config.algorithm.critic.warmup_updates:
            objective = objective.warm_up()
        chosen = idle_rows.find(self.config, batch)
        targets, graphs = self._scorer(batch, chosen).prepare(objective, batch, beta=self.beta)
        age = adaptive_lag.lower_by_ess(self.config, self.optimizer, batch, targets.scored)
        scored = time.perf_counter()
        loss = Loss(objective, self.config.algorithm, batch, targets, self.bonus.weight)
        minibatches: list[Minibatch] = []
        frozen = targets.policy_waits or batch.version < self.config.algorithm.critic.warmup_updates
        for epoch in objective.epochs if epochs is None else epochs:
            for rows in self.division.minibatches(len(batch.reward_B), batch.version, epoch):
                if _has_ended(epoch, minibatches):
                    break
                shares: list[MicroBatchLoss] = []
                counts = self._counts(batch, rows)
                self.optimizer.zero_grad(set_to_none=True)
                for number, piece in enumerate(self._pieces(batch, rows, chosen)):
                    has_graph = graphs and epoch.part != "critic"
                    current = graphs[number] if has_graph else score(self.policy, batch, piece, epoch.part)
                    share = loss.share(to_device(piece, self.device), epoch.part, current, counts)
                    self.backward(share.loss)
                    shares.append(share._replace(loss=share.loss.detach()))
                minibatches.append(self._step(epoch, rows, shares, chosen, frozen=frozen))
        self._warn_empty_steps(batch.version, minibatches)
        return UpdateResult(objective, batch, chosen, targets, minibatches, age, start, scored, frozen)

    @phase("metrics")
    def metrics(self, updated: UpdateResult) -> dict[str, float]:
        """Return an update's metrics, equal on every rank but for times, and adapt `beta` and `bonus`. A collective.

        Call it once after each update. It also moves a reference that follows the policy, every `kl.follow_every`.
        """
        batch, targets, minibatches = updated.batch, updated.targets, updated.minibatches
        scored, passed_B = targets.scored, updated.chosen.scored_B.to(self.device)
        if not updated.objective.scores_policy:
            first_BT, passed_B = first_logprobs(minibatches, batch.mask_BT, self.group)
            scored = scored._replace(logprobs_BT=first_BT)
        steps = step_metrics(minibatches, targets.trained_BT, self.group)
        if all(minibatch.part == "critic" for minibatch in minibatches):
            # In warm-up the policy's only pass is the one before the critic's steps.
            steps["entropy"] = targets.scored.entropy_BT[targets.trained_BT].double().sum().item()
            steps["entropy"] /= max(1, int(targets.trained_BT.sum()))
        metrics = {
            **batch_metrics(batch, scored, passed_B, targets.estimate, targets.trained_BT, updated.age),
            **steps,
            **dropped_shares(self.objective.rules, minibatches, batch, self.group),
            "tokens_idle": float(batch.mask_BT[~updated.chosen.taught_B.to(self.device)].sum()),
            **self._kl_metrics(updated, scored, passed_B),
            **self._exploration_metrics(updated, steps["entropy"]),
            **distances(batch, targets.teacher_BT, targets.right_BT, scored, passed_B),
            **self.policy.routers.metrics(self.device),
            **({} if targets.explained is None else {"outcomes_explained": targets.explained}),
            "lr": self.optimizer.param_groups[0]["lr"],
            "score_s": updated.scored - updated.start,
            "train_s": time.perf_counter() - updated.scored,
        }
        self._move_reference(batch.version)
        return metrics

    def token_record(self, updated: UpdateResult) -> TokenRecord:
        """The per-token numbers from before the first step that the archive keeps."""
        return per_token_record(self.objective, self.config, updated.batch, updated.targets, updated.chosen.scored_B)

    def pretrain(self, batch: PaddedBatch) -> float:
        """Train only the critic on the returns of `batch`, which may be another run's.

        Returns the share of their variance that it explained before. A collective; raises `UpdateError` like `update`.
        """
        # Lag 0 means that the learner's own weights sampled a token, which is false for another run's batch.
        batch = batch._replace(lag_BT=batch.lag_BT + 1)
        targets = self.update(batch, self.objective.critic_epochs()).targets
        return explained_variance(targets.scored.values_BT, targets.estimate.returns, batch.mask_BT)

    def _scorer(self, batch: PaddedBatch, chosen: idle_rows.IdleRows) -> Scorer:
        """The passes over `batch` before its first step."""
        sizes = self.policy.sizes(batch.on_host)
        pieces = self.division.micro_batches(sizes, chosen.scored_B.nonzero()[:, 0])
        keeps_graphs = torch.equal(chosen.scored_B, chosen.taught_B) and self.division.are_one_pass(sizes, pieces)
        if len(pieces) > 1:
            # A router has the routes of its last pass alone, and FSDP's passes are followed by their backward pass.
            keeps_graphs &= not (self.policy.routers or isinstance(self.policy, FSDPModule))
        models = self.policy, self.reference, self.teacher
        return Scorer(*models, self.config, self.group, pieces, chosen.scored_B, keeps_graphs)

    def _counts(self, batch: PaddedBatch, rows: Tensor) -> Denominators:
        """The denominators of the loss of a minibatch, over all ranks."""
        prompt_B = batch.prompt_B[rows] if self.config.algorithm.aggregation == "prompt-mean" else None
        counts = denominators(batch.mask_BT[rows], constant=self.config.rollout.max_tokens, prompt_B=prompt_B)
        if not self.config.algorithm.positive_nll:
            return counts
        return counts._replace(right=float(correct_answer_mask(batch, self.config)[rows].sum()))

    def _pieces(self, batch: PaddedBatch, rows: Tensor, chosen: idle_rows.IdleRows) -> list[Tensor]:
        """This rank's micro-batches of a minibatch; one empty micro-batch if no row is left but a step is due."""
        pieces = self.division.micro_batches(self.policy.sizes(batch.on_host), chosen.select(rows))
        return pieces or [rows[:0]] * bool(chosen.idle_B[rows].any())

    @phase("backward")
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the loss."""
        # Denominators count all ranks, because FSDP sums gradients over ranks.
        loss.backward()

    def _step(
        self,
        epoch: Epoch,
        minibatch: Tensor,
        shares: Sequence[MicroBatchLoss],
        chosen: idle_rows.IdleRows,
        *,
        frozen: bool,
    ) -> Minibatch:
        """Make the optimizer step of a minibatch, unless the policy has already moved too far. A collective.

        A `frozen` policy is unchanged; only its critic learns.
        """
        sums, rows, idle = Sums.zero(self.device), chosen.select(minibatch), minibatch[~chosen.taught_B[minibatch]]
        for share in shares:
            sums = sums.plus(share.sums)
        passes = [share.policy_pass for share in shares if share.policy_pass is not None]
        if not chosen.idle_B[minibatch].any() and not self._has_tokens(sums, passes):
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
        """True if a token of a minibatch has a weight in the policy's loss, or is in the critic's. A collective."""
        tokens = sums.values_2[:1] + sum(policy_pass.kept for policy_pass in passes)
        add_up(tokens, self.group)
        return bool(tokens.item())

    def _warn_empty_steps(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        if self.rank == 0 and (empty := sum(minibatch.is_empty for minibatch in minibatches)):
            log.warning(
                "batch %d: %d of %d optimizer steps were skipped: none of their tokens was left in the loss "
                "(tokens_too_old, equal_groups, filtered_* and rejected_* in metrics.jsonl show why)",
                version,
                empty,
                len(minibatches),
            )

    def _kl_from_proximal(self, sums: Sums) -> float:
        """KL(proximal || current) of a minibatch, k3 per trained token over all ranks. A collective."""
        tokens_5 = sums.tokens_5.clone()
        add_up(tokens_5, self.group)
        return update_statistics_of(tokens_5).k3

    @phase("optimizer")
    def _optimize(self, epoch: Epoch, *, frozen: bool) -> float | None:
        """Clip and step. Returns the gradient's norm, or None if no step is due.

        A step with a gradient that is not finite is counted and skipped. Raises `UpdateError` after too many in a row.
        """
        if epoch.part == "critic" or frozen:
            # No gradient, not zero: the policy and its moments must not change before the critic is trained.
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
        """Count a skipped step if `number`, a gradient norm or a KL, is not finite; return `number`.

        Raises `UpdateError` after `learner.max_bad_steps` in a row.
        """
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

    def _kl_metrics(self, updated: UpdateResult, learner: PolicyOutput, passed_B: Tensor) -> dict[str, float]:
        """The KL of the policy to the reference; adapts `beta` if a target is set, unless the policy was frozen."""
        batch, targets = updated.batch, updated.targets
        if targets.reference_BT is None:
            return {}
        config, mask_BT = self.config.algorithm.kl, batch.mask_BT & passed_B[:, None]
        per_token_BT = kl(learner.logprobs_BT, targets.reference_BT, mask_BT, kind="k3")
        # Importance weights: tokens are of an older policy, or of the engine's arithmetic.
        per_token_BT = per_token_BT * policy_weights(learner.logprobs_BT, batch.behavior_logprobs_BT, mask_BT)
        per_response = (per_token_BT.sum() / passed_B.sum()).item()
        metrics = {"reference_kl": per_response, "kl_beta": self.beta}
        if config.target and not updated.frozen:
            self.beta = next_beta(self.beta, per_response, len(mask_BT), target=config.target, horizon=config.horizon)
        return metrics

    def _move_reference(self, version: int) -> None:
        every = self.config.algorithm.kl.follow_every
        if isinstance(self.reference, Policy) and every and (version + 1) % every == 0:
            follow(self.reference, self.policy, self.config.algorithm.kl.follow_share)
            self.reference_moved = True

    def _exploration_metrics(self, updated: UpdateResult, entropy: float) -> dict[str, float]:
        """The share of selected tokens, and the weight of the entropy bonus; adapts `bonus` if a target is set."""
        metrics, targets = dict[str, float](), updated.targets
        if targets.chosen_BT is not None:
            metrics["singled_out"] = float(targets.chosen_BT.sum()) / max(1.0, float(targets.trained_BT.sum()))
        control = self.config.algorithm.entropy_control
        if not control.target:
            return metrics
        metrics["entropy_weight"] = self.bonus.weight
        # Of a frozen policy the bonus cannot change the entropy.
        if not updated.frozen:
            coefficient, within = self.bonus.coefficient, control.range
            self.bonus = next_bonus(coefficient, entropy, target=control.target, step=control.step, within=within)
        return metrics


def _has_ended(epoch: Epoch, minibatches: Sequence[Minibatch]) -> bool:
    """True if the policy's part of the update has stopped early; a critic with its own steps continues."""
    return epoch.part != "critic" and any(minibatch.stopped_early for minibatch in minibatches)
