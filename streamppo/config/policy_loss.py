"""The policy losses of `[algorithm]`: one struct for each. Equations are in docs/algorithms.md."""

from collections.abc import Iterator
from typing import TypeAlias

from streamppo.config.base import Fraction, Kind, NonNegative, PositiveFloat


class Ranged(Kind, frozen=True):
    """Surrogates with a clipped ratio."""

    range: tuple[Fraction, NonNegative] = (0.2, 0.2)
    """The ratio is clipped to [1 - first, 1 + second]."""


class Clip(Ranged, frozen=True, tag="clip"):
    """PPO's clipped surrogate (arXiv:1707.06347), with separate bounds (DAPO, arXiv:2503.14476)."""

    dual: NonNegative = 0.0
    """Bound on the ratio for negative advantages (arXiv:1912.09729); 0 is off."""

    def contradictions(self) -> Iterator[str]:
        """A bound of 1 or less would already act at ratio 1."""
        if 0 < self.dual <= 1:
            yield f"dual ({self.dual}) must be above 1, or 0 for off"


class Cispo(Kind, frozen=True, tag="cispo"):
    """The clipped ratio as a constant weight of log-probs (arXiv:2506.13585)."""

    range: tuple[Fraction, NonNegative] = (1.0, 4.0)
    """The weight is clipped to [1 - first, 1 + second]."""


class Gspo(Kind, frozen=True, tag="gspo"):
    """The clipped surrogate of the geometric mean of a response's ratios (arXiv:2507.18071)."""

    range: tuple[Fraction, NonNegative] = (3e-4, 4e-4)
    """The ratio is clipped to [1 - first, 1 + second]."""


class Gmpo(Kind, frozen=True, tag="gmpo"):
    """The geometric mean of a response's ratios, each clipped first (arXiv:2507.20673)."""

    range: tuple[NonNegative, NonNegative] = (0.4, 0.4)
    """The log-ratio of a token is clipped to [-first, second]."""


class Vespo(Kind, frozen=True, tag="vespo"):
    """Log-probs weighted by W^k * exp(lambda * (1 - W)), W the ratio of the response (arXiv:2602.10693)."""

    positive: tuple[NonNegative, NonNegative] = (2.0, 3.0)
    """k and lambda for other advantages."""
    negative: tuple[NonNegative, NonNegative] = (3.0, 2.0)
    """k and lambda for negative advantages."""


class SequenceClip(Ranged, frozen=True, tag="sequence_clip"):
    """The clipped surrogate of the product of a response's ratios."""


class Reinforce(Kind, frozen=True, tag="reinforce"):
    """-advantage * log-prob."""


class ImportanceWeighted(Kind, frozen=True, tag="importance_weighted"):
    """-advantage * ratio, unclipped."""


class DppoTv(Kind, frozen=True, tag="dppo_tv"):
    """-advantage * ratio, without tokens whose probability has moved too far in the advantage's direction."""

    delta: PositiveFloat = 0.15
    """The largest move of a probability."""


class DppoKl(Kind, frozen=True, tag="dppo_kl"):
    """-advantage * ratio, without tokens whose binary KL has grown too large in the advantage's direction."""

    delta: PositiveFloat = 0.05
    """The largest KL between a token's proximal and current probability, in nats."""


class Ipo(Kind, frozen=True, tag="ipo"):
    """-advantage * ratio, without tokens whose probability has moved too far in either direction."""

    eps: PositiveFloat = 0.3
    """The largest difference of a probability."""


class Sapo(Kind, frozen=True, tag="sapo"):
    """A soft gate in place of clipping (arXiv:2511.20347)."""

    tau: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    """Steepness for positive and for negative advantages."""


class CustomLoss(Kind, frozen=True, tag="function"):
    """A custom loss; tested on a synthetic micro-batch before the first update."""

    function: str
    """`package.module:name` or `path/file.py:name`: `LossInputs` -> a loss for each token."""


SequenceLoss: TypeAlias = Gspo | Gmpo | Vespo | SequenceClip
"""Losses with one ratio for a whole response."""
RatioLoss: TypeAlias = Clip | Cispo | SequenceLoss | Reinforce | ImportanceWeighted | DppoTv | DppoKl | Ipo | Sapo
"""Losses of the current and the proximal policy."""
PolicyLoss: TypeAlias = RatioLoss | CustomLoss
