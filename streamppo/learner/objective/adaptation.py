"""The quantities that adapt from update to update, by the metrics of the last update.

    lag      the admitted lag adapts to the effective sample size at each lag, by the rule of `algorithms.lag`
    beta     the weight of the KL in the reward adapts to the KL to the reference
    bonus    the entropy bonus adapts to the policy's entropy

An update with a frozen policy changes none of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from streamppo.algorithms.diagnostics import LAG_BUCKETS
from streamppo.algorithms.exploration import Bonus, next_bonus
from streamppo.algorithms.kl import next_beta
from streamppo.algorithms.lag import AdmittedLag, next_lag
from streamppo.config.queue import AdaptiveLag
from streamppo.config.sections import Config


class UpdaterState(NamedTuple):
    """The state of an updater between two updates, except weights and moments.

    `beta` weights the KL in the reward; it is 0, and `bonus` None, unless they are adaptive. `bad_steps` counts the
    consecutive skipped optimizer steps, of the policy and of a critic that makes separate steps. `reference_moved` is
    True if the reference is no longer the run's first model.
    """

    beta: float
    bad_steps: tuple[int, int] = (0, 0)
    bonus: Bonus | None = None
    reference_moved: bool = False


def lag_under(config: Config, lag: AdmittedLag | None) -> AdmittedLag | None:
    """The first lag under a new `config`, after the previous `lag`; None unless the lag is adaptive."""
    first, at_most = config.queue.first_lag, config.queue.flow_lag
    if first is None:
        return None
    return AdmittedLag(first) if lag is None else lag._replace(admitted=min(lag.admitted, at_most))


def lag_after_update(
    config: Config, lag: AdmittedLag, metrics: Mapping[str, float], tokens_by_lag: Mapping[int, int]
) -> AdmittedLag:
    """The lag to use after an update on a batch with these `metrics`."""
    chosen = config.queue.max_lag
    if not isinstance(chosen, AdaptiveLag):
        return lag
    ess_by_bucket = {name: metrics[f"ess_lag_{name}"] for name in LAG_BUCKETS if f"ess_lag_{name}" in metrics}
    return next_lag(lag, ess_by_bucket, tokens_by_lag, at_most=config.queue.flow_lag, ess=chosen.ess)


def beta_after_update(config: Config, beta: float, metrics: Mapping[str, float], num_trajectories: int) -> float:
    """The weight of the KL in the reward after an update with these `metrics`."""
    kl = config.algorithm.kl
    if not kl.target or "reference_kl" not in metrics:
        return beta
    return next_beta(beta, metrics["reference_kl"], num_trajectories, target=kl.target, horizon=kl.horizon)


def bonus_after_update(config: Config, bonus: Bonus, metrics: Mapping[str, float]) -> Bonus:
    """The entropy bonus after an update with these `metrics`."""
    control = config.algorithm.entropy_control
    if not control.target or "entropy" not in metrics:
        return bonus
    coefficient, entropy = bonus.coefficient, metrics["entropy"]
    return next_bonus(coefficient, entropy, target=control.target, step=control.step, within=control.range)


def is_lowered_by_ess(config: Config) -> bool:
    """True if the effective sample size lowers the learning rate, which needs a pass before the first step."""
    automatic = config.queue.first_lag is not None and config.algorithm.proximal == "recompute"
    return automatic if config.learner.lr_by_ess == "auto" else config.learner.lr_by_ess == "on"
