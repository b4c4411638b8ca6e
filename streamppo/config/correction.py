"""The corrections, rejections and filters of `[algorithm]`, which give tokens less weight or drop them from the loss.

Equations are in docs/algorithms.md.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, NonNegative, PositiveFloat, Section


class Banded(Kind, frozen=True):
    """Rules that drop tokens or responses whose ratio proximal / behavior is outside a band."""

    band: tuple[NonNegative, PositiveFloat]
    """The smallest and the largest ratio inside the band."""

    def contradictions(self) -> Iterator[str]:
        yield from _band_mistakes(self.band)


class RejectToken(Banded, frozen=True, tag="token"):
    """Drop tokens whose ratio is outside the band."""


class RejectSequence(Banded, frozen=True, tag="sequence"):
    """Drop responses whose product of ratios is outside the band."""


class RejectGeometric(Banded, frozen=True, tag="geometric"):
    """Drop responses whose geometric mean of ratios is outside the band."""


class RejectOutlier(Banded, frozen=True, tag="outlier"):
    """Drop responses that contain a token whose ratio is outside the band."""


class RejectK3(Kind, frozen=True, tag="k3"):
    """Drop responses whose mean k3 estimate of KL(behavior || proximal) is above `at_most`."""

    at_most: PositiveFloat
    """Largest mean of w - 1 - log w of a kept response."""


Rejection: TypeAlias = RejectToken | RejectSequence | RejectGeometric | RejectOutlier | RejectK3


class NoCorrection(Kind, frozen=True, tag="off"):
    """Every token has weight 1: the gradient is biased by lag."""


class Reject(Kind, frozen=True, tag="reject"):
    """Weight 0 for tokens that a rule drops, and 1 for all other tokens."""

    reject: tuple[Rejection, ...]
    """Rules, each kind at most once. A token is dropped if any rule drops it or its response."""

    def contradictions(self) -> Iterator[str]:
        yield from repeated(self.reject, "reject")
        if not self.reject:
            yield "reject has no rule: choose kind = 'off' for a weight of 1 everywhere"


class Weighted(Kind, frozen=True):
    """Corrections that weigh a token by the ratio proximal / behavior of the token or of its response."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio for the weight: the token's, the product over its response, or the geometric mean."""
    reject: tuple[Rejection, ...] = ()
    """Rules in addition to the weight, each kind once. A token is dropped if any rule drops it or its response."""

    def contradictions(self) -> Iterator[str]:
        yield from repeated(self.reject, "reject")


class Truncate(Weighted, frozen=True, tag="truncate"):
    """Weight min(proximal / behavior, cap): decoupled PPO (arXiv:2505.24298), or TIS; with `reject` it is MIS."""

    cap: PositiveFloat = 2.0
    """The largest weight."""
    floor: NonNegative = 0.0
    """The smallest weight."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.floor < self.cap:
            yield f"floor ({self.floor:g}) must be below cap ({self.cap:g})"


class Mask(Weighted, frozen=True, tag="mask"):
    """Weight proximal / behavior inside the band and 0 outside (IcePop, arXiv:2510.18855)."""

    band: tuple[NonNegative, PositiveFloat] = (0.5, 5.0)
    """The smallest and the largest ratio inside the band."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from _band_mistakes(self.band)


class Topr(Kind, frozen=True, tag="topr"):
    """Weight min(the response's ratio, 1) for negative advantages, else 1 (TOPR, arXiv:2503.14286)."""


class SecondMoment(Kind, frozen=True, tag="second_moment"):
    """M2PO (arXiv:2510.01161): drop tokens, largest log-ratio first, until the second moment is small."""

    threshold: PositiveFloat = 0.04
    """Largest second moment of the kept tokens' log-ratios."""


class CustomCorrection(Kind, frozen=True, tag="function"):
    """The user's function. A run tests the function on a synthetic batch before its first update."""

    function: str
    """A function from `CorrectionInputs` to the tokens' weights."""


Correction: TypeAlias = NoCorrection | Reject | Truncate | Mask | Topr | SecondMoment | CustomCorrection


class FilterTruncated(Kind, frozen=True, tag="truncated"):
    """Drop truncated completions from all losses (DAPO, arXiv:2503.14476)."""


class FilterOffPolicyNegative(Kind, frozen=True, tag="off_policy_negative"):
    """Drop far off-policy responses with a negative advantage (arXiv:2512.02556)."""

    delta: PositiveFloat
    """Largest mean log(behavior / current) of a kept response."""


Filter: TypeAlias = FilterTruncated | FilterOffPolicyNegative


class Resample(Section, frozen=True):
    """Defines which groups `zero_variance = "resample"` replaces by samples of other prompts."""

    component: str = ""
    """Reward component whose variance and mean are tested; empty: the score."""
    mean: tuple[float, ...] = ()
    """[smallest, largest] mean of a group that is not replaced; empty: any."""

    def contradictions(self) -> Iterator[str]:
        if self.mean and (len(self.mean) != 2 or self.mean[0] > self.mean[1]):
            yield f"mean must be empty or [smallest, largest]: {list(self.mean)}"


class Curriculum(Section, frozen=True):
    """Samples rows less often if their last groups had no learning signal (GRESO, arXiv:2506.02177).

    After z consecutive groups without a signal, a row is sampled with probability max(floor, repeat^z), and otherwise
    skipped. A group with a signal sets z to 0.

    Example: with repeat = 0.5 and floor = 0.1 the probabilities are 0.5, 0.25, 0.125 and then 0.1.
    """

    skip: Literal["right", "equal"] = "right"
    """A group has no signal if all its samples are right, or ("equal", as in GRESO) if its scores are equal."""
    repeat: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Probability of sampling a row after one group without a signal."""
    floor: Annotated[float, Meta(ge=0.01, le=1)] = 0.1
    """Smallest probability of sampling a row."""

    def contradictions(self) -> Iterator[str]:
        if self.floor > self.repeat:
            yield f"floor ({self.floor:g}) must be at most repeat ({self.repeat:g})"


def repeated(kinds: Sequence[Kind], field: str) -> Iterator[str]:
    """Yield a sentence for every kind that occurs more than once among `kinds`, the value of `field`."""
    tags = [str(kind.__struct_config__.tag) for kind in kinds]
    for tag in dict.fromkeys(tags):
        if tags.count(tag) > 1:
            yield f"{field} has the kind {tag!r} {tags.count(tag)} times: give it once"


def _band_mistakes(band: tuple[float, float]) -> Iterator[str]:
    if not band[0] < band[1]:
        yield f"band must rise: {band[0]} is not below {band[1]}"
    elif not band[0] <= 1 <= band[1]:
        yield f"band {band} must contain 1, the ratio of tokens of the learner's version"
