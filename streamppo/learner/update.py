"""One update: a batch in, a better policy out. The same code on one CPU rank and on many GPU ranks.

B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded). Forward and backward passes are
split over ranks and micro-batches; everything between them (advantages, whitening, corrections, diagnostics) is
computed on every rank from the whole gathered [B, T] batch, so no function of `algorithms` knows that there are ranks.
"""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.aggregate import denominators
from streamppo.algorithms.checks import check_any, check_finite, check_logprobs
from streamppo.algorithms.groups import zero_variance
from streamppo.algorithms.kl import kl, kl_reward, next_beta, stop_early
from streamppo.algorithms.value_losses import explained_variance
from streamppo.config.sections import Config
from streamppo.errors import UpdateError
from streamppo.learner import attention
from streamppo.learner.batch import Packed, micro_batches
from streamppo.learner.loss import Loss, Targets
from streamppo.learner.metrics import Sums, batch_metrics
from streamppo.learner.objective import Objective, Phase
from streamppo.learner.optimizer import clip
from streamppo.learner.policy import Part, Policy, Scored, nothing, release


class Updated(NamedTuple):
    """Metrics, equal on every rank but for times, and what the critic, if there is one, said of the batch before."""

    metrics: dict[str, float]
    values_BT: Tensor | None


