"""Choices of `[algorithm]` that keep the policy's entropy up: tokens singled out of a batch, a steered bonus."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, NonNegative, PositiveFloat, Section

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class NoExploration(Kind, frozen=True, tag="off"):
    """All tokens are treated alike."""


class TopEntropy(Kind, frozen=True, tag="top_entropy"):
    """Only the tokens at which the policy is least certain enter its loss (arXiv:2506.01939)."""

    share: Share = 0.2
    """The share of the trained tokens that enter it."""


class ClipCov(Kind, frozen=True, tag="clip_cov"):
    """A few tokens, drawn from those of high covariance, are left out of the policy's loss (arXiv:2505.22617)."""

    share: Share = 0.0002
    """The share of the trained tokens that are left out; at least one, where there is one in the band."""
    band: tuple[float, float] = (1.0, 5.0)
    """The least and the largest covariance of advantage and log-prob of a token that may be drawn."""

    def contradictions(self) -> Iterator[str]:
        """A band has two ends."""
        if not self.band[0] < self.band[1]:
            yield f"band must rise: {self.band[0]} is not below {self.band[1]}"


class KlCov(Kind, frozen=True, tag="kl_cov"):
    """The tokens of highest covariance pay for leaving the proximal policy (arXiv:2505.22617)."""

    share: Share = 0.002
    """The share of the trained tokens that pay; at least one."""
    coefficient: PositiveFloat = 1.0
    """Weight of their KL(proximal || current) in the policy's loss."""


Exploration: TypeAlias = NoExploration | TopEntropy | ClipCov | KlCov


class EntropyControl(Section, frozen=True):
    """Steers the weight of the entropy bonus (Skywork-OR1, arXiv:2505.22312); `entropy` is the first."""

    target: NonNegative = 0.0
    """Above 0, the bonus is given while the entropy, in nats per token, is at most this, and its weight is steered."""
    step: PositiveFloat = 0.005
    """The weight rises by this after an update whose entropy was at most the target, and falls by it otherwise."""
    range: tuple[NonNegative, NonNegative] = (0.0, 1.0)
    """The weight stays within these."""

    def contradictions(self) -> Iterator[str]:
        """A range has two ends."""
        if not self.range[0] < self.range[1]:
            yield f"range must rise: {self.range[0]} is not below {self.range[1]}"
