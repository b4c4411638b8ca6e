"""One update: a batch in, a better policy out. The same code on one CPU rank and on many GPU ranks.

B trajectories of the batch, T completion tokens (padded). Forward and backward passes are split over ranks and
micro-batches; everything between them (advantages, whitening, corrections, diagnostics) is computed on every rank from
the whole gathered [B, T] batch, so no function of `algorithms` knows that there are ranks.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamppo.algorithms.advantages import Estimate
from streamppo.algorithms.aggregate import Denominators, aggregate, denominators
from streamppo.algorithms.corrections import Correction
from streamppo.algorithms.value_losses import value_loss
from streamppo.config import Config
from streamppo.learner.measure import Sums, batch_metrics
from streamppo.learner.model import Policy, Scored
from streamppo.learner.objective import Objective
from streamppo.learner.packing import Packed, micro_batches


class Targets(NamedTuple):
    """What stays fixed while one batch is trained on, all [B, T] on every rank."""

    proximal: Scored
    estimate: Estimate
    correction: Correction


class Updater:
    """Consumes a packed batch, produces metrics; `policy` and `optimizer` are changed in place.

    Calls on all ranks of `group` are collectives: same batch, same order.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        config: Config,
        *,
        group: dist.ProcessGroup,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.group = group
        self.device = next(policy.parameters()).device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def update(self, batch: Packed) -> dict[str, float]:
        """Train on `batch` for all epochs and minibatches. Returns metrics that are equal on every rank."""
        config, start = self.config.learner, time.perf_counter()
        all_rows = torch.arange(len(batch.reward_B))
        plan = self._plan(batch, all_rows)
        # Where nothing moves between the two passes, the graph of the first serves the second (DESIGN, contract 5).
        single = config.epochs * config.minibatches == 1 and len(plan) == 1
        with torch.set_grad_enabled(single):
            scores = [self._score(batch, rows) for rows in plan]
        targets = self._targets(batch, self._gather(batch, plan, scores))
        scored_s = time.perf_counter() - start
        sums = Sums()
        for epoch in range(config.epochs):
            for rows in self._minibatches(batch, epoch):
                self._step(batch, rows, targets, sums, scores[0] if single else None)
        return {
            **batch_metrics(batch, targets.proximal, targets.estimate, self.config.rollout.max_tokens),
            **sums.means(self.group),
            "lr": self.optimizer.param_groups[0]["lr"],
            "score_s": scored_s,
            "train_s": time.perf_counter() - start - scored_s,
        }

    # --- the pieces ------------------------------------------------------------------------------------------

    def _plan(self, batch: Packed, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`."""
        tokens_B = (batch.start_B + batch.length_B).cpu()
        return micro_batches(rows, tokens_B, self.config.learner.micro_batch_tokens, self.ranks)[self.rank]

    def _minibatches(self, batch: Packed, epoch: int) -> tuple[Tensor, ...]:
        """A split of the rows that depends on seed, version and epoch alone; a whole batch keeps its order."""
        if self.config.learner.minibatches == 1:
            return (torch.arange(len(batch.reward_B)),)
        generator = torch.Generator().manual_seed(hash((self.config.seed, batch.version, epoch)) % 2**63)
        order = torch.randperm(len(batch.reward_B), generator=generator)
        return order.chunk(self.config.learner.minibatches)

    def _score(self, batch: Packed, rows: Tensor) -> Scored:
        """The policy on some rows. An empty micro-batch still passes one row: the pass is a collective."""
        return self.policy(batch.rows(rows if len(rows) else torch.tensor([0])))

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

    def _targets(self, batch: Packed, proximal: Scored) -> Targets:
        estimate = self.objective.advantages(batch, proximal)
        correction = self.objective.correct(proximal.logprobs_BT, batch.behavior_logprobs_BT, batch.mask_BT)
        return Targets(proximal, estimate, correction)

    def _step(self, batch: Packed, rows: Tensor, targets: Targets, sums: Sums, scored: Scored | None) -> None:
        """One optimizer step on the minibatch `rows`."""
        counts = denominators(batch.mask_BT[rows], constant=self.config.rollout.max_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        for piece in self._plan(batch, rows):
            current = scored if scored is not None else self._score(batch, piece)
            loss = self._loss(batch, piece, targets, current, counts, sums)
            # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
            (loss * self.ranks).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.learner.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        sums.add_step(norm.item())
        self.optimizer.step()

    def _loss(
        self, batch: Packed, rows: Tensor, targets: Targets, current: Scored, counts: Denominators, sums: Sums
    ) -> Tensor:
        """This micro-batch's share of the minibatch's loss."""
        config = self.config.algorithm
        if not len(rows):
            # Every parameter takes part in the collective backward, with a gradient of exactly zero.
            return sum(part.sum() * 0.0 for part in current)  # pyright: ignore[reportReturnType]
        cut = _cut(rows, current.logprobs_BT.shape[1])
        mask_bT, fresh_bT = cut(batch.mask_BT), cut(batch.fresh_BT)
        lengths_b = mask_bT.sum(-1)
        proximal_bT = cut(targets.proximal.logprobs_BT)
        policy = self.objective.policy_loss(
            current.logprobs_BT, proximal_bT, cut(targets.estimate.advantages), fresh_bT
        )
        critic = value_loss(
            current.values_BT,
            cut(targets.proximal.values_BT),
            cut(targets.estimate.returns),
            fresh_bT,
            clip=config.value_loss.clip or None,
        )

        def average(loss_bT: Tensor) -> Tensor:
            return aggregate(loss_bT, fresh_bT, config.aggregation, counts, lengths_b)

        losses = {
            "policy_loss": average(policy.loss * cut(targets.correction.weights)),
            "value_loss": average(critic.loss),
            "entropy": average(current.entropy_BT),
        }
        sums.add(losses, policy, current.logprobs_BT - proximal_bT, fresh_bT)
        critic_term = config.value_loss.coefficient * losses["value_loss"]
        return losses["policy_loss"] + critic_term - config.entropy * losses["entropy"]


def _cut(rows: Tensor, width_T: int) -> Callable[[Tensor], Tensor]:
    """[B, T] -> the rows of a micro-batch, as wide as its longest."""
    return lambda whole_BT: whole_BT[rows, :width_T]
