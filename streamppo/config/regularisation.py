"""The regularisers of `[algorithm]`: the KL to a reference, the entropy bonus, exploration by single tokens.

Equations are in docs/algorithms.md.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from streamppo.config.base import Count, Kind, NonNegative, Positive, PositiveFloat, Section, Share


class Kl(Section, frozen=True):
    """KL of the policy to a reference model: the run's initial model, which may follow the policy."""

    reward_beta: NonNegative = 0.0
    """Weight of the KL that is subtracted from each token's reward; 0 is off."""
    reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward."""
    loss_beta: NonNegative = 0.0
    """Weight of the KL in the loss; 0 is off."""
    loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss."""
    straight_through: bool = False
    """Use the loss estimator's value with the gradient of k2."""
    target: NonNegative = 0.0
    """Above 0, reward_beta is adapted to keep the KL per response near this, in nats (arXiv:1909.08593)."""
    horizon: Positive = 10_000
    """Time constant of the controller, in trajectories."""
    allow_both: bool = False
    """Allow both reward_beta and loss_beta above 0."""
    follow_every: Count = 0
    """Updates between two moves of the reference towards the policy (arXiv:2404.09656); 0 is off."""
    follow_share: Share = 1.0
    """Share of the distance that one move covers."""
    offload: bool = False
    """Keep the reference in CPU memory, and copy it layer by layer to the GPU."""

    def contradictions(self) -> Iterator[str]:
        if self.reward_beta and self.loss_beta and not self.allow_both:
            yield "KL in reward and loss at once over-regularises: set algorithm.kl.allow_both = true"
        if self.loss_beta and self.loss_estimator == "k1" and not self.straight_through:
            yield (
                "loss_estimator 'k1' in the loss has a gradient that is 0 on average, and so no effect: choose "
                "'k2' or 'k3', or straight_through = true"
            )
        if self.target and not self.reward_beta:
            yield f"target ({self.target}) adapts reward_beta, which is 0"
        if self.follow_every and not self.on:
            yield f"follow_every ({self.follow_every}) moves a reference: set reward_beta or loss_beta"
        if self.follow_share != 1 and not self.follow_every:
            yield f"follow_share ({self.follow_share:g}) has no effect without follow_every"

    @property
    def on(self) -> bool:
        """True if a reference model is needed."""
        return self.reward_beta > 0 or self.loss_beta > 0


class NoExploration(Kind, frozen=True, tag="off"):
    """No exploration."""


class TopEntropy(Kind, frozen=True, tag="top_entropy"):
    """Only tokens with the highest policy entropy enter the policy's loss (arXiv:2506.01939)."""

    share: Share = 0.2
    """Share of the trained tokens that enter the policy's loss."""


class ClipCov(Kind, frozen=True, tag="clip_cov"):
    """Drops a few random tokens from the policy's loss, among those with a high covariance (arXiv:2505.22617)."""

    share: Share = 0.0002
    """Share of the trained tokens that are dropped, but at least one token."""
    band: tuple[float, float] = (1.0, 5.0)
    """[smallest, largest] covariance of advantage and log-prob of a dropped token."""

    def contradictions(self) -> Iterator[str]:
        if not self.band[0] < self.band[1]:
            yield f"band must rise: {self.band[0]} is not below {self.band[1]}"


class KlCov(Kind, frozen=True, tag="kl_cov"):
    """Penalises the KL to the proximal policy for tokens with the highest covariance (arXiv:2505.22617)."""

    share: Share = 0.002
    """Share of the trained tokens with this loss, but at least one token."""
    coefficient: PositiveFloat = 1.0
    """Weight of KL(proximal || current) in the policy's loss."""


Exploration: TypeAlias = NoExploration | TopEntropy | ClipCov | KlCov


class EntropyControl(Section, frozen=True):
    """Controls the weight of the entropy bonus, which begins at `entropy` (Skywork-OR1, arXiv:2505.22312)."""

    target: NonNegative = 0.0
    """Above 0, the bonus applies only up to this entropy, in nats per token."""
    step: PositiveFloat = 0.005
    """The weight rises by this after an update with an entropy of at most the target, and otherwise falls."""
    range: tuple[NonNegative, NonNegative] = (0.0, 1.0)
    """[smallest, largest] weight."""

    def contradictions(self) -> Iterator[str]:
        if not self.range[0] < self.range[1]:
            yield f"range must rise: {self.range[0]} is not below {self.range[1]}"
