"""Choices of `[algorithm]` that keep the policy's entropy up: special tokens of a batch, a controlled bonus."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, NonNegative, PositiveFloat, Section

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


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
