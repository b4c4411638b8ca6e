"""From the configuration's adaptive lag to the rule of `algorithms.lag`, and to its metrics."""

from collections.abc import Mapping

from streamppo.algorithms.diagnostics import LAG_BUCKETS
from streamppo.algorithms.lag import Lag, next_lag
from streamppo.config.queue import AdaptiveLag
from streamppo.config.sections import Config


def go_on(config: Config, lag: Lag | None) -> Lag | None:
    """The lag to go on with under `config`, from that of an earlier one; None where it is not steered."""
    first, at_most = config.queue.first_lag, config.queue.flow_lag
    if first is None:
        return None
    return Lag(first) if lag is None else lag._replace(admitted=min(lag.admitted, at_most))


def steered(
    config: Config, lag: Lag, version: int, metrics: Mapping[str, float], tokens_by_lag: Mapping[int, int]
) -> Lag:
    """The lag after the update from `version`, of the batch that `metrics` describe.

    A policy that stands still is on-policy at any lag, which says nothing.
    """
    chosen = config.queue.max_lag
    if not isinstance(chosen, AdaptiveLag) or version < config.algorithm.critic.warmup_updates:
        return lag
    named = {name: metrics[f"ess_lag_{name}"] for name in LAG_BUCKETS if f"ess_lag_{name}" in metrics}
    return next_lag(lag, named, tokens_by_lag, at_most=config.queue.flow_lag, ess=chosen.ess)
