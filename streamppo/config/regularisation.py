"""The regularisers of `[algorithm]`: the KL to a reference, the entropy bonus, exploration by single tokens.

Equations are in docs/algorithms.md.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from streamppo.config.base import Count, Kind, NonNegative, Positive, PositiveFloat, Section, Share


class Kl(Section, frozen=True):
    """KL of the policy from a reference: the run's first model, or one that follows the policy."""

    reward_beta: NonNegative = 0.0
    """token reward = score - beta * KL; 0 is off."""
    reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator in the reward."""
    loss_beta: NonNegative = 0.0
    """Weight of the KL in the loss; 0 is off."""
    loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator in the loss."""
    straight_through: bool = False
    """Use k2's gradient and the estimator's value in the loss."""
    target: NonNegative = 0.0
    """Above 0, nats per response that reward_beta is controlled towards (arXiv:1909.08593)."""
    horizon: Positive = 10_000
    """Trajectories over which the controller acts."""
    allow_both: bool = False
    """Permit KL in reward and loss at once."""
    follow_every: Count = 0
    """Above 0, updates between two moves of the reference to the policy (arXiv:2404.09656)."""
    follow_share: Share = 1.0
    """Share of the way of each move; 1 is all."""
    offload: bool = False
    """Keep the reference in CPU memory, and its layers on the GPU one by one."""

    def contradictions(self) -> Iterator[str]:
        """KL in two terms at once, and settings of unused parts."""
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
            yield f"follow_share ({self.follow_share:g}) is of a reference that moves: set follow_every"

    @property
    def on(self) -> bool:
        """True if a reference model is needed."""
        return self.reward_beta > 0 or self.loss_beta > 0


class NoExploration(Kind, frozen=True, tag="off"):
    """All tokens are treated alike."""


class TopEntropy(Kind, frozen=True, tag="top_entropy"):
    """Only tokens with the highest policy entropy enter the policy's loss (arXiv:2506.01939)."""

    share: Share = 0.2
    """Share of the trained tokens that enter it."""


class ClipCov(Kind, frozen=True, tag="clip_cov"):
    """A few random tokens of high covariance are dropped from the policy's loss (arXiv:2505.22617)."""

    share: Share = 0.0002
    """Share of the trained tokens that are dropped, at least one in the band."""
    band: tuple[float, float] = (1.0, 5.0)
    """Smallest and largest covariance of advantage and log-prob."""

    def contradictions(self) -> Iterator[str]:
        """The band must rise."""
        if not self.band[0] < self.band[1]:
            yield f"band must rise: {self.band[0]} is not below {self.band[1]}"


class KlCov(Kind, frozen=True, tag="kl_cov"):
    """Tokens of the highest covariance get a KL penalty to the proximal policy (arXiv:2505.22617)."""

    share: Share = 0.002
    """Share of the trained tokens that get it, at least one."""
    coefficient: PositiveFloat = 1.0
    """Weight of their KL(proximal || current) in the policy's loss."""


Exploration: TypeAlias = NoExploration | TopEntropy | ClipCov | KlCov


class EntropyControl(Section, frozen=True):
    """Controls the weight of the entropy bonus (Skywork-OR1, arXiv:2505.22312); it starts at `entropy`."""

    target: NonNegative = 0.0
    """Above 0, the bonus is on while the entropy is at most this many nats per token."""
    step: PositiveFloat = 0.005
    """The weight rises by this after an update at or below the target, else falls."""
    range: tuple[NonNegative, NonNegative] = (0.0, 1.0)
    """Bounds of the weight."""

    def contradictions(self) -> Iterator[str]:
        """The range must rise."""
        if not self.range[0] < self.range[1]:
            yield f"range must rise: {self.range[0]} is not below {self.range[1]}"
