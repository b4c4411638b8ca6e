"""The policy losses of `[algorithm]`: one struct for each. Equations are in docs/algorithms.md."""

from collections.abc import Iterator
from typing import TypeAlias

from streamppo.config.base import Fraction, Kind, NonNegative, PositiveFloat


class Ranged(Kind, frozen=True):
    """Losses with a clipped ratio current / proximal."""

    range: tuple[Fraction, NonNegative] = (0.2, 0.2)
    """The ratio is clipped to [1 - first, 1 + second]."""


class Clip(Ranged, frozen=True, tag="clip"):
    """PPO's clipped surrogate (arXiv:1707.06347), with separate lower and upper bounds (DAPO, arXiv:2503.14476)."""

    dual: NonNegative = 0.0
    """Largest ratio for negative advantages (dual-clip PPO, arXiv:1912.09729); 0 is off."""

    def contradictions(self) -> Iterator[str]:
        # A bound of at most 1 would clip even the ratio 1.
        if 0 < self.dual <= 1:
            yield f"dual ({self.dual}) must be above 1, or 0 for off"


class Cispo(Kind, frozen=True, tag="cispo"):
    """CISPO (arXiv:2506.13585): log-probs, weighted by the clipped ratio without its gradient."""

    range: tuple[Fraction, NonNegative] = (1.0, 4.0)
    """The weight is clipped to [1 - first, 1 + second]."""


class Gspo(Kind, frozen=True, tag="gspo"):
    """GSPO (arXiv:2507.18071): PPO's clipped surrogate with the geometric mean of a response's ratios."""

    range: tuple[Fraction, NonNegative] = (3e-4, 4e-4)
    """The ratio is clipped to [1 - first, 1 + second]."""


class Gmpo(Kind, frozen=True, tag="gmpo"):
    """GMPO (arXiv:2507.20673): -advantage * the geometric mean of a response's clipped ratios."""

    range: tuple[NonNegative, NonNegative] = (0.4, 0.4)
    """The log-ratio of a token is clipped to [-first, second]."""


class Vespo(Kind, frozen=True, tag="vespo"):
    """VESPO (arXiv:2602.10693): log-probs, weighted by W^k * exp(lambda * (1 - W)) for a response's ratio W."""

    positive: tuple[NonNegative, NonNegative] = (2.0, 3.0)
    """[k, lambda] for advantages that are not negative."""
    negative: tuple[NonNegative, NonNegative] = (3.0, 2.0)
    """[k, lambda] for negative advantages."""


class SequenceClip(Ranged, frozen=True, tag="sequence_clip"):
    """PPO's clipped surrogate with the product of a response's ratios."""


class Reinforce(Kind, frozen=True, tag="reinforce"):
    """-advantage * log-prob."""


class ImportanceWeighted(Kind, frozen=True, tag="importance_weighted"):
    """-advantage * ratio, without a clip."""


class DppoTv(Kind, frozen=True, tag="dppo_tv"):
    """-advantage * ratio, except for tokens whose probability has moved too far in the advantage's direction."""

    delta: PositiveFloat = 0.15
    """Drop tokens whose probability moved further than this in the advantage's direction."""


class DppoKl(Kind, frozen=True, tag="dppo_kl"):
    """Like "dppo_tv", but a KL measures how far a token's probability has moved."""

    delta: PositiveFloat = 0.05
    """Drop tokens whose binary KL(proximal || current), in nats, exceeds this in the advantage's direction."""


class Ipo(Kind, frozen=True, tag="ipo"):
    """-advantage * ratio, except for tokens whose probability has moved too far in either direction."""

    eps: PositiveFloat = 0.3
    """Drop tokens whose probability moved further than this from the proximal probability."""


class Sapo(Kind, frozen=True, tag="sapo"):
    """SAPO (arXiv:2511.20347): a smooth gate on the ratio replaces clipping."""

    tau: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    """Steepness of the gate for [positive, negative] advantages."""


class CustomLoss(Kind, frozen=True, tag="function"):
    """The user's function. A run tests the function on a synthetic micro-batch before its first update."""

    function: str
    """A function from `LossInputs` to the tokens' losses."""


SequenceLoss: TypeAlias = Gspo | Gmpo | Vespo | SequenceClip
"""Losses with one ratio for each response."""
RatioLoss: TypeAlias = Clip | Cispo | SequenceLoss | Reinforce | ImportanceWeighted | DppoTv | DppoKl | Ipo | Sapo
"""Losses of the ratio current / proximal."""
PolicyLoss: TypeAlias = RatioLoss | CustomLoss
