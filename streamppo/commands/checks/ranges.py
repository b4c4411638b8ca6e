"""Usual ranges of settings: a run with a number far outside hardly ever learns. No torch, no transformers.

The ranges are those of the shipped configurations, of the docs and of published runs; each note names its own.
"""

from collections.abc import Callable
from typing import NamedTuple

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.algorithm import Gae, VTrace
from streamppo.config.correction import Truncate
from streamppo.config.policy_loss import Clip
from streamppo.config.sections import Config


class Range(NamedTuple):
    """A setting, the bounds beyond which it is noted, and the usual range in words. `of` is None where it is unused."""

    name: str
    low: float
    high: float
    usual: str
    of: Callable[[Config], float | None]


def _critic_lr(config: Config) -> float | None:
    return config.algorithm.critic.lr or None


def _lam(config: Config) -> float | None:
    advantage = config.algorithm.advantage
    return advantage.lam if isinstance(advantage, Gae | VTrace) else None


def _gamma(config: Config) -> float | None:
    return getattr(config.algorithm.advantage, "gamma", None)


def _upper_clip(config: Config) -> float | None:
    loss = config.algorithm.policy_loss
    return loss.range[1] if isinstance(loss, Clip) else None


def _cap(config: Config) -> float | None:
    correction = config.algorithm.correction
    return correction.cap if isinstance(correction, Truncate) else None


ANY = float("inf")
RATES = "from 1e-6 for weights of a billion to 1e-3 for those of 0.1 million"
RANGES = (
    Range("learner.lr", 1e-9, 1e-2, RATES, lambda config: config.learner.lr),
    Range("algorithm.critic.lr", 1e-9, 3e-2, "from 1e-6 to 3e-3", _critic_lr),
    Range("learner.max_grad_norm", 1e-3, ANY, "from 0.1 to 1", lambda config: config.learner.max_grad_norm),
    Range("learner.weight_decay", 0.0, 1.0, "from 0 to 0.1", lambda config: config.learner.weight_decay),
    Range("learner.epochs", 1, 20, "from 1 to 4", lambda config: config.learner.epochs),
    Range("rollout.temperature", 0.2, 2.0, "from 0.6 to 1.2", lambda config: config.rollout.temperature),
    Range("rollout.top_p", 0.3, 1.0, "from 0.9 to 1", lambda config: config.rollout.top_p),
    Range("queue.max_lag", 0, 64, "from 0 to 16", lambda config: config.queue.bound),
    Range("algorithm.entropy", -0.1, 0.3, "from 0 to 0.01", lambda config: config.algorithm.entropy),
    Range("algorithm.kl.loss_beta", 0.0, 1.0, "from 0.001 to 0.1", lambda config: config.algorithm.kl.loss_beta),
    Range("algorithm.kl.reward_beta", 0.0, 1.0, "from 0.001 to 0.1", lambda config: config.algorithm.kl.reward_beta),
    Range(
        "algorithm.critic.coefficient", 0.0, 10.0, "from 0.1 to 1", lambda config: config.algorithm.critic.coefficient
    ),
    Range("algorithm.positive_nll", 0.0, 2.0, "about 0.1", lambda config: config.algorithm.positive_nll),
    Range("algorithm.target_kl", 0.0, 1.0, "from 0.01 to 0.1", lambda config: config.algorithm.target_kl),
    Range("algorithm.advantage.lam", 0.5, 1.0, "from 0.9 to 1", _lam),
    Range("algorithm.advantage.gamma", 0.9, 1.0, "from 0.99 to 1", _gamma),
    Range("algorithm.policy_loss.range", 0.001, 2.0, "from 0.1 to 0.4", _upper_clip),
    Range("algorithm.correction.cap", 0.0, 50.0, "from 1 to 10", _cap),
)
"""All ranges, by section."""


def notes(config: Config) -> Findings:
    """Note each setting outside its range, with its number and the usual ones."""
    for usual in RANGES:
        value = usual.of(config)
        if value is not None and not usual.low <= value <= usual.high:
            side = "above" if value > usual.high else "below"
            text = f"{usual.name} ({value:g}) is far {side} what learns as a rule: {usual.usual}"
            yield Finding("settings", "note", text)
