"""One update: a batch in, a better policy out. The same code on one CPU rank and on many GPU ranks.

B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded). Forward and backward passes are
split over ranks and micro-batches; everything between them (advantages, whitening, corrections, diagnostics) is
computed on every rank from the whole gathered [B, T] batch, so no function of `algorithms` knows that there are ranks.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamppo.algorithms.advantages import Estimate
from streamppo.algorithms.aggregate import Denominators, aggregate, denominators
from streamppo.algorithms.checks import check_logprobs
from streamppo.algorithms.corrections import Correction
from streamppo.algorithms.groups import zero_variance
from streamppo.algorithms.kl import kl, kl_loss, kl_reward, next_beta, stop_early
from streamppo.algorithms.value_losses import value_loss
from streamppo.config import Config
from streamppo.errors import UpdateError
from streamppo.learner.measure import Sums, batch_metrics
from streamppo.learner.model import Policy, Scored
from streamppo.learner.objective import Objective
from streamppo.learner.packing import Packed, micro_batches


class Targets(NamedTuple):
    """What stays fixed while one batch is trained on, all [B, T] on every rank.

    `trained_BT` are the tokens that enter the loss: sampled by the policy, young enough, of a group that teaches.
    """

    proximal: Scored
    estimate: Estimate
    correction: Correction
    trained_BT: Tensor
    reference_BT: Tensor | None


class Updater:
    """Consumes a packed batch, produces metrics; `policy` and `optimizer` are changed in place.

    Calls on all ranks of `group` are collectives: same batch, same order. `beta` is the weight of the KL in the reward.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        config: Config,
        *,
        group: dist.ProcessGroup,
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.group = group
        self.reference = reference
        self.beta = config.algorithm.kl.reward_beta
        self.device = next(policy.parameters()).device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._bad_steps = 0

    def update(self, batch: Packed) -> dict[str, float]:
        """Train on `batch` for all epochs and minibatches. Returns metrics that are equal on every rank.

        Raises `UpdateError` for data that must not be trained on, and for gradients that stay non-finite.
        """
        config, start = self.config.learner, time.perf_counter()
        plan = self._plan(batch, torch.arange(len(batch.reward_B)))
        # Where nothing moves between the two passes, the graph of the first serves the second (DESIGN, contract 5).
        single = config.epochs * config.minibatches == 1 and len(plan) == 1
        with torch.set_grad_enabled(single):
            scores = [self._score(self.policy, batch, rows) for rows in plan]
        proximal = self._gather(batch, plan, scores)
        try:
            targets = self._targets(batch, proximal, self._reference(batch, plan))
        except ValueError as error:
            raise UpdateError(f"batch {batch.version} cannot be trained on: {error}") from error
        scored_s = time.perf_counter() - start
        sums = Sums(batch.mask_BT, self.group)
        self._optimize(batch, targets, sums, scores[0] if single else None)
        return {
            **batch_metrics(batch, proximal, targets.estimate, targets.trained_BT),
            **sums.means(),
            **self._kl_metrics(batch, targets),
            "lr": self.optimizer.param_groups[0]["lr"],
            "score_s": scored_s,
            "train_s": time.perf_counter() - start - scored_s,
        }

    # --- before the first step -------------------------------------------------------------------------------

    def _plan(self, batch: Packed, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`."""
        tokens_B = (batch.start_B + batch.length_B).cpu()
        return micro_batches(rows, tokens_B, self.config.learner.micro_batch_tokens, self.ranks)[self.rank]

    def _score(self, policy: Policy, batch: Packed, rows: Tensor) -> Scored:
        """`policy` on some rows. An empty micro-batch still passes one row: the pass is a collective."""
        return policy(batch.rows(rows if len(rows) else torch.tensor([0])))

    def _gather(self, batch: Packed, plan: list[Tensor], scores: list[Scored]) -> Scored:
        """The scores of every rank's rows, whole and detached, on every rank."""
        zeros_BT, zeros_B = torch.zeros_like(batch.behavior_logprobs_BT), torch.zeros_like(batch.reward_B)
        whole = Scored(zeros_BT, zeros_BT.clone(), zeros_BT.clone(), zeros_B)
        for rows, scored in zip(plan, scores, strict=True):
            for into, part in zip(whole, scored, strict=True):
                where = (rows, slice(part.shape[1])) if part.dim() == 2 else (rows,)
                into[where] = part[: len(rows)].detach().to(into.dtype)
        for column in whole:
            dist.all_reduce(column, group=self.group)
        return whole

    def _reference(self, batch: Packed, plan: list[Tensor]) -> Tensor | None:
        """Log-probs of the run's first model, once a batch."""
        if self.reference is None:
            return None
        with torch.no_grad():
            scores = [self._score(self.reference, batch, rows) for rows in plan]
        return self._gather(batch, plan, scores).logprobs_BT

    def _targets(self, batch: Packed, proximal: Scored, reference_BT: Tensor | None) -> Targets:
        config, mask_BT = self.config.algorithm, batch.mask_BT
        check_logprobs(mask_BT, proximal=proximal.logprobs_BT, behavior=batch.behavior_logprobs_BT)
        rewards_BT = batch.rewards_BT
        if reference_BT is not None and self.beta:
            rewards_BT = kl_reward(
                rewards_BT,
                proximal.logprobs_BT,
                reference_BT,
                mask_BT,
                beta=self.beta,
                kind=config.kl.reward_estimator,
            )
        trained_BT = batch.fresh_BT
        if config.zero_variance == "mask":
            trained_BT = trained_BT & ~zero_variance(batch.reward_B, batch.prompt_B)[:, None]
        return Targets(
            proximal,
            self.objective.advantages(batch, proximal, rewards_BT),
            self.objective.correct(proximal.logprobs_BT, batch.behavior_logprobs_BT, mask_BT),
            trained_BT,
            reference_BT,
        )

    # --- steps -----------------------------------------------------------------------------------------------

    def _optimize(self, batch: Packed, targets: Targets, sums: Sums, scored: Scored | None) -> None:
        """All epochs and minibatches, or as many as `target_kl` allows."""
        target_kl = self.config.algorithm.target_kl or None
        for epoch in range(self.config.learner.epochs):
            for rows in self._minibatches(batch, epoch):
                approximate_kl = self._backward(batch, rows, targets, sums, scored)
                if stop_early(approximate_kl, target_kl):
                    sums.stopped_early = 1
                    return
                self._step(sums)

    def _minibatches(self, batch: Packed, epoch: int) -> tuple[Tensor, ...]:
        """A split of the rows that depends on seed, version and epoch alone; a whole batch keeps its order."""
        if self.config.learner.minibatches == 1:
            return (torch.arange(len(batch.reward_B)),)
        generator = torch.Generator().manual_seed(hash((self.config.seed, batch.version, epoch)) % 2**63)
        order = torch.randperm(len(batch.reward_B), generator=generator)
        return order.chunk(self.config.learner.minibatches)

    def _backward(self, batch: Packed, rows: Tensor, targets: Targets, sums: Sums, scored: Scored | None) -> float:
        """Gradients of the minibatch `rows`. Returns KL(proximal || current) on it, if anybody looks at it."""
        counts = denominators(batch.mask_BT[rows], constant=self.config.rollout.max_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        before = sums.update.clone()
        for piece in self._plan(batch, rows):
            current = scored if scored is not None else self._score(self.policy, batch, piece)
            # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
            (self._loss(batch, piece, targets, current, counts, sums) * self.ranks).backward()
        return sums.kl_since(before) if self.config.algorithm.target_kl else 0.0

    def _loss(
        self, batch: Packed, rows: Tensor, targets: Targets, current: Scored, counts: Denominators, sums: Sums
    ) -> Tensor:
        """This micro-batch's share of the minibatch's loss."""
        if not len(rows):
            # Every parameter takes part in the collective backward, with a gradient of exactly zero.
            return sum(part.sum() * 0.0 for part in current)  # pyright: ignore[reportReturnType]
        config, cut = self.config.algorithm, _cut(rows, current.logprobs_BT.shape[1])
        trained_bT, lengths_b = cut(targets.trained_BT), cut(batch.mask_BT).sum(-1)
        proximal_bT = cut(targets.proximal.logprobs_BT)

        def average(loss_bT: Tensor) -> Tensor:
            return aggregate(loss_bT, trained_bT, config.aggregation, counts, lengths_b)

        policy = self.objective.policy_loss(
            current.logprobs_BT, proximal_bT, cut(targets.estimate.advantages), trained_bT
        )
        losses = {
            "policy_loss": average(policy.loss * cut(targets.correction.weights)),
            "entropy": average(current.entropy_BT),
        }
        total = losses["policy_loss"] - config.entropy * losses["entropy"]
        if self.objective.has_critic:
            critic = value_loss(
                current.values_BT,
                cut(targets.proximal.values_BT),
                cut(targets.estimate.returns),
                trained_bT,
                clip=config.critic.clip or None,
                kind=config.critic.loss,
                huber_delta=config.critic.huber_delta,
            )
            losses["value_loss"] = average(critic.loss)
            losses["value_clip_fraction"] = average(critic.clipped.float())
            total = total + config.critic.coefficient * losses["value_loss"]
        if targets.reference_BT is not None and config.kl.loss_beta:
            divergence_bT = kl_loss(
                current.logprobs_BT,
                cut(targets.reference_BT),
                trained_bT,
                kind=config.kl.loss_estimator,
                straight_through=config.kl.straight_through,
            )
            total = total + config.kl.loss_beta * average(divergence_bT)
        sums.add(rows, losses, policy, current.logprobs_BT, proximal_bT, trained_bT)
        return total

    def _step(self, sums: Sums) -> None:
        """Clip and step; a gradient that is not finite is counted and left out."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.learner.max_grad_norm)
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if math.isfinite(value):
            self._bad_steps = 0
            sums.add_step(value)
            self.optimizer.step()
            return
        self._bad_steps += 1
        sums.bad_steps += 1
        if self._bad_steps >= self.config.learner.max_bad_steps:
            raise UpdateError(f"the gradient was not finite in {self._bad_steps} optimizer steps in a row")

    def _kl_metrics(self, batch: Packed, targets: Targets) -> dict[str, float]:
        """How far the policy is from the reference; steers `beta` where a target is set."""
        if targets.reference_BT is None:
            return {}
        config, mask_BT = self.config.algorithm.kl, batch.mask_BT
        per_token_BT = kl(targets.proximal.logprobs_BT, targets.reference_BT, mask_BT, kind="k3")
        per_response = (per_token_BT.sum() / len(mask_BT)).item()
        metrics = {"reference_kl": per_response, "kl_beta": self.beta}
        if config.target:
            self.beta = next_beta(self.beta, per_response, len(mask_BT), target=config.target, horizon=config.horizon)
        return metrics


def _cut(rows: Tensor, width_T: int) -> Callable[[Tensor], Tensor]:
    """[B, T] -> the rows of a micro-batch, as wide as its longest."""
    return lambda whole_BT: whole_BT[rows, :width_T]
