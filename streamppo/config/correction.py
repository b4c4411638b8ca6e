"""Choices of `[algorithm]` that weight tokens down or drop them from the loss: corrections, rejections, filters.

Equations are in docs/algorithms.md.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, NonNegative, PositiveFloat, Section


class Banded(Kind, frozen=True):
    """Rules that keep ratios proximal / behavior inside a band."""

    band: tuple[NonNegative, PositiveFloat]
    """The smallest and largest kept ratio."""

    def contradictions(self) -> Iterator[str]:
        """The band must rise and contain 1, the ratio of the newest tokens."""
        yield from _band_mistakes(self.band)


class RejectToken(Banded, frozen=True, tag="token"):
    """Drop tokens whose ratio is outside the band."""


class RejectSequence(Banded, frozen=True, tag="sequence"):
    """Drop responses whose product of ratios is outside the band."""


class RejectGeometric(Banded, frozen=True, tag="geometric"):
    """Drop responses whose geometric mean of ratios is outside the band."""


class RejectOutlier(Banded, frozen=True, tag="outlier"):
    """Drop responses with a token whose ratio is outside the band."""


class RejectK3(Kind, frozen=True, tag="k3"):
    """Drop responses whose mean k3 estimate of KL(behavior || proximal) is large."""

    at_most: PositiveFloat
    """The largest kept mean, in nats per token."""


Rejection: TypeAlias = RejectToken | RejectSequence | RejectGeometric | RejectOutlier | RejectK3


class NoCorrection(Kind, frozen=True, tag="off"):
    """No weight: a biased gradient when lag > 0."""


class Reject(Kind, frozen=True, tag="reject"):
    """Weight 1 for tokens that every rule keeps, 0 for the others."""

    reject: tuple[Rejection, ...]
    """Rules, each kind at most once; tokens and responses that any rule rejects are dropped."""

    def contradictions(self) -> Iterator[str]:
        """At least one rule, each kind at most once."""
        yield from _repeated(self.reject, "reject")
        if not self.reject:
            yield "reject has no rule: choose kind = 'off' for a weight of 1 everywhere"


class Weighted(Kind, frozen=True):
    """Corrections by one ratio for each token, each response, or its geometric mean."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, of the response, or its geometric mean."""
    reject: tuple[Rejection, ...] = ()
    """Further rules, each kind at most once; tokens and responses that any rule rejects are dropped."""

    def contradictions(self) -> Iterator[str]:
        """Each kind of rule at most once."""
        yield from _repeated(self.reject, "reject")


class Truncate(Weighted, frozen=True, tag="truncate"):
    """min(proximal / behavior, cap): decoupled PPO (arXiv:2505.24298), TIS; with `reject` MIS."""

    cap: PositiveFloat = 2.0
    """The largest weight."""
    floor: NonNegative = 0.0
    """The smallest weight."""

    def contradictions(self) -> Iterator[str]:
        """The floor must be below the cap."""
        yield from super().contradictions()
        if not self.floor < self.cap:
            yield f"floor ({self.floor:g}) must be below cap ({self.cap:g})"


class Mask(Weighted, frozen=True, tag="mask"):
    """proximal / behavior inside the band, 0 outside (IcePop, arXiv:2510.18855)."""

    band: tuple[NonNegative, PositiveFloat] = (0.5, 5.0)
    """The smallest and largest kept ratio."""

    def contradictions(self) -> Iterator[str]:
        """The band must rise and contain 1, the ratio of the newest tokens."""
        yield from super().contradictions()
        yield from _band_mistakes(self.band)


class Topr(Kind, frozen=True, tag="topr"):
    """min(ratio of the response, 1) for negative advantages, else 1 (TOPR, arXiv:2503.14286)."""


class SecondMoment(Kind, frozen=True, tag="second_moment"):
    """M2PO (arXiv:2510.01161): drop the largest log-ratios until their second moment is small."""

    threshold: PositiveFloat = 0.04
    """The largest second moment that may remain."""


class CustomCorrection(Kind, frozen=True, tag="function"):
    """A custom correction; tested on a synthetic batch before the first update."""

    function: str
    """`package.module:name` or `path/file.py:name`: `CorrectionInputs` -> a weight for each token."""


Correction: TypeAlias = NoCorrection | Reject | Truncate | Mask | Topr | SecondMoment | CustomCorrection


class FilterTruncated(Kind, frozen=True, tag="truncated"):
    """Truncated completions train neither policy nor critic (DAPO, arXiv:2503.14476)."""


class FilterOffPolicyNegative(Kind, frozen=True, tag="off_policy_negative"):
    """Drop drifted responses with negative advantage: off-policy sequence masking (arXiv:2512.02556)."""

    delta: PositiveFloat
    """The largest kept mean log(behavior / current) of a response."""


Filter: TypeAlias = FilterTruncated | FilterOffPolicyNegative


class Resample(Section, frozen=True):
    """The groups that `zero_variance = "resample"` replaces by those of other prompts."""

    component: str = ""
    """Component that judges groups; empty is the score."""
    mean: tuple[float, ...] = ()
    """The smallest and largest kept mean of a group; empty is any."""

    def contradictions(self) -> Iterator[str]:
        """The range is empty, or a pair in ascending order."""
        if self.mean and (len(self.mean) != 2 or self.mean[0] > self.mean[1]):
            yield f"mean must be empty, or the smallest and the largest that is kept: {list(self.mean)}"


class Curriculum(Section, frozen=True):
    """Rows whose last groups had no learning signal are drawn less often (GRESO, arXiv:2506.02177).

    A row with z such groups in a row is sampled at its next turn with probability max(floor, repeat^z); else it is
    skipped. Any other group sets z to 0.

    Example: with repeat = 0.5 and floor = 0.1 these are 0.5, 0.25, 0.125 and then 0.1.
    """

    skip: Literal["right", "equal"] = "right"
    """Skip rows whose samples were all right, or all of equal score, as GRESO does: then those always wrong, too."""
    repeat: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Probability of sampling a row again after one group without a signal; its powers after several."""
    floor: Annotated[float, Meta(ge=0.01, le=1)] = 0.1
    """Least probability: what was always right, or always wrong, may have changed."""

    def contradictions(self) -> Iterator[str]:
        """The floor lies below the first probability."""
        if self.floor > self.repeat:
            yield f"floor ({self.floor:g}) must be at most repeat ({self.repeat:g})"


def repeated_filters(filters: Sequence[Filter]) -> Iterator[str]:
    """Yield a sentence for every repeated kind of filter."""
    yield from _repeated(filters, "filters")


def _repeated(kinds: Sequence[Kind], field: str) -> Iterator[str]:
    tags = [str(kind.__struct_config__.tag) for kind in kinds]
    for tag in dict.fromkeys(tags):
        if tags.count(tag) > 1:
            yield f"{field} has the kind {tag!r} {tags.count(tag)} times: give it once"


def _band_mistakes(band: tuple[float, float]) -> Iterator[str]:
    if not band[0] < band[1]:
        yield f"band must rise: {band[0]} is not below {band[1]}"
    elif not band[0] <= 1 <= band[1]:
        yield f"band {band} must hold 1: it is the ratio of tokens of the learner's own version"