class Updater:
    """Consumes a packed batch, produces metrics; `policy` and `optimizer` are changed in place.

    Calls on all ranks of `group` are collectives: same batch, same order. `beta` is the weight of the KL in the reward;
    `beta` and `bad_steps`, the optimizer steps in a row that were left out, are all that it remembers of past batches.
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
        self.bad_steps = 0

    def remember(self, beta: float, bad_steps: int) -> None:
        """What an updater before this one knew: bad steps in a row, and `beta` if it adapts itself and was at work."""
        self.bad_steps = bad_steps
        if self.config.algorithm.kl.target and beta:
            self.beta = beta

    def update(self, batch: Packed) -> Updated:
        """Train on `batch` for all epochs and minibatches.

        Raises `UpdateError` for data that must not be trained on, and for gradients that stay non-finite.
        """
        start = time.perf_counter()
        targets, graph = self._prepared(batch)
        scored_s = time.perf_counter() - start
        sums = Sums(batch.mask_BT, self.group)
        loss = Loss(self.objective, self.config, batch, targets, sums)
        for phase in self.objective.phases:
            self._optimize(phase, loss, None if phase.part == "critic" else graph)
        scored, passed_B = targets.scored, torch.ones_like(batch.truncated_B)
        if self.objective.anchor is not None:
            first_BT, passed_B = sums.first_logprobs()
            scored = scored._replace(logprobs_BT=first_BT)
        metrics = {
            **batch_metrics(batch, scored, passed_B, targets.estimate, targets.trained_BT),
            **sums.means(),
            **self._kl_metrics(batch, targets, scored, passed_B),
            "lr": self.optimizer.param_groups[0]["lr"],
            "score_s": scored_s,
            "train_s": time.perf_counter() - start - scored_s,
        }
        return Updated(metrics, scored.values_BT if self.config.algorithm.has_critic else None)

    def pretrain(self, batch: Packed) -> float:
        """Teach the critic alone the returns of `batch`, which may be another run's.

        Returns the share of their variance that it explained before. A collective; raises `UpdateError` like `update`.
        """
        # At lag 0 the learner's own weights sampled a token. Another run's never did.
        batch = batch._replace(lag_BT=batch.lag_BT + 1)
        targets, _ = self._prepared(batch)
        loss = Loss(self.objective, self.config, batch, targets, Sums(batch.mask_BT, self.group))
        self._optimize(self.objective.phases[-1]._replace(part="critic"), loss, None)
        return explained_variance(targets.scored.values_BT, targets.estimate.returns, batch.mask_BT)

    # --- before the first step -------------------------------------------------------------------------------

    def _prepared(self, batch: Packed) -> tuple[Targets, Scored | None]:
        """What stays fixed while `batch` is trained on, and the graph of the pass that found it, if that can be used.

        Raises `UpdateError` for data that must not be trained on.
        """
        plan = self._plan(batch, torch.arange(len(batch.reward_B)))
        scored, graph = self._before(batch, plan)
        try:
            return self._targets(batch, scored, self._reference(batch, plan)), graph
        except ValueError as error:
            raise UpdateError(f"batch {batch.version} cannot be trained on: {error}") from error

    def _plan(self, batch: Packed, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`."""
        tokens_B, budget = (batch.start_B + batch.length_B).cpu(), self.config.learner.micro_batch_tokens
        is_padded = self.policy.layout is attention.padded
        return micro_batches(rows, tokens_B, budget, self.ranks, padded=is_padded)[self.rank]

    def _before(self, batch: Packed, plan: list[Tensor]) -> tuple[Scored, Scored | None]:
        """What must be known of the whole batch; and the graph of that pass, where nothing moves before its step."""
        part, first = self.objective.scored, self.objective.phases[0]
        if part is None:
            return nothing(batch), None
        single = part != "critic" and first.epochs * first.minibatches == 1 and len(plan) == 1
        with torch.set_grad_enabled(single):
            scores = [self._score(self.policy, batch, rows, part) for rows in plan]
        return self._gather(batch, plan, scores), scores[0] if single else None

    def _score(self, policy: Policy, batch: Packed, rows: Tensor, part: Part) -> Scored:
        """`policy` on some rows. An empty micro-batch still passes one row: the pass is a collective."""
        return policy(batch.rows(rows if len(rows) else torch.tensor([0])), part)

    def _gather(self, batch: Packed, plan: list[Tensor], scores: list[Scored]) -> Scored:
        """The scores of every rank's rows, whole and detached, on every rank."""
        whole = nothing(batch)
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
            scores = [self._score(self.reference, batch, rows, "policy") for rows in plan]
        release(self.reference)
        return self._gather(batch, plan, scores).logprobs_BT

    def _targets(self, batch: Packed, scored: Scored, reference_BT: Tensor | None) -> Targets:
        config, mask_BT = self.config.algorithm, batch.mask_BT
        check_any(mask_BT)
        check_logprobs(mask_BT, proximal=scored.logprobs_BT, behavior=batch.behavior_logprobs_BT)
        rewards_BT = batch.rewards_BT
        check_finite(mask_BT, rewards=rewards_BT, values=scored.values_BT)
        check_finite(torch.ones_like(batch.truncated_B), bootstrap=scored.bootstrap_B)
        if reference_BT is not None:
            check_logprobs(mask_BT, reference=reference_BT)
        if reference_BT is not None and config.kl.reward_beta:
            rewards_BT = kl_reward(
                rewards_BT,
                scored.logprobs_BT,
                reference_BT,
                mask_BT,
                beta=self.beta,
                kind=config.kl.reward_estimator,
            )
        trained_BT = batch.fresh_BT
        if config.zero_variance == "mask":
            trained_BT = trained_BT & ~zero_variance(batch.reward_B, batch.prompt_B)[:, None]
        estimate = self.objective.advantages(batch, scored, rewards_BT)
        correction = None
        if self.objective.anchor is None:
            correction = self.objective.correct(scored.logprobs_BT, batch.behavior_logprobs_BT, mask_BT)
        return Targets(scored, estimate, correction, trained_BT, reference_BT)

    # --- steps -----------------------------------------------------------------------------------------------

    def _optimize(self, phase: Phase, loss: Loss, graph: Scored | None) -> None:
        """All epochs and minibatches of a phase, or as many as `target_kl` allows; a critic alone moves no policy."""
        target_kl = self.config.algorithm.target_kl or None
        for epoch in range(phase.epochs):
            for rows in self._minibatches(loss.batch, epoch, phase.minibatches):
                before = loss.sums.update.clone()
                self._backward(rows, phase, loss, graph)
                if target_kl is not None and stop_early(loss.sums.kl_since(before), target_kl):
                    loss.sums.stopped_early = 1
                    return
                self._step(phase, loss)

    def _minibatches(self, batch: Packed, epoch: int, count: int) -> tuple[Tensor, ...]:
        """A split of the rows that depends on seed, version and epoch alone; a whole batch keeps its order."""
        if count == 1:
            return (torch.arange(len(batch.reward_B)),)
        generator = torch.Generator().manual_seed(hash((self.config.seed, batch.version, epoch)) % 2**63)
        return torch.randperm(len(batch.reward_B), generator=generator).chunk(count)

    def _backward(self, rows: Tensor, phase: Phase, loss: Loss, graph: Scored | None) -> None:
        """The gradient of the minibatch `rows`, in place of the one before."""
        counts = denominators(loss.batch.mask_BT[rows], constant=self.config.rollout.max_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.sums.begin(rows, phase.part)
        for piece in self._plan(loss.batch, rows):
            current = graph if graph is not None else self._score(self.policy, loss.batch, piece, phase.part)
            # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
            (loss.of(piece, phase.part, current, counts) * self.ranks).backward()

    def _step(self, phase: Phase, loss: Loss) -> None:
        """Clip and step; a gradient that is not finite is counted and left out."""
        sums = loss.sums
        if phase.part == "critic" or loss.batch.version < self.config.algorithm.critic.warmup_updates:
            # Without a gradient the policy stands still, and its moments do not learn from an untaught critic.
            for parameter in self.policy.lm.parameters():
                parameter.grad = None
            if phase.part == "policy":
                return
        norm = clip(self.policy.parameters(), phase.max_grad_norm, self.config.learner.norm, self.group)
        if math.isfinite(norm):
            self.bad_steps = 0
            sums.add_step(norm, critic=phase.part == "critic")
            self.optimizer.step()
            return
        self.bad_steps += 1
        sums.bad_steps += 1
        if self.bad_steps >= self.config.learner.max_bad_steps:
            raise UpdateError(f"the gradient was not finite in {self.bad_steps} optimizer steps in a row")

    def _kl_metrics(self, batch: Packed, targets: Targets, learner: Scored, passed_B: Tensor) -> dict[str, float]:
        """How far the policy is from the reference; steers `beta` where a target is set."""
        if targets.reference_BT is None:
            return {}
        config, mask_BT = self.config.algorithm.kl, batch.mask_BT & passed_B[:, None]
        per_token_BT = kl(learner.logprobs_BT, targets.reference_BT, mask_BT, kind="k3")
        per_response = (per_token_BT.sum() / passed_B.sum()).item()
        metrics = {"reference_kl": per_response, "kl_beta": self.beta}
        if config.target:
            self.beta = next_beta(self.beta, per_response, len(mask_BT), target=config.target, horizon=config.horizon)
        return metrics
