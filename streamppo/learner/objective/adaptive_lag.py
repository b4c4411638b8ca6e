"""The lag and the learning rate follow the age of the data: the lag by the rule of `algorithms.lag`."""

import math
from collections.abc import Mapping

import torch

from streamppo.algorithms.diagnostics import LAG_BUCKETS, OffPolicy, off_policy
from streamppo.algorithms.lag import AdmittedLag, next_lag
from streamppo.config.queue import AdaptiveLag
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.model.optimizer import lower_policy
from streamppo.learner.model.policy import PolicyOutput


def go_on(config: Config, lag: AdmittedLag | None) -> AdmittedLag | None:
    """The lag under a new `config`, from the `lag` under the previous one; None if the lag is not adaptive."""
    first, at_most = config.queue.first_lag, config.queue.flow_lag
    if first is None:
        return None
    return AdmittedLag(first) if lag is None else lag._replace(admitted=min(lag.admitted, at_most))


def lag_after_update(
    config: Config, lag: AdmittedLag, metrics: Mapping[str, float], tokens_by_lag: Mapping[int, int], *, frozen: bool
) -> AdmittedLag:
    """The lag after an update; `metrics` are those of its batch.

    It is unchanged if the policy was `frozen`: the data is then on-policy at any lag.
    """
    chosen = config.queue.max_lag
    if not isinstance(chosen, AdaptiveLag) or frozen:
        return lag
    ess_by_bucket = {name: metrics[f"ess_lag_{name}"] for name in LAG_BUCKETS if f"ess_lag_{name}" in metrics}
    return next_lag(lag, ess_by_bucket, tokens_by_lag, at_most=config.queue.flow_lag, ess=chosen.ess)


def is_lowered_by_ess(config: Config) -> bool:
    """Return True if the learning rate follows the effective sample size; this needs a pass before the first step."""
    automatic = config.queue.first_lag is not None and config.algorithm.proximal == "recompute"
    return automatic if config.learner.lr_by_ess == "auto" else config.learner.lr_by_ess == "on"


def lower_by_ess(
    config: Config, optimizer: torch.optim.Optimizer, batch: PaddedBatch, scored: PolicyOutput
) -> OffPolicy | None:
    """Lower the policy's learning rate for the update on `batch` and return the diagnostics; None if `config` has none.

        W     = proximal / behavior of each of n sequences
        rate *= sqrt(sum(W)^2 / (n sum(W^2)))

    The factor is the root of the effective sample size: AdamW's step is to grow with the root of the number of samples
    in a gradient (VCPO, https://arxiv.org/abs/2602.17616). On-policy the factor is 1.
    """
    if not is_lowered_by_ess(config):
        return None
    divergences = off_policy(scored.logprobs_BT, batch.behavior_logprobs_BT, batch.mask_BT, batch.lag_BT)
    lower_policy(optimizer, math.sqrt(divergences.overall.ess_sequence))
    return divergences
